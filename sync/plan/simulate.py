"""Runs all programs of a plan on symbols: every payload slot carries the id of a checkpoint element. Pure.

What it proves for a plan: the programs agree with each other; they cannot deadlock even if every worker finishes one
bucket before it starts the next and no send completes before its receive; and each runtime element that comes from the
checkpoint is written exactly once, with the right element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.layout.elements import Ids, paint, strided
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.plan.program import BucketProgram, Piece, Program
from rlbridge.transport.errors import PlanError

_Layers = list[dict[str, Ids]]
"""Ids by runtime tensor; more than one layer where tied weights are several checkpoint tensors at once."""


class Simulation(msgspec.Struct, frozen=True):
    """What a simulated update moved.

    Attributes:
        sent_bytes, received_bytes: per worker, payloads only.
        rounds: steps that the update takes if every worker serves one bucket per step.
    """

    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    rounds: int


def simulate(
    spec: CheckpointSpec,
    senders: Mapping[str, SourceMap],
    receivers: Mapping[str, SourceMap],
    programs: Mapping[str, Program],
) -> Simulation:
    """Run ``programs`` (worker to program) and check them.

    Raises:
        PlanError: anything that the module's text promises does not hold.
    """
    buckets = _by_bucket(programs)
    rounds = _run_in_lockstep(programs, buckets)
    held = {worker: _layers(spec, layout) for worker, layout in senders.items()}
    wanted = {worker: paint(spec, layout.runtime, layout.boxes) for worker, layout in receivers.items()}
    written = {worker: {name: np.zeros_like(ids) for name, ids in its.items()} for worker, its in wanted.items()}
    for number, parts in sorted(buckets.items()):
        source = _check_tree(number, parts)
        if source not in held:
            raise PlanError(f"bucket {number} is packed by {source!r}, which is no sender")
        payload = _packed(parts[source], held[source])
        for worker, part in parts.items():
            if part.pieces and worker != source:  # a trainer that only passes a bucket on writes none of it
                _deliver(part, payload, wanted[worker], written[worker], worker)
    _check_written(wanted, written)
    return _totals(programs, rounds)


def _by_bucket(programs: Mapping[str, Program]) -> dict[int, dict[str, BucketProgram]]:
    buckets: dict[int, dict[str, BucketProgram]] = defaultdict(dict)
    for worker, program in programs.items():
        numbers = [part.bucket for part in program.buckets]
        if numbers != sorted(set(numbers)):
            raise PlanError(f"{worker}: buckets are not in the global order: {numbers}")
        for part in program.buckets:
            buckets[part.bucket][worker] = part
    return dict(buckets)


def _check_tree(number: int, parts: Mapping[str, BucketProgram]) -> str:
    """Every send meets one receive of the same size; returns the one source."""
    sends = sorted((worker, to) for worker, part in parts.items() for to in part.send_to)
    receives = sorted((part.recv_from, worker) for worker, part in parts.items() if part.recv_from is not None)
    if sends != receives:
        raise PlanError(f"bucket {number}: sends {sends} do not match receives {receives}")
    sources = [worker for worker, part in parts.items() if part.recv_from is None]
    if len(sources) != 1 or len({part.payload_bytes for part in parts.values()}) != 1:
        raise PlanError(f"bucket {number}: sources {sources}, or sizes that differ")
    return sources[0]


def _run_in_lockstep(programs: Mapping[str, Program], buckets: Mapping[int, Mapping[str, BucketProgram]]) -> int:
    """Advance workers bucket by bucket; a hop happens only while both of its ends are at that bucket."""
    at = dict.fromkeys(programs, 0)
    got: set[tuple[int, str]] = set()
    sent: set[tuple[int, str, str]] = set()
    rounds = 0
    while any(at[worker] < len(programs[worker].buckets) for worker in programs):
        now = {w: p.buckets[at[w]] for w, p in programs.items() if at[w] < len(p.buckets)}
        hops = [
            (part.bucket, worker, to)
            for worker, part in now.items()
            if part.recv_from is None or (part.bucket, worker) in got
            for to in part.send_to
            if (part.bucket, worker, to) not in sent and to in now and now[to].bucket == part.bucket
        ]
        sent |= set(hops)
        got |= {(number, to) for number, _, to in hops}
        finished = [
            worker
            for worker, part in now.items()
            if (part.recv_from is None or (part.bucket, worker) in got)
            and all((part.bucket, worker, to) in sent for to in part.send_to)
        ]
        if not hops and not finished:
            raise PlanError("deadlock: " + ", ".join(f"{w} waits in bucket {p.bucket}" for w, p in sorted(now.items())))
        for worker in finished:
            at[worker] += 1
        rounds += 1
    return rounds


def _layers(spec: CheckpointSpec, layout: SourceMap) -> _Layers:
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    for box in layout.aliases:
        by_tensor[box.tensor].append(box)
    return [paint(spec, layout.runtime, boxes) for boxes in [layout.boxes, *by_tensor.values()]]


def _slots(payload: NDArray[np.int64], piece: Piece) -> NDArray[np.int64]:
    """The part of ``payload`` (``[..., bytes]``) that stands for the piece's elements, one slot each."""
    width = item_bytes(piece.dtype)
    elements = int(np.prod(piece.count))
    if piece.at_bytes % width:
        raise PlanError(f"a piece of {piece.runtime!r} is not aligned: byte {piece.at_bytes}, {piece.dtype}")
    return payload[..., piece.at_bytes : piece.at_bytes + elements * width : width]


