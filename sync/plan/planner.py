"""From atoms and topology to a transfer plan. Pure and deterministic.

The rules: over the slow links each element leaves the trainers once and enters each node that needs it once; inside a
node it goes from the first worker that has it to the others. Only workers that need an element relay it. Which of the
workers that could do something does it is what the linear programme of the bound says, rounded to simple cuts.
"""

from __future__ import annotations

import numpy as np

from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.plan.bound import bound_of
from rlbridge.sync.plan.demand import demand_of, guide_of
from rlbridge.sync.plan.routes import RoutedRuns, route
from rlbridge.sync.plan.tables import Cargo, Routes
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import Topology

_LEAST_BUCKET_BYTES = 32
"""Two elements of the widest dtype."""


def plan_transfer(correspondence: Correspondence, topology: Topology, *, bucket_bytes: int) -> TransferPlan:
    """Plan one epoch: the same input gives the same plan, hash included, in every process.

    Args:
        correspondence: who has what and who needs it.
        topology: where the workers are, and how fast they are connected.
        bucket_bytes: upper size of a bucket's payload.

    Raises:
        PlanError: a worker has no node, or ``bucket_bytes`` is too small to hold an element.
    """
    check_plannable(correspondence, topology, bucket_bytes)
    table = correspondence.table
    demand = demand_of(table, topology)
    guide = guide_of(demand, table, topology)
    routed = route(demand, guide, table, topology, bucket_bytes)
    order = sorted(range(len(routed.trees)), key=routed.trees.__getitem__)
    routes = Routes.of(sorted(correspondence.digests), [routed.trees[i] for i in order])
    cargo = _cargo(routed, np.argsort(np.array(order, np.int64)))
    bound = bound_of(demand, guide, table, topology)
    return TransferPlan.of("planned", correspondence, topology, bound, routes, cargo, bucket_bytes)


def check_plannable(correspondence: Correspondence, topology: Topology, bucket_bytes: int) -> None:
    """Check what every kind of plan needs.

    Raises:
        PlanError: see ``plan_transfer``.
    """
    homeless = sorted(set(correspondence.digests) - set(topology.nodes))
    if homeless:
        raise PlanError(f"the topology does not say on which node these workers are: {', '.join(homeless)}")
    if bucket_bytes < _LEAST_BUCKET_BYTES:
        raise PlanError(f"bucket_bytes={bucket_bytes} cannot hold every dtype; give at least {_LEAST_BUCKET_BYTES}")


def _cargo(routed: RoutedRuns, route_of_tree: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Cargo:
    """Every run on each of its trees."""
    counts = np.array([len(forest) for forest in routed.forests], np.int64)
    members = np.array([tree for forest in routed.forests for tree in forest], np.int64)
    per_run = counts[routed.forest]
    run = np.repeat(np.arange(len(per_run)), per_run)
    within = np.arange(len(run)) - np.repeat(np.cumsum(per_run) - per_run, per_run)
    tree = members[(np.cumsum(counts) - counts)[routed.forest[run]] + within]
    return Cargo.of(len(routed.trees), route_of_tree[tree], routed.begins[run], routed.sizes[run])
