"""The columns of a plan: routes, what travels on them, and the buckets it is cut into. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np

from rlbridge.sync.plan.atoms import AtomTable, Ints, Part


class Stage(StrEnum):
    """Which part of the weight path a hop belongs to."""

    GATHER = "gather"
    """Between trainers; only the baselines do that."""
    RECEIVE = "receive"
    """From a trainer to the first rollout worker of a node."""
    EXCHANGE = "exchange"
    """From a rollout worker to the first one of another node."""
    DISTRIBUTE = "distribute"
    """Between rollout workers of one node."""


STAGES = tuple(Stage)


class Hop(msgspec.Struct, frozen=True, array_like=True, order=True):
    """One edge of a tree."""

    sender: str
    receiver: str
    stage: Stage


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """``R`` trees of ``H`` hops in all; workers are numbers.

    Attributes:
        workers: name of each number, sorted.
        hop_begin: ``[R + 1]`` first hop of each route; parents come before children, so its sender is the source.
        sender, receiver, stage: ``[H]``; stages are indices into ``STAGES``.
    """

    workers: tuple[str, ...]
    hop_begin: Ints
    sender: Ints
    receiver: Ints
    stage: Ints

    @classmethod
    def of(cls, workers: Sequence[str], trees: Sequence[Sequence[Hop]]) -> Routes:
        """Columns of ``trees``."""
        number = {worker: i for i, worker in enumerate(workers)}
        stages = {stage: i for i, stage in enumerate(STAGES)}
        hops = [hop for tree in trees for hop in tree]
        return cls(
            tuple(workers),
            np.cumsum([0, *map(len, trees)]).astype(np.int64),
            np.array([number[hop.sender] for hop in hops], np.int64),
            np.array([number[hop.receiver] for hop in hops], np.int64),
            np.array([stages[hop.stage] for hop in hops], np.int64),
        )

    @property
    def source(self) -> Ints:
        """``[R]`` the worker that packs."""
        return self.sender[self.hop_begin[:-1]]

    @property
    def route_of_hop(self) -> Ints:
        """``[H]`` route of each hop."""
        return np.repeat(np.arange(len(self.hop_begin) - 1), np.diff(self.hop_begin))

    def hops(self, route: int) -> list[Hop]:
        """The hops of one route, by name."""
        inside = slice(int(self.hop_begin[route]), int(self.hop_begin[route + 1]))
        columns = (column[inside].tolist() for column in (self.sender, self.receiver, self.stage))
        return [Hop(self.workers[a], self.workers[b], STAGES[s]) for a, b, s in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class Cargo:
    """What travels on each route: segments of the atom table's axis, laid one behind the other on an axis of routes.

    Attributes:
        route_begin: ``[R + 1]`` positions on the axis of routes.
        segment_begin: ``[S + 1]`` positions on the axis of routes.
        segment_from: ``[S]`` where each segment begins on the atom table's axis.
    """

    route_begin: Ints
    segment_begin: Ints
    segment_from: Ints

    @classmethod
    def of(cls, routes: int, route: Ints, begin: Ints, size: Ints) -> Cargo:
        """Lay out segments (``[S]`` route, begin on the atom table's axis, bytes), joining neighbours."""
        order = np.lexsort((begin, route))
        route, begin, size = route[order], begin[order], size[order]
        new = np.ones(len(route), bool)
        new[1:] = (route[1:] != route[:-1]) | (begin[1:] != begin[:-1] + size[:-1])
        edges = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)
        segment_begin = np.append(edges[:-1][new], edges[-1])
        per_route = np.bincount(route, weights=None, minlength=routes)
        last = np.concatenate([[0], np.cumsum(per_route)])
        return cls(edges[last], segment_begin, begin[new])

    @property
    def route_bytes(self) -> Ints:
        """``[R]`` bytes on each route."""
        return np.diff(self.route_begin)

    def snapped(self, table: AtomTable, positions: Ints, units: Ints) -> Ints:
        """Positions on the axis of routes moved down to where cuts are simple; see ``AtomTable.snapped``."""
        if not positions.size:
            return positions
        segment = np.searchsorted(self.segment_begin, positions, side="right") - 1
        offset = positions - self.segment_begin[segment]
        start = self.segment_from[segment]
        inside: Ints = np.maximum(table.snapped(start + offset, units) - start, 0)
        return self.segment_begin[segment] + inside

    def parts(self, table: AtomTable, begin: int, end: int) -> Iterator[Part]:
        """What lies between two positions on the axis of routes, in order."""
        segment = int(np.searchsorted(self.segment_begin, begin, side="right")) - 1
        while begin < end:
            stop = min(end, int(self.segment_begin[segment + 1]))
            first = int(self.segment_from[segment]) - int(self.segment_begin[segment])
            yield from table.parts(first + begin, first + stop)
            begin, segment = stop, segment + 1


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """``K`` buckets in the one order that all workers keep: a bucket's number is its index.

    Attributes:
        route: ``[K]``.
        begin, end: ``[K]`` positions on the axis of routes.
    """

    route: Ints
    begin: Ints
    end: Ints

    @classmethod
    def of(cls, routes: Routes, cargo: Cargo, table: AtomTable, bucket_bytes: int) -> Buckets:
        """Cut each route's cargo into buckets of nearly equal size, at most ``bucket_bytes``, and number them.

        All routes advance in proportion, so that every link has work from start to end; among routes that are equally
        far, sources take turns.
        """
        grain_bytes = bucket_bytes // 16
        widest = max((key.item_bytes for key in table.classes), default=1)
        units = table.units(grain_bytes)
        counts = -(-cargo.route_bytes // bucket_bytes)
        route, begin, end = _cut(cargo, table, counts, units)
        # Where cuts are not simple at even distances, some buckets are too large: those routes get more of them.
        crowded = np.unique(route[end - begin > bucket_bytes])
        room = bucket_bytes - max(grain_bytes, widest) - 1
        counts[crowded] = -(-cargo.route_bytes[crowded] // room)
        route, begin, end = _cut(cargo, table, counts, units)
        order = _interleaved(route, routes)
        return cls(route[order], begin[order], end[order])

    @property
    def payload_bytes(self) -> Ints:
        """``[K]`` size of each payload."""
        return self.end - self.begin


def _cut(cargo: Cargo, table: AtomTable, counts: Ints, units: Ints) -> tuple[Ints, Ints, Ints]:
    """Route, begin and end of ``counts[r]`` buckets for each route, or of a few less."""
    route = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(route)) - np.repeat(np.cumsum(counts) - counts, counts)
    # In two steps, because index * total can be beyond 64 bits.
    whole, rest = np.divmod(cargo.route_bytes[route], counts[route])
    raw = cargo.route_begin[route] + index * whole + index * rest // counts[route]
    begin = np.where(index > 0, cargo.snapped(table, raw, units), raw)
    keep = np.append(begin[1:], cargo.route_begin[-1:]) > begin
    route, begin = route[keep], begin[keep]
    return route, begin, np.append(begin[1:], cargo.route_begin[-1:])[: len(begin)]


def _interleaved(route: Ints, routes: Routes) -> Ints:
    """The global order of buckets, given by route.

    Bucket ``i`` of ``n`` comes at progress ``(i + phase) / n``. The phases of routes that begin at one receiver are
    spread, so that at any time all first receivers, which have the most to pass on, have equally much to do.
    """
    source, first = routes.source, routes.receiver[routes.hop_begin[:-1]]
    counts = np.bincount(route, minlength=len(source))
    index = np.arange(len(route)) - np.repeat(np.cumsum(counts) - counts, counts)
    turn, of = _ranks(first)
    phase = (2 * turn + 1) / (2 * of)
    progress = (index + phase[route]) / counts[route]
    return np.lexsort((source[route], _ranks(source)[0][route], progress))


def _ranks(groups: Ints) -> tuple[Ints, Ints]:
    """For each member of ``groups`` (``[R]`` group numbers) its rank within its group, and the group's size."""
    sizes = np.bincount(groups)
    order = np.argsort(groups, kind="stable")
    ranks = np.empty(len(groups), np.int64)
    ranks[order] = np.arange(len(groups)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    return ranks, sizes[groups]