def _packed(part: BucketProgram, layers: _Layers) -> NDArray[np.int64]:
    """Ids by payload byte, ``[layers, payload_bytes]``; an element's id stands at its first byte, -1 elsewhere."""
    payload = np.full((len(layers), part.payload_bytes), -1, np.int64)
    packed_bytes = 0
    for piece in part.pieces:
        slots = _slots(payload, piece)
        if (slots != -1).any():
            raise PlanError(f"bucket {part.bucket}: two pieces share payload bytes at {piece.at_bytes}")
        for layer, ids in enumerate(layers):
            slots[layer] = strided(ids[piece.runtime], piece.offset, piece.count, piece.strides).reshape(-1)
        packed_bytes += slots.shape[-1] * item_bytes(piece.dtype)
    if packed_bytes != part.payload_bytes:
        raise PlanError(f"bucket {part.bucket}: {packed_bytes} of {part.payload_bytes} payload bytes are packed")
    return payload


def _deliver(
    part: BucketProgram, payload: NDArray[np.int64], wanted: dict[str, Ids], written: dict[str, Ids], worker: str
) -> None:
    for piece in part.pieces:
        view = (piece.offset, piece.count, piece.strides)
        expected = strided(wanted[piece.runtime], *view).reshape(-1)
        if not (_slots(payload, piece) == expected).any(axis=0).all():
            raise PlanError(f"bucket {part.bucket}: {worker} would write wrong elements to {piece.runtime!r}")
        strided(written[piece.runtime], *view)[...] += 1


def _check_written(wanted: Mapping[str, dict[str, Ids]], written: Mapping[str, dict[str, Ids]]) -> None:
    for worker, its in wanted.items():
        for name, ids in its.items():
            wrong = int((written[worker][name] != (ids > 0)).sum())
            if wrong:
                raise PlanError(f"{worker}: {wrong} elements of {name!r} are not written exactly once")


def _totals(programs: Mapping[str, Program], rounds: int) -> Simulation:
    return Simulation(
        sent_bytes={w: sum(b.payload_bytes * len(b.send_to) for b in p.buckets) for w, p in programs.items()},
        received_bytes={w: sum(b.payload_bytes for b in p.buckets if b.recv_from) for w, p in programs.items()},
        rounds=rounds,
    )
