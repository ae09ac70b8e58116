"""How others move weights, as plans of the same kind, so that the same executor and simulator compare them. Pure.

- ``broadcast``: each trainer pipeline stage gathers its tensors on one rank, which broadcasts them whole to every
  rollout rank, needed there or not. The broadcast is a pipelined chain through all ranks, node by node, as NCCL's ring.
- ``p2p``: the ranks of a stage gather what their targets need, and each writes the shards of its own targets straight
  to them; every target is served from the trainers, replicas included.

Both gather only needed elements, from one holder each, which favours them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise

import numpy as np

from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.plan.atoms import AtomClass, AtomTable
from rlbridge.sync.plan.bound import lower_bound
from rlbridge.sync.plan.planner import check_plannable
from rlbridge.sync.plan.routes import Tree
from rlbridge.sync.plan.tables import Cargo, Hop, Routes, Stage
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.topology import Topology


class BaselineKind(StrEnum):
    """Which baseline; see the module's text."""

    BROADCAST = "broadcast"
    """One rank per pipeline stage sends whole tensors to every rollout rank."""
    P2P = "p2p"
    """Every trainer rank serves some rollout ranks with their shards."""


def plan_baseline(
    kind: BaselineKind, correspondence: Correspondence, topology: Topology, *, bucket_bytes: int
) -> TransferPlan:
    """Plan one epoch as ``kind`` would move it; arguments and errors as for ``plan_transfer``."""
    check_plannable(correspondence, topology, bucket_bytes)
    table = correspondence.table
    plant: Callable[[AtomClass, str], Tree]
    if kind is BaselineKind.BROADCAST:
        plant = _Broadcast(table, correspondence, topology).tree
    else:
        plant = _P2p(table, correspondence, topology).tree
    turn: dict[tuple[str, ...], int] = defaultdict(int)
    trees: dict[Tree, int] = {}
    of_class: list[int] = []
    for key in table.classes:
        # Holders of the same elements take turns.
        source = key.holders[turn[key.holders] % len(key.holders)]
        turn[key.holders] += 1
        of_class.append(trees.setdefault(plant(key, source), len(trees)))
    routes = Routes.of(sorted(correspondence.digests), list(trees))
    cargo = Cargo.of(len(trees), np.array(of_class, np.int64), table.class_begin[:-1], table.class_bytes)
    bound = lower_bound(correspondence, topology)
    return TransferPlan.of(str(kind), correspondence, topology, bound, routes, cargo, bucket_bytes)


def pipeline_stages(table: AtomTable) -> dict[str, list[str]]:
    """Trainer rank to the ranks of its pipeline stage: those that it shares tensors with, also through others."""
    first_of: dict[str, str] = {}
    joined: dict[str, str] = {}

    def root(worker: str) -> str:
        while joined.setdefault(worker, worker) != worker:
            worker = joined[worker]
        return worker

    of_class = np.searchsorted(table.class_begin, table.block_begin[:-1], side="right") - 1
    for block, c in zip(table.blocks, of_class.tolist(), strict=True):
        # Tensors of a block are cut alike everywhere, so that one of them stands for all.
        first = first_of.setdefault(block.tensors[0], table.classes[c].holders[0])
        for worker in table.classes[c].holders:
            joined[root(worker)] = root(first)
    ranks: dict[str, list[str]] = defaultdict(list)
    for worker in sorted(joined):
        ranks[root(worker)].append(worker)
    return {worker: ranks[root(worker)] for worker in joined}


def _in_order(workers: Sequence[str], topology: Topology) -> list[str]:
    """Node by node."""
    return sorted(workers, key=lambda worker: (topology.nodes[worker], worker))


class _Broadcast:
    def __init__(self, table: AtomTable, correspondence: Correspondence, topology: Topology) -> None:
        self._root = {worker: ranks[0] for worker, ranks in pipeline_stages(table).items()}
        self._nodes: Mapping[str, str] = topology.nodes
        self._chain = _in_order([*correspondence.receivers], topology)

    def tree(self, key: AtomClass, source: str) -> Tree:
        root = self._root[source]
        source = root if root in key.holders else source
        hops = [] if source == root else [Hop(source, root, Stage.GATHER)]
        hops.append(Hop(root, self._chain[0], Stage.RECEIVE))
        for sender, receiver in pairwise(self._chain):
            near = self._nodes[sender] == self._nodes[receiver]
            hops.append(Hop(sender, receiver, Stage.DISTRIBUTE if near else Stage.EXCHANGE))
        return tuple(hops)


class _P2p:
    def __init__(self, table: AtomTable, correspondence: Correspondence, topology: Topology) -> None:
        self._ranks = {worker: _in_order(ranks, topology) for worker, ranks in pipeline_stages(table).items()}
        self._number = {worker: i for i, worker in enumerate(_in_order([*correspondence.receivers], topology))}

    def tree(self, key: AtomClass, source: str) -> Tree:
        ranks = self._ranks[source]
        targets: dict[str, list[str]] = defaultdict(list)
        for worker in key.needers:
            targets[ranks[self._number[worker] % len(ranks)]].append(worker)
        gather = [Hop(source, server, Stage.GATHER) for server in targets if server != source]
        return (*gather, *(Hop(server, to, Stage.RECEIVE) for server, its in targets.items() for to in its))
