"""What must move between and within nodes, and how the programme of :mod:`sharing` divides it. Pure.

Rules (one copy): what some node without a holder needs leaves the holders' nodes once; every such node imports it once;
nodes that have it pass it on to the others; inside a node it arrives once and its needers pass it on among themselves.
Links are named ``out:NODE`` and ``in:NODE`` (between nodes), ``send:WORKER`` and ``take:WORKER`` (within a node).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from rlbridge.sync.plan.atoms import AtomTable
from rlbridge.sync.plan.sharing import Choice, Loads, Shares, share
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import Topology

Names = tuple[str, ...]


class External(msgspec.Struct, frozen=True, array_like=True):
    """Classes that are alike between nodes.

    Attributes:
        homes: nodes with holders.
        remotes: nodes with needers and no holder; at least one.
        relays: nodes that may pass it on to the remotes: those, and the homes that have needers.
    """

    homes: Names
    remotes: Names
    relays: Names


class Local(msgspec.Struct, frozen=True, array_like=True):
    """Classes that are alike within one node: who needs them there, and who holds them there, if anybody."""

    needers: Names
    sources: Names


@dataclass(slots=True)
class Demand:
    """Classes by what they demand of the links; numbers are those of the table's classes, ascending.

    Attributes:
        external: classes that cross nodes.
        local: node to the classes that somebody needs there.
        homes: per class, node to its holders there.
    """

    external: dict[External, list[int]] = field(default_factory=lambda: defaultdict(list))
    local: dict[str, dict[Local, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    homes: list[Mapping[str, Names]] = field(default_factory=list)


def demand_of(table: AtomTable, topology: Topology) -> Demand:
    """Sort the classes of ``table`` by what they demand.

    Raises:
        PlanError: a worker has no node.
    """
    place = _Places(topology)
    demand = Demand()
    for c, key in enumerate(table.classes):
        homes, users = place.by_node(key.holders), place.by_node(key.needers)
        remotes = tuple(node for node in users if node not in homes)
        if remotes:
            relays = tuple(users) if len(remotes) > 1 else remotes
            demand.external[External(tuple(homes), remotes, relays)].append(c)
        for node, needers in users.items():
            demand.local[node][Local(needers, homes.get(node, ()))].append(c)
        demand.homes.append(homes)
    return demand


class _Places:
    def __init__(self, topology: Topology) -> None:
        self._nodes = topology.nodes
        self._known: dict[Names, Mapping[str, Names]] = {}

    def by_node(self, workers: Names) -> Mapping[str, Names]:
        """Node to those of ``workers`` that live there, both sorted."""
        found = self._known.get(workers)
        if found is None:
            homeless = [worker for worker in workers if worker not in self._nodes]
            if homeless:
                raise PlanError(f"the topology does not say on which node these workers are: {', '.join(homeless)}")
            groups: dict[str, list[str]] = defaultdict(list)
            for worker in workers:
                groups[self._nodes[worker]].append(worker)
            found = self._known[workers] = {node: tuple(groups[node]) for node in sorted(groups)}
        return found


class Division(msgspec.Struct, frozen=True, array_like=True):
    """How one decision about some classes is divided: ``fractions[i]`` of their bytes go to ``options[i]``."""

    classes: list[int]
    options: Names
    fractions: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Guide:
    """The best division of all work.

    Attributes:
        sources: home nodes that send the one copy over the slow links.
        hubs: nodes that pass it on to the other remote ones; where it has more than one.
        local_sources: node to which of its holders serves its needers.
        entries: node to the worker that has an element first.
        local_hubs: node to the worker that passes it on; where there are more than two.
        external, local: what the links of either kind have to do.
    """

    sources: list[Division]
    hubs: list[Division]
    local_sources: dict[str, list[Division]]
    entries: dict[str, list[Division]]
    local_hubs: dict[str, list[Division]]
    external: Shares
    local: Shares


def guide_of(demand: Demand, table: AtomTable, topology: Topology) -> Guide:
    """Divide the work over the links of ``topology`` so that the busiest one has the least."""
    sources, hubs, external = _divide_external(demand, table, topology)
    local_sources: dict[str, list[Division]] = {}
    entries: dict[str, list[Division]] = {}
    local_hubs: dict[str, list[Division]] = {}
    load_s: dict[str, float] = {}
    exact = True
    solved: dict[bytes, Shares] = {}
    for node in sorted(demand.local):
        problem = _LocalProblem(demand.local[node], table, topology.rates_of(node).local_bytes_per_s)
        # Nodes of equal replicas have equal problems: solved once, they also cut at equal places.
        shares = solved.get(problem.key)
        if shares is None:
            shares = solved[problem.key] = share(problem.choices, problem.base, problem.rates)
        local_sources[node], entries[node], local_hubs[node] = problem.divisions(shares)
        load_s |= problem.named(shares.load_s)
        exact &= shares.exact
    local = Shares([], load_s, exact)
    return Guide(sources, hubs, local_sources, entries, local_hubs, external, local)


def _divide_external(
    demand: Demand, table: AtomTable, topology: Topology
) -> tuple[list[Division], list[Division], Shares]:
    sizes = table.class_bytes
    choices: list[Choice] = []
    base: dict[str, float] = defaultdict(float)
    for key, classes in demand.external.items():
        size_bytes = int(sizes[classes].sum())
        choices.append(Choice(size_bytes, tuple(((f"out:{node}", 1.0),) for node in key.homes)))
        copies = float(len(key.remotes) - 1)
        choices.append(Choice(size_bytes if copies else 0, tuple(((f"out:{node}", copies),) for node in key.relays)))
        for node in key.remotes:
            base[f"in:{node}"] += size_bytes
    rates: dict[str, float] = {}
    for node in sorted(set(topology.nodes.values())):
        rates[f"out:{node}"] = topology.rates_of(node).egress_bytes_per_s
        rates[f"in:{node}"] = topology.rates_of(node).ingress_bytes_per_s
    shares = share(choices, base, rates)
    sources, hubs = [], []
    for i, (key, classes) in enumerate(demand.external.items()):
        sources.append(Division(classes, key.homes, shares.fractions[2 * i]))
        if len(key.remotes) > 1:
            hubs.append(Division(classes, key.relays, shares.fractions[2 * i + 1]))
    return sources, hubs, shares


class _LocalProblem:
    """One node's choices, in worker numbers of its own, so that nodes that are alike pose equal problems."""

    def __init__(self, local: Mapping[Local, list[int]], table: AtomTable, rate: float) -> None:
        self._local = local
        workers = sorted({worker for key in local for worker in (*key.needers, *key.sources)})
        self._name = {str(i): worker for i, worker in enumerate(workers)}
        number = {worker: name for name, worker in self._name.items()}
        self.choices: list[Choice] = []
        self.base: dict[str, float] = defaultdict(float)
        sizes = table.class_bytes
        for key, classes in local.items():
            self._add(
                int(sizes[classes].sum()), [number[worker] for worker in key.needers], [number[w] for w in key.sources]
            )
        self.rates = {f"{way}:{i}": rate for i in self._name for way in ("send", "take")}
        self.key = msgspec.msgpack.encode((self.choices, self.base, self.rates))

    def _add(self, size_bytes: int, needers: list[str], sources: list[str]) -> None:
        """Three choices: source, entry, hub; those that there is nothing to decide about have size 0."""
        many = len(needers) - 1
        for worker in needers if many or sources else ():
            self.base[f"take:{worker}"] += size_bytes
        from_source: tuple[Loads, ...] = tuple(((f"send:{worker}", 1.0),) for worker in sources) or ((),)
        self.choices.append(Choice(size_bytes if sources else 0, from_source))
        if sources:  # every needer is served within the node; the entry passes on to all others
            entry: list[Loads] = [((f"send:{worker}", float(many)),) for worker in needers]
            hub: list[Loads] = [()]
        else:  # the entry is served from outside and passes on once, to the hub
            entry = [((f"send:{worker}", 1.0), (f"take:{worker}", -1.0)) for worker in needers]
            hub = [((f"send:{worker}", float(many - 1)),) for worker in needers]
        self.choices.append(Choice(size_bytes if many else 0, tuple(entry)))
        self.choices.append(Choice(size_bytes if many > 1 and not sources else 0, tuple(hub)))

    def divisions(self, shares: Shares) -> tuple[list[Division], list[Division], list[Division]]:
        """Source, entry and hub of every group of classes."""
        found: tuple[list[Division], list[Division], list[Division]] = ([], [], [])
        for i, (key, classes) in enumerate(self._local.items()):
            source, entry, hub = shares.fractions[3 * i : 3 * i + 3]
            if key.sources:
                found[0].append(Division(classes, key.sources, source))
            found[1].append(Division(classes, key.needers, entry))
            if not key.sources and len(key.needers) > 2:
                found[2].append(Division(classes, key.needers, hub))
        return found

    def named(self, load_s: Mapping[str, float]) -> dict[str, float]:
        """Loads by the links' real names."""
        return dict(self._renamed(load_s))

    def _renamed(self, load_s: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        for link, seconds in load_s.items():
            way, number = link.split(":")
            yield f"{way}:{self._name[number]}", seconds
