"""From the guide's divisions to routes: which bytes take which tree of hops. Pure, columnar.

Every decision (who exports, which node passes on, who has it first in a node ...) divides the axis of the atom table
into intervals. Overlaid, they cut it into *runs*, within which everything is decided; runs with the same decisions and
needers take the same trees.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlbridge.sync.plan.atoms import AtomTable, Ints
from rlbridge.sync.plan.demand import Demand, Division, Guide, Names
from rlbridge.sync.plan.sharing import Choice, share
from rlbridge.sync.plan.tables import Hop, Stage
from rlbridge.transport.topology import Topology

Tree = tuple[Hop, ...]
"""Parents before children; the first sender is the source."""
_Interval = tuple[int, int, str]
"""Begin and end on the atom table's axis, and what was decided there."""
_GRAINS = 256
"""Decisions cut at about this part of a bucket: finer than a bucket, so that rounding costs less than one."""


def route(demand: Demand, guide: Guide, table: AtomTable, topology: Topology, bucket_bytes: int) -> RoutedRuns:
    """Decide everything, for all bytes.

    Returns:
        Runs and their trees; together the trees of a run reach each of its needers once.
    """
    cutter = _Cutter(table, max(1, min(64 * 1024, bucket_bytes // _GRAINS)))
    decisions = _decisions(demand, guide, table, cutter, bucket_bytes)
    edges = np.unique(np.concatenate([table.class_begin, *(d.edges() for d in decisions)]))
    begins = edges[:-1]
    of_class = np.searchsorted(table.class_begin, begins, side="right") - 1
    needers, who = _needers(table)
    rows = np.stack([who[of_class], *(d.at(begins) for d in decisions)], axis=1)
    distinct, alike = np.unique(rows, axis=0, return_inverse=True)
    planter = _Planter(topology, [d.kind for d in decisions], [d.options for d in decisions], needers)
    trees: dict[Tree, int] = {}
    forests = [[trees.setdefault(tree, len(trees)) for tree in planter.forest(row)] for row in distinct.tolist()]
    return RoutedRuns(begins, np.diff(edges), alike.reshape(-1), forests, list(trees))


@dataclass(frozen=True, slots=True, eq=False)
class RoutedRuns:
    """``N`` runs that together are the whole axis.

    Attributes:
        begins, sizes: ``[N]`` positions and bytes.
        forest: ``[N]`` index into ``forests``.
        forests: trees (indices into ``trees``) that bring a run to all of its needers.
        trees: distinct ones.
    """

    begins: Ints
    sizes: Ints
    forest: Ints
    forests: list[list[int]]
    trees: list[Tree]


class _Cutter:
    """Divides intervals by fractions, at places where cuts are simple."""

    def __init__(self, table: AtomTable, grain_bytes: int) -> None:
        self._table, self._units = table, table.units(grain_bytes)

    def cut(self, intervals: Sequence[tuple[int, int]], options: Names, fractions: Sequence[float]) -> list[_Interval]:
        """``intervals`` one behind the other, ``fractions[i]`` of their bytes for ``options[i]``."""
        taken = [i for i, fraction in enumerate(fractions) if fraction > 0]
        if len(taken) == 1:
            return [(begin, end, options[taken[0]]) for begin, end in intervals]
        ends = np.cumsum([end - begin for begin, end in intervals])
        targets = np.round(np.cumsum([fractions[i] for i in taken])[:-1] * ends[-1]).astype(np.int64)
        inside = np.minimum(np.searchsorted(ends, targets, side="right"), len(ends) - 1)
        last = np.array([end for _, end in intervals], np.int64)[inside]
        places = last - (ends[inside] - targets)
        cuts = self._table.snapped(places, self._units, nearest=True)
        return list(self._between(intervals, [options[i] for i in taken], inside.tolist(), cuts.tolist()))

    @staticmethod
    def _between(
        intervals: Sequence[tuple[int, int]], options: Sequence[str], inside: list[int], cuts: list[int]
    ) -> Iterator[_Interval]:
        option = 0
        for i, (begin, end) in enumerate(intervals):
            at = begin
            while option < len(cuts) and inside[option] == i:
                cut = max(at, cuts[option])
                if cut > at:
                    yield at, cut, options[option]
                at, option = cut, option + 1
            if at < end:
                yield at, end, options[option]


@dataclass(frozen=True, slots=True, eq=False)
class _Decision:
    """One kind of decision, by disjoint intervals.

    Attributes:
        kind: what is decided, and on which node.
        begins, ends, chosen: intervals, and an index into ``options`` for each.
    """

    kind: tuple[str, str]
    options: Names
    begins: Ints
    ends: Ints
    chosen: Ints

    @classmethod
    def of(cls, kind: tuple[str, str], intervals: list[_Interval]) -> _Decision:
        intervals = sorted(intervals)
        options = sorted({option for *_, option in intervals})
        number = {option: i for i, option in enumerate(options)}
        columns = np.array([(b, e, number[option]) for b, e, option in intervals], np.int64).reshape(-1, 3).T
        return cls(kind, tuple(options), *columns)

    def edges(self) -> Ints:
        return np.concatenate([self.begins, self.ends])

    def at(self, positions: Ints) -> Ints:
        """Per position the option's number, or -1 where there is nothing to decide."""
        index = np.searchsorted(self.begins, positions, side="right") - 1
        covered = (index >= 0) & (positions < np.append(self.ends, 0)[index])
        return np.where(covered, np.append(self.chosen, -1)[index], -1)


def _decisions(demand: Demand, guide: Guide, table: AtomTable, cutter: _Cutter, bucket_bytes: int) -> list[_Decision]:
    hubs = _divided(guide.hubs, table, cutter)
    found = [
        _Decision.of(("exporter", ""), _exporters(demand, table, cutter, guide.sources)),
        _Decision.of(("hub", ""), hubs),
    ]
    under = _Groups(hubs, bucket_bytes)
    for what, by_node in (("source", guide.local_sources), ("entry", guide.entries), ("hub", guide.local_hubs)):
        found += [
            _Decision.of((what, node), _divided(divisions, table, cutter, under))
            for node, divisions in by_node.items()
            if divisions
        ]
    return found


def _divided(
    divisions: Sequence[Division], table: AtomTable, cutter: _Cutter, under: _Groups | None = None
) -> list[_Interval]:
    """Intervals of all divisions; with ``under``, each of its groups is divided in the same way."""
    found: list[_Interval] = []
    for division in divisions:
        spans = _spans(table, division.classes)
        ways = sum(fraction > 0 for fraction in division.fractions)
        for group in under.split(spans, ways) if under is not None and ways > 1 else [spans]:
            found += cutter.cut(group, division.options, division.fractions)
    return found


class _Groups:
    """What each node passes on, so that the division within nodes can be the same for each of these parts.

    Otherwise a node would pass on only what one of its workers has first, and that worker would do all of its work.
    """

    def __init__(self, hubs: Sequence[_Interval], bucket_bytes: int) -> None:
        self._hubs = sorted(hubs)
        self._begins = [begin for begin, _, _ in self._hubs]
        self._bucket_bytes = bucket_bytes

    def split(self, spans: list[tuple[int, int]], ways: int) -> list[list[tuple[int, int]]]:
        """``spans`` by the node that passes them on, unless that makes parts smaller than a bucket."""
        groups: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for begin, end in spans:
            index = max(0, bisect_right(self._begins, begin) - 1)
            at = begin
            while index < len(self._hubs) and self._hubs[index][0] < end:
                first, last, node = self._hubs[index]
                if max(first, at) < min(last, end):
                    groups[node].append((max(first, at), min(last, end)))
                    at = min(last, end)
                index += 1
            if at < end:
                groups[""].append((at, end))
        total = sum(end - begin for begin, end in spans)
        if len(groups) > 1 and total >= len(groups) * ways * self._bucket_bytes:
            return list(groups.values())
        return [spans]


def _spans(table: AtomTable, classes: Sequence[int]) -> list[tuple[int, int]]:
    return [(int(table.class_begin[c]), int(table.class_begin[c + 1])) for c in classes]


def _exporters(demand: Demand, table: AtomTable, cutter: _Cutter, sources: Sequence[Division]) -> list[_Interval]:
    """Which holder of the exporting node packs: all of a node's holders get even work."""
    spans: dict[tuple[str, Names], list[tuple[int, int]]] = defaultdict(list)
    first = table.class_begin.tolist()
    for division in sources:
        for begin, end, node in cutter.cut(_spans(table, division.classes), division.options, division.fractions):
            spans[node, demand.homes[bisect_right(first, begin) - 1][node]].append((begin, end))
    groups = list(spans)
    choices = [
        Choice(sum(end - begin for begin, end in spans[group]), tuple(((worker, 1.0),) for worker in group[1]))
        for group in groups
    ]
    rates = {worker: 1.0 for _, workers in groups for worker in workers}
    found: list[_Interval] = []
    for group, fractions in zip(groups, share(choices, {}, rates).fractions, strict=True):
        found += cutter.cut(sorted(spans[group]), group[1], fractions)
    return found


def _needers(table: AtomTable) -> tuple[list[Names], Ints]:
    """Distinct sets of needers, and each class's index into them."""
    number: dict[Names, int] = {}
    of_class = [number.setdefault(key.needers, len(number)) for key in table.classes]
    return list(number), np.array(of_class, np.int64)


class _Planter:
    """Turns one row of decisions into trees."""

    def __init__(
        self,
        topology: Topology,
        kinds: Sequence[tuple[str, str]],
        options: Sequence[Names],
        needers: Sequence[Names],
    ) -> None:
        self._columns = list(zip(kinds, options, strict=True))
        self._needers = [self._by_node(topology, names) for names in needers]

    @staticmethod
    def _by_node(topology: Topology, workers: Names) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for worker in workers:
            found[topology.nodes[worker]].append(worker)
        return dict(sorted(found.items()))

    def forest(self, row: Sequence[int]) -> list[Tree]:
        """The trees of a row: ``[needers, decision ...]``. Slow hops come first in each, so that they start first."""
        users = self._needers[row[0]]
        decided = {
            kind: options[chosen] for (kind, options), chosen in zip(self._columns, row[1:], strict=True) if chosen >= 0
        }
        first: dict[str, list[Hop]] = defaultdict(list)
        within: dict[str, list[Hop]] = defaultdict(list)
        root_of: dict[str, str] = {}
        for node in users:
            source = decided.get(("source", node))
            if source is not None:
                root_of[node] = source
                first[source].append(Hop(source, decided["entry", node], Stage.RECEIVE))
        exporter = decided.get(("exporter", ""))
        if exporter is not None:
            remotes = [node for node in users if node not in root_of]
            hub = decided.get(("hub", ""), remotes[0])
            nearest = hub if hub in remotes else remotes[0]
            first[exporter].append(Hop(exporter, decided["entry", nearest], Stage.RECEIVE))
            hub_root = root_of.get(hub, exporter)
            root_of |= dict.fromkeys(remotes, hub_root) | {nearest: exporter}
            for node in _after(nearest, remotes):
                first[hub_root].append(Hop(decided["entry", hub], decided["entry", node], Stage.EXCHANGE))
        for node, workers in users.items():
            within[root_of[node]] += _spread(workers, decided["entry", node], decided.get(("hub", node)))
        return [(*hops, *within[root]) for root, hops in first.items()]


def _spread(workers: Sequence[str], entry: str, hub: str | None) -> list[Hop]:
    """From the worker of a node that has an element to the others, through ``hub`` if another one passes it on."""
    others = [worker for worker in _after(hub or entry, workers) if worker != entry]
    if hub is None or hub == entry:
        return [Hop(entry, worker, Stage.DISTRIBUTE) for worker in others]
    return [Hop(entry, hub, Stage.DISTRIBUTE), *(Hop(hub, worker, Stage.DISTRIBUTE) for worker in others)]


def _after(one: str, all_of_them: Sequence[str]) -> list[str]:
    """The others, beginning behind ``one``: if each served the first one first, all would crowd its link at once."""
    place = all_of_them.index(one)
    return [*all_of_them[place + 1 :], *all_of_them[:place]]
