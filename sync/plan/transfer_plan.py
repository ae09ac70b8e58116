"""The planner's result: numbered buckets with their routes, and each worker's program expanded from them on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from enum import StrEnum
from typing import Any

import msgspec

from rlbridge.sync.layout.algebra import Region, contains, region, restrict, size
from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.plan.program import BucketProgram, Piece, Program
from rlbridge.transport.errors import PlanError


class Stage(StrEnum):
    """Which part of the weight path a hop belongs to."""

    RECEIVE = "receive"
    """From a trainer to the first rollout worker of a node."""
    EXCHANGE = "exchange"
    """From a rollout worker to the first one of another node."""
    DISTRIBUTE = "distribute"
    """Between rollout workers of one node."""


class Hop(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One edge of a bucket's tree."""

    sender: str
    receiver: str
    stage: Stage


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What a bucket carries of one tensor: ``area`` row-major, in the wire dtype."""

    tensor: str
    area: Region
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return size(self.area) * item_bytes(self.dtype)


class PlannedBucket(msgspec.Struct, frozen=True, array_like=True):
    """One bucket. Every receiver of its tree needs all of its parts.

    Attributes:
        parts: in payload order.
        hops: parents before children; the first sender is the source.
        payload_bytes: sum over the parts.
    """

    parts: tuple[Part, ...]
    hops: tuple[Hop, ...]
    payload_bytes: int

    @property
    def source(self) -> str:
        """The worker that packs it."""
        return self.hops[0].sender


class TransferPlan(msgspec.Struct, frozen=True):
    """One epoch's plan.

    Attributes:
        hash: equal on all workers that hold the same plan; the same in every process.
        workers: all workers, sorted.
        senders: those that pack.
        buckets: a bucket's number is its index: the one order that all workers keep.
        layouts: worker to its layout.
        summary: what :meth:`report` tells.
    """

    hash: str
    workers: tuple[str, ...]
    senders: tuple[str, ...]
    buckets: list[PlannedBucket]
    layouts: dict[str, SourceMap]
    summary: dict[str, Any]

    def program(self, worker: str) -> Program:
        """The buckets that ``worker`` has a part in, as it sees them.

        Raises:
            PlanError: the plan does not know ``worker``.
        """
        if worker not in self.layouts:
            raise PlanError(f"worker {worker!r} is not in the plan, which has {', '.join(self.workers)}")
        boxes: dict[str, list[Box]] = defaultdict(list)
        for box in [*self.layouts[worker].boxes, *self.layouts[worker].aliases]:
            boxes[box.tensor].append(box)
        mine = (
            _bucket_program(number, bucket, worker, boxes)
            for number, bucket in enumerate(self.buckets)
            if any(worker in (hop.sender, hop.receiver) for hop in bucket.hops)
        )
        return Program(worker, self.hash, self.workers, tuple(mine))

    def report(self) -> dict[str, Any]:
        """Totals of one update, ready for JSON: bytes by stage, buckets, and the lower bound with its terms."""
        return dict(self.summary)


def _bucket_program(number: int, bucket: PlannedBucket, worker: str, boxes: dict[str, list[Box]]) -> BucketProgram:
    is_source = worker == bucket.source
    pieces: list[Piece] = []
    at_bytes = 0
    for part in bucket.parts:
        around = [box for box in boxes[part.tensor] if contains(region(box), part.area)]
        # A source packs one of its copies; a receiver fills all of them.
        pieces += _pieces(part, around[:1] if is_source else around, at_bytes)
        at_bytes += part.size_bytes
    return BucketProgram(
        bucket=number,
        payload_bytes=bucket.payload_bytes,
        recv_from=next((hop.sender for hop in bucket.hops if hop.receiver == worker), None),
        send_to=tuple(hop.receiver for hop in bucket.hops if hop.sender == worker),
        pieces=tuple(pieces),
    )


def _pieces(part: Part, boxes: Iterable[Box], at_bytes: int) -> list[Piece]:
    cut = [restrict(box, part.area) for box in boxes]
    return [Piece(box.runtime, box.offset, box.count, box.strides, part.dtype, at_bytes) for box in cut]
