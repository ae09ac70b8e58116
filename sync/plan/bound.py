"""How fast an update could be at best: loads that no plan under the one-copy rule can avoid. Pure.

Each term is the time of one link, or the mean over a set of links that must share a load, at full rate and without
latency. The largest one is a lower bound of the transfer time; it is tight where the work can be shared out evenly.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from rlbridge.sync.correspondence import Atom
from rlbridge.transport.topology import Topology


def lower_bound(atoms: Iterable[Atom], topology: Topology) -> dict[str, float]:
    """Seconds per term; the bound is their maximum.

    ``external_bytes_per_s`` is the rate of one node's slow link and ``local_bytes_per_s`` that of one worker's fast
    one, each way.
    """
    loads = _Loads(topology.nodes)
    for atom in atoms:
        loads.add(atom)
    return {
        "trainer_egress": loads.trainer_egress_bytes() / topology.external_bytes_per_s,
        "node_import": loads.node_import_bytes() / topology.external_bytes_per_s,
        "external_copies": loads.external_copies_bytes() / topology.external_bytes_per_s,
        "local_copies": loads.local_copies_bytes() / topology.local_bytes_per_s,
        "worker_import": loads.worker_import_bytes() / topology.local_bytes_per_s,
    }


class _Loads:
    """Unavoidable bytes, added up atom by atom."""

    def __init__(self, nodes: Mapping[str, str]) -> None:
        self._nodes = nodes
        self._egress: dict[frozenset[str], int] = defaultdict(int)
        self._imports: dict[str, int] = defaultdict(int)
        self._external_bytes, self._external_nodes = 0, set[str]()
        self._local_bytes: dict[str, int] = defaultdict(int)
        self._local_workers: dict[str, set[str]] = defaultdict(set)
        self._worker_bytes: dict[str, int] = defaultdict(int)

    def add(self, atom: Atom) -> None:
        home = frozenset(self._nodes[worker] for worker in atom.holders)
        remote = {self._nodes[worker] for worker in atom.needers} - home
        if remote:
            self._egress[home] += atom.size_bytes
            self._external_bytes += atom.size_bytes * len(remote)
            self._external_nodes |= home | remote
        for node in remote:
            self._imports[node] += atom.size_bytes
            self._local_bytes[node] -= atom.size_bytes
        for worker in atom.needers:
            node = self._nodes[worker]
            self._local_bytes[node] += atom.size_bytes
            self._local_workers[node].add(worker)
            if node in home:
                self._worker_bytes[worker] += atom.size_bytes
        for worker in atom.holders:
            self._local_workers[self._nodes[worker]].add(worker)

    def trainer_egress_bytes(self) -> float:
        """What some node without a holder needs leaves its holders' nodes once; no node has less than its share."""
        shares = [sum(n for inside, n in self._egress.items() if inside <= home) / len(home) for home in self._egress]
        every = frozenset[str]().union(*self._egress)
        shares.append(sum(self._egress.values()) / max(1, len(every)))
        return max(shares)

    def node_import_bytes(self) -> float:
        """Each node imports once what it needs and does not hold."""
        return max(self._imports.values(), default=0)

    def external_copies_bytes(self) -> float:
        """All copies over slow links, shared by all nodes that can send one."""
        return self._external_bytes / max(1, len(self._external_nodes))

    def local_copies_bytes(self) -> float:
        """All copies inside a node, shared by its workers."""
        return max((n / len(self._local_workers[node]) for node, n in self._local_bytes.items()), default=0)

    def worker_import_bytes(self) -> float:
        """What a worker needs and its node holds enters through its fast link."""
        return max(self._worker_bytes.values(), default=0)
