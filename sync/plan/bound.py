"""How fast an update could be at best: the least load of the busiest link that a plan under the one-copy rule can have.

The bound is the value of the linear programme of :mod:`demand`; the closed-form terms explain it. Each term is the time
of one link, or the mean over a set of links that must share a load, at full rate and without latency: none of them is
above the programme's value. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec

from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.plan.atoms import AtomTable
from rlbridge.sync.plan.demand import Demand, Guide, demand_of, guide_of
from rlbridge.transport.topology import Topology


class Bound(msgspec.Struct, frozen=True):
    """The least time, in seconds.

    Attributes:
        seconds: no plan under the one-copy rule can be faster.
        terms_s: closed-form lower bounds of it, by name.
        external_s, local_s: the least busiest link between nodes, and within them.
        method: ``"linear programme"``, or ``"closed form"`` where a programme would have been too large; then
            ``seconds`` is the greatest term.
    """

    seconds: float
    terms_s: dict[str, float]
    external_s: float
    local_s: float
    method: str


def lower_bound(correspondence: Correspondence, topology: Topology) -> Bound:
    """The bound of any plan for ``correspondence``.

    Raises:
        PlanError: a worker has no node.
    """
    demand = demand_of(correspondence.table, topology)
    return bound_of(demand, guide_of(demand, correspondence.table, topology), correspondence.table, topology)


def bound_of(demand: Demand, guide: Guide, table: AtomTable, topology: Topology) -> Bound:
    """The bound, from what the planner has worked out anyway."""
    terms = _Terms(demand, table, topology)
    terms_s = {
        "trainer_egress": terms.trainer_egress_s(),
        "node_import": terms.node_import_s(),
        "external_copies": terms.external_copies_s(),
        "local_copies": terms.local_copies_s(),
        "worker_import": terms.worker_import_s(),
    }
    exact = guide.external.exact and guide.local.exact
    external_s, local_s = guide.external.busiest_s, guide.local.busiest_s
    return Bound(
        seconds=max(external_s, local_s) if exact else max(terms_s.values()),
        terms_s=terms_s,
        external_s=external_s,
        local_s=local_s,
        method="linear programme" if exact else "closed form",
    )


class _Terms:
    def __init__(self, demand: Demand, table: AtomTable, topology: Topology) -> None:
        self._demand, self._topology = demand, topology
        self._sizes = table.class_bytes
        self._egress: dict[frozenset[str], int] = defaultdict(int)
        self._imports: dict[str, int] = defaultdict(int)
        self._copies, self._able = 0, set[str]()
        for key, classes in demand.external.items():
            size_bytes = int(self._sizes[classes].sum())
            self._egress[frozenset(key.homes)] += size_bytes
            self._copies += size_bytes * len(key.remotes)
            self._able |= {*key.homes, *key.relays}
            for node in key.remotes:
                self._imports[node] += size_bytes

    def _out_rate(self, nodes: Iterable[str]) -> float:
        return sum(self._topology.rates_of(node).egress_bytes_per_s for node in nodes)

    def trainer_egress_s(self) -> float:
        """What some node without a holder needs leaves its holders' nodes once; no node has less than its share."""
        shares = [
            sum(n for inside, n in self._egress.items() if inside <= home) / self._out_rate(home)
            for home in {*self._egress, frozenset[str]().union(*self._egress)}
            if home
        ]
        return max(shares, default=0.0)

    def node_import_s(self) -> float:
        """Each node imports once what it needs and does not hold."""
        rates = {node: self._topology.rates_of(node).ingress_bytes_per_s for node in self._imports}
        return max((n / rates[node] for node, n in self._imports.items()), default=0.0)

    def external_copies_s(self) -> float:
        """All copies over slow links, shared by all nodes that can send one."""
        return self._copies / self._out_rate(self._able) if self._able else 0.0

    def local_copies_s(self) -> float:
        """All copies inside a node, shared by its workers."""
        means = [0.0]
        for node, local in self._demand.local.items():
            workers: set[str] = set()
            copies = 0
            for key, classes in local.items():
                workers |= {*key.needers, *key.sources}
                copies += int(self._sizes[classes].sum()) * (len(key.needers) - (not key.sources))
            means.append(copies / len(workers) / self._topology.rates_of(node).local_bytes_per_s)
        return max(means)

    def worker_import_s(self) -> float:
        """What a worker needs and its node holds enters through its fast link."""
        found = [0.0]
        for node, local in self._demand.local.items():
            taken: dict[str, int] = defaultdict(int)
            for key, classes in local.items():
                for worker in key.needers if key.sources else ():
                    taken[worker] += int(self._sizes[classes].sum())
            found += [n / self._topology.rates_of(node).local_bytes_per_s for n in taken.values()]
        return max(found)
