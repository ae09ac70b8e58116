"""From atoms and topology to a transfer plan. Pure and deterministic.

The rules: over the slow links each element leaves the trainers once and enters each node that needs it once; inside a
node it goes from the first worker that has it to the others. Only workers that need an element relay it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction

import msgspec
import xxhash

from rlbridge.sync.correspondence import Atom, Correspondence
from rlbridge.sync.layout.algebra import split
from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.plan.bound import lower_bound
from rlbridge.sync.plan.transfer_plan import Hop, Part, PlannedBucket, Stage, TransferPlan
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import Topology

_CHUNK_BYTES = 64 * 1024
"""Work is balanced in portions of at least this size (or of a whole atom): below it, one copy more costs more."""
_CHUNKS_PER_WAY = 8
"""Portions that each worker which could take a class of atoms gets on average: balance to about an eighth."""
_LARGEST_ITEM_BYTES = 16

Route = tuple[Hop, ...]


def plan_transfer(correspondence: Correspondence, topology: Topology, *, bucket_bytes: int) -> TransferPlan:
    """Plan one epoch: the same input gives the same plan, hash included, in every process.

    Args:
        correspondence: who has what and who needs it.
        topology: where the workers are, and how fast they are connected.
        bucket_bytes: upper size of a bucket's payload.

    Raises:
        PlanError: a worker has no node, or ``bucket_bytes`` is too small to hold an element.
    """
    layouts = {**correspondence.senders, **correspondence.receivers}
    homeless = sorted(set(layouts) - set(topology.nodes))
    if homeless:
        raise PlanError(f"the topology does not say on which node these workers are: {', '.join(homeless)}")
    if bucket_bytes < _LARGEST_ITEM_BYTES:
        raise PlanError(f"bucket_bytes={bucket_bytes} cannot hold every dtype; give at least {_LARGEST_ITEM_BYTES}")
    router = _Router(topology)
    by_route: dict[Route, list[Part]] = defaultdict(list)
    for atom in _portions(correspondence.atoms, topology, bucket_bytes):
        for route in router.routes(atom):
            by_route[route].append(Part(atom.tensor, atom.area, atom.dtype))
    buckets = _numbered({route: _fill(route, parts, bucket_bytes) for route, parts in by_route.items()})
    workers = tuple(sorted(layouts))
    senders = tuple(sorted(correspondence.senders))
    return TransferPlan(
        hash=_plan_hash(workers, senders, buckets, layouts),
        workers=workers,
        senders=senders,
        buckets=buckets,
        layouts=layouts,
        summary=_summary(buckets, correspondence, topology),
    )


def _portions(atoms: Sequence[Atom], topology: Topology, bucket_bytes: int) -> list[Atom]:
    """Atoms cut so finely that their work can be shared out evenly; those with the least choice come first."""
    class_bytes: dict[tuple[tuple[str, ...], tuple[str, ...]], int] = defaultdict(int)
    for atom in atoms:
        class_bytes[atom.holders, atom.needers] += atom.size_bytes
    portions: list[Atom] = []
    for atom in sorted(atoms, key=lambda atom: len(atom.holders)):
        ways = max(len(atom.holders), len(atom.needers))
        fair = class_bytes[atom.holders, atom.needers] // (ways * _CHUNKS_PER_WAY)
        portion_bytes = min(bucket_bytes, max(_CHUNK_BYTES, fair))
        areas = split(atom.area, portion_bytes // item_bytes(atom.dtype))
        portions += [msgspec.structs.replace(atom, area=area) for area in areas]
    return portions


class _Router:
    """Chooses each portion's trees, always giving the work to whoever has the least so far."""

    def __init__(self, topology: Topology) -> None:
        self._nodes = topology.nodes
        self._sent_bytes: dict[str, int] = defaultdict(int)
        """Per worker: first-receiver work and everything that it sends."""
        self._external_bytes: dict[str, int] = defaultdict(int)
        """Per node: what leaves it over the slow links."""

    def routes(self, atom: Atom) -> list[Route]:
        """One tree per source; together they reach each needer once."""
        holders = self._by_node(atom.holders)
        needers = self._by_node(atom.needers)
        local = {node: workers for node, workers in needers.items() if node in holders}
        remote = {node: workers for node, workers in needers.items() if node not in holders}
        trees: dict[str, list[Hop]] = defaultdict(list)
        exporter = self._least_external(holders) if remote else None
        if exporter is not None:
            source = self._least_busy(holders[exporter])
            trees[source] += self._remote_tree(source, remote, atom.size_bytes)
        for node, workers in local.items():
            source = next((s for s in trees if self._nodes[s] == node), None) or self._least_busy(holders[node])
            trees[source] += self._node_tree(source, workers, Stage.RECEIVE, atom.size_bytes)
        return [tuple(hops) for hops in trees.values()]

    def _remote_tree(self, source: str, remote: dict[str, list[str]], size_bytes: int) -> list[Hop]:
        """Source to one node, and from its first worker to the first of each other node.

        A star whose centre changes from portion to portion loads the nodes' links as evenly as any other tree.
        """
        centre = self._least_external(remote)
        self._external_bytes[self._nodes[source]] += size_bytes
        hops = self._node_tree(source, remote[centre], Stage.RECEIVE, size_bytes)
        first = hops[0].receiver
        for node, workers in remote.items():
            if node != centre:
                self._external_bytes[centre] += size_bytes
                hops += self._node_tree(first, workers, Stage.EXCHANGE, size_bytes)
        return hops

    def _node_tree(self, source: str, workers: list[str], stage: Stage, size_bytes: int) -> list[Hop]:
        """Source to one worker of a node, and from there to its other ones."""
        first = self._least_busy(workers)
        others = [worker for worker in workers if worker != first]
        self._sent_bytes[source] += size_bytes
        self._sent_bytes[first] += size_bytes * (1 + len(others))
        return [Hop(source, first, stage), *(Hop(first, worker, Stage.DISTRIBUTE) for worker in others)]

    def _by_node(self, workers: Iterable[str]) -> dict[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for worker in sorted(workers):
            found[self._nodes[worker]].append(worker)
        return dict(sorted(found.items()))

    def _least_busy(self, workers: Iterable[str]) -> str:
        return min(workers, key=lambda worker: (self._sent_bytes[worker], worker))

    def _least_external(self, nodes: Iterable[str]) -> str:
        return min(nodes, key=lambda node: (self._external_bytes[node], node))


def _fill(route: Route, parts: list[Part], bucket_bytes: int) -> list[PlannedBucket]:
    """Parts of one route, filled into buckets in order; wide dtypes first, which keeps all of them aligned."""
    buckets: list[PlannedBucket] = []
    filling: list[Part] = []
    filled = 0
    for part in sorted(parts, key=lambda part: -item_bytes(part.dtype)):
        if filling and filled + part.size_bytes > bucket_bytes:
            buckets.append(PlannedBucket(tuple(filling), route, filled))
            filling, filled = [], 0
        filling.append(part)
        filled += part.size_bytes
    return [*buckets, PlannedBucket(tuple(filling), route, filled)]


def _numbered(by_route: dict[Route, list[PlannedBucket]]) -> list[PlannedBucket]:
    """The global order: all routes advance in proportion, so that every link has work from start to end."""
    seen: dict[str, int] = defaultdict(int)
    ordered: list[tuple[Fraction, int, str, PlannedBucket]] = []
    for route in sorted(by_route):
        source = route[0].sender
        for i, bucket in enumerate(by_route[route]):
            # Among routes that are equally far, sources take turns.
            ordered.append((Fraction(2 * i + 1, 2 * len(by_route[route])), seen[source], source, bucket))
        seen[source] += 1
    return [bucket for *_, bucket in sorted(ordered, key=lambda entry: entry[:3])]


def _plan_hash(
    workers: tuple[str, ...], senders: tuple[str, ...], buckets: list[PlannedBucket], layouts: dict[str, SourceMap]
) -> str:
    content = msgspec.json.encode((workers, senders, buckets, layouts), order="deterministic")
    return xxhash.xxh3_128_hexdigest(content)


def _summary(buckets: list[PlannedBucket], correspondence: Correspondence, topology: Topology) -> dict[str, object]:
    by_stage = dict.fromkeys(map(str, Stage), 0)
    egress_bytes = external_egress_bytes = 0
    for bucket in buckets:
        for hop in bucket.hops:
            by_stage[hop.stage] += bucket.payload_bytes
            if hop.sender in correspondence.senders:
                egress_bytes += bucket.payload_bytes
                if topology.nodes[hop.sender] != topology.nodes[hop.receiver]:
                    external_egress_bytes += bucket.payload_bytes
    terms = lower_bound(correspondence.atoms, topology)
    return {
        "bytes_total": sum(by_stage.values()),
        "trainer_egress_bytes": egress_bytes,
        "trainer_egress_external_bytes": external_egress_bytes,
        "bytes_by_stage": by_stage,
        "buckets": len(buckets),
        "atoms": len(correspondence.atoms),
        "lower_bound_s": max(terms.values(), default=0.0),
        "lower_bound_terms_s": terms,
    }
