"""The planner's result: columns for the whole, and each worker's program expanded from them on demand."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import xxhash

from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.layout.algebra import Region
from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.plan.atoms import Part
from rlbridge.sync.plan.bound import Bound
from rlbridge.sync.plan.program import BucketProgram, Piece, Program
from rlbridge.sync.plan.report import report_of
from rlbridge.sync.plan.tables import Buckets, Cargo, Routes
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import Topology

if TYPE_CHECKING:
    from rlbridge.sync.plan.predict import Prediction


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """One epoch's plan.

    Attributes:
        kind: ``"planned"``, or the baseline that it is.
        hash: equal on all workers that hold the same plan; the same in every process.
        bucket_bytes: upper size of a bucket.
        correspondence, topology: what it was made for.
        bound: the least time that any plan under the one-copy rule could take for it.
        routes, cargo, buckets: what goes where, and in which order.
    """

    kind: str
    hash: str
    bucket_bytes: int
    correspondence: Correspondence
    topology: Topology
    bound: Bound
    routes: Routes
    cargo: Cargo
    buckets: Buckets

    @classmethod
    def of(
        cls,
        kind: str,
        correspondence: Correspondence,
        topology: Topology,
        bound: Bound,
        routes: Routes,
        cargo: Cargo,
        bucket_bytes: int,
    ) -> TransferPlan:
        """Cut ``cargo`` into buckets and take the hash."""
        buckets = Buckets.of(routes, cargo, correspondence.table, bucket_bytes)
        content = xxhash.xxh3_128()
        names = (kind, routes.workers, sorted(correspondence.senders), correspondence.digests)
        content.update(msgspec.msgpack.encode((*names, correspondence.table.digest())))
        for columns in (routes, cargo, buckets):
            for name in columns.__slots__:
                column = getattr(columns, name)
                if isinstance(column, np.ndarray):
                    content.update(np.ascontiguousarray(column, "<i8").tobytes())
        return cls(kind, content.hexdigest(), bucket_bytes, correspondence, topology, bound, routes, cargo, buckets)

    @property
    def workers(self) -> tuple[str, ...]:
        """All workers, sorted."""
        return self.routes.workers

    def program(self, worker: str) -> Program:
        """The buckets that ``worker`` has a part in, as it sees them.

        Raises:
            PlanError: the plan does not know ``worker``.
        """
        if worker not in self.correspondence.digests:
            raise PlanError(f"worker {worker!r} is not in the plan, which has {', '.join(self.workers)}")
        number = self.workers.index(worker)
        touched = (self.routes.sender == number) | (self.routes.receiver == number)
        mine = {int(r): self._seen(int(r), worker) for r in np.unique(self.routes.route_of_hop[touched])}
        pieces = _Pieces(self.correspondence, worker)
        columns = (self.buckets.route, self.buckets.begin, self.buckets.end)
        chosen = np.flatnonzero(np.isin(self.buckets.route, list(mine)))
        found = []
        for bucket, route, begin, end in zip(chosen.tolist(), *(c[chosen].tolist() for c in columns), strict=True):
            recv_from, send_to = mine[route]
            parts = self.cargo.parts(self.correspondence.table, begin, end)
            its = pieces.of(parts, packs=recv_from is None)
            found.append(BucketProgram(bucket, end - begin, recv_from, send_to, its))
        return Program(worker, self.hash, self.workers, tuple(found))

    def _seen(self, route: int, worker: str) -> tuple[str | None, tuple[str, ...]]:
        hops = self.routes.hops(route)
        recv_from = next((hop.sender for hop in hops if hop.receiver == worker), None)
        return recv_from, tuple(hop.receiver for hop in hops if hop.sender == worker)

    def report(self, prediction: Prediction | None = None) -> dict[str, Any]:
        """Totals of one update, ready for JSON: bytes by stage and link, the worst link, the bound with its terms."""
        return report_of(self, prediction)


class _Pieces:
    """Where the parts of buckets lie in one worker's tensors."""

    def __init__(self, correspondence: Correspondence, worker: str) -> None:
        layout = correspondence.senders.get(worker) or correspondence.receivers[worker]
        self._sends = worker in correspondence.senders
        self._boxes: Mapping[str, list[Box]] = defaultdict(list)
        for box in [*layout.boxes, *(layout.aliases if self._sends else ())]:
            self._boxes[box.tensor].append(box)

    def of(self, parts: Iterable[Part], *, packs: bool) -> tuple[Piece, ...]:
        """A source packs one of its copies; a receiver fills all of them; a trainer that passes on has none."""
        if self._sends and not packs:
            return ()
        pieces: list[Piece] = []
        at_bytes = 0
        for part in parts:
            for box in self._boxes.get(part.tensor, ()):
                place = _place(box, part.area)
                if place is not None:
                    offset, strides = place
                    pieces.append(Piece(box.runtime, offset, part.area.count, strides, part.dtype, at_bytes))
                    if packs:
                        break
            at_bytes += part.size_bytes
        return tuple(pieces)


def _place(box: Box, area: Region) -> tuple[int, tuple[int, ...]] | None:
    """Offset and strides of ``area`` in the runtime tensor of ``box``; ``None`` if the box does not hold all of it.

    What ``contains`` and ``restrict`` say, in one pass: large models have a hundred thousand pieces for each worker.
    """
    offset, strides = box.offset, []
    for d, n in enumerate(area.count):
        first, rest = divmod(area.start[d] - box.start[d], box.step[d])
        per_step, uneven = divmod(area.step[d], box.step[d]) if n > 1 else (0, 0)
        if rest or uneven or first < 0 or first + (n - 1) * per_step >= box.count[d]:
            return None
        offset += first * box.strides[d]
        strides.append(box.strides[d] * per_step)
    return offset, tuple(strides)
