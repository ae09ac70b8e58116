"""The whole weight path without processes: layouts, plan, programs, packed buckets, digests, unpacking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.packing import check_header, prepare, write_header
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.plan.simulate import simulate
from rlbridge.transport.topology import Topology


@dataclass
class Held:
    """One worker: what discovery found, and its live tensors."""

    layout: SourceMap
    live: Mapping[str, torch.Tensor]


def deliver(
    spec: CheckpointSpec,
    senders: Mapping[str, Held],
    receivers: Mapping[str, Held],
    *,
    nodes: int = 2,
    bucket_bytes: int = 1024,
) -> None:
    """Write what the senders hold into the live tensors of the receivers, by plan, over ``nodes`` nodes."""
    sending = {name: worker.layout for name, worker in senders.items()}
    receiving = {name: worker.layout for name, worker in receivers.items()}
    topology = Topology({name: f"node{i % nodes}" for i, name in enumerate([*sending, *receiving])})
    plan = plan_transfer(correspond(spec, sending, receiving), topology, bucket_bytes=bucket_bytes)
    programs = {name: plan.program(name) for name in [*sending, *receiving]}
    simulate(spec, sending, receiving, programs)  # every destination byte is written exactly once
    messages: dict[int, torch.Tensor] = {}
    for name, worker in senders.items():
        for bucket in programs[name].buckets:
            message = torch.empty(HEADER_BYTES + bucket.payload_bytes, dtype=torch.uint8)
            prepare(bucket, worker.live).pack(message[HEADER_BYTES:])
            write_header(message, 1, 2, bucket.bucket, message[HEADER_BYTES:])
            messages[bucket.bucket] = message
    for name, worker in receivers.items():
        for bucket in programs[name].buckets:
            check_header(messages[bucket.bucket], 1, 2, bucket.bucket)
            prepare(bucket, worker.live).unpack(messages[bucket.bucket][HEADER_BYTES:])
