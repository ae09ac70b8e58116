"""Plans of every kind run by the real executor over the in-process transport, within a tight budget."""

from __future__ import annotations

import anyio
import pytest
import torch
from random_jobs import layout

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.executor import BufferPool, Execution, Staging
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.topology import NodeRates, Topology

pytestmark = pytest.mark.anyio

SPEC = CheckpointSpec({"w0": TensorSpec((60, 32), "float32"), "w1": TensorSpec((24, 20), "bfloat16")})
SENDERS = {f"t{i}": layout(SPEC, dict.fromkeys(SPEC.tensors, (1, 2, i % 2))) for i in range(4)}
RECEIVERS = {f"r{i}": layout(SPEC, {"w0": (2, 2, i % 2), "w1": (-1, 3, i % 3)}) for i in range(6)}
NODES = {name: f"n{int(name[1]) // 2}" for name in SENDERS} | {name: f"n{1 + int(name[1]) // 2}" for name in RECEIVERS}
BUCKET_BYTES = 256
BUDGET_BYTES = 2 * (BUCKET_BYTES + HEADER_BYTES)


def tensors(held: SourceMap, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a worker with this layout holds of ``weights``."""
    return {
        box.runtime: weights[box.tensor][
            tuple(slice(a, a + n * s, s) for a, n, s in zip(box.start, box.count, box.step, strict=True))
        ].clone()
        for box in held.boxes
    }


def planned(kind: str) -> TransferPlan:
    correspondence = correspond(SPEC, SENDERS, RECEIVERS)
    topology = Topology(NODES, NodeRates(1e6, 1e6, 1e7), {"n3": NodeRates(3e5, 1e6, 1e7)})
    if kind == "planned":
        return plan_transfer(correspondence, topology, bucket_bytes=BUCKET_BYTES)
    return plan_baseline(BaselineKind(kind), correspondence, topology, bucket_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("kind", ["planned", *BaselineKind])
async def test_every_receiver_gets_the_weights(kind: str) -> None:
    plan = planned(kind)
    weights = {n: torch.randn(t.shape).to(getattr(torch, t.dtype)) for n, t in SPEC.tensors.items()}
    blank = {n: torch.zeros_like(w) for n, w in weights.items()}
    live = {n: tensors(held, weights) for n, held in SENDERS.items()}
    live |= {n: tensors(held, blank) for n, held in RECEIVERS.items()}
    hub = InprocHub()
    transports = {name: hub.transport(name) for name in plan.workers}
    pools = {name: BufferPool(BUDGET_BYTES) for name in plan.workers}

    async def run(name: str) -> None:
        program = plan.program(name)
        await Execution(
            program=program,
            transport=transports[name],
            epoch=1,
            version=1,
            treatment=Treatment.SEND if name in SENDERS else Treatment.UNPACK,
            prepared={bucket.bucket: prepare(bucket, live[name]) for bucket in program.buckets if bucket.pieces},
            pool=pools[name],
            staging=Staging(),
        ).run()

    for name, transport in transports.items():
        for peer in transports:
            if peer != name:
                await transport.connect(peer, transports[peer].address)
    with anyio.fail_after(30.0):
        async with anyio.create_task_group() as tasks:
            for name in plan.workers:
                tasks.start_soon(run, name)
    for name, held in RECEIVERS.items():
        for runtime, expected in tensors(held, weights).items():
            assert torch.equal(live[name][runtime], expected)
    assert max(pool.peak_bytes for pool in pools.values()) <= BUDGET_BYTES
    assert max(predict(plan, staging_bytes=BUDGET_BYTES).peak_staging_bytes.values()) <= BUDGET_BYTES
    for transport in transports.values():
        await transport.aclose()
