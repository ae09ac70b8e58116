"""What a plan says of itself: bytes by stage and link, the worst link, and how far that is from the bound. Pure."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from rlbridge.sync.plan.atoms import Ints
from rlbridge.sync.plan.tables import STAGES

if TYPE_CHECKING:
    from rlbridge.sync.plan.predict import Prediction
    from rlbridge.sync.plan.transfer_plan import TransferPlan

LinkBytes = dict[str, dict[str, int]]
"""Link (``out:NODE``, ``in:NODE``, ``send:WORKER``, ``take:WORKER``) to stage to bytes."""


def link_bytes(plan: TransferPlan, route_bytes: Ints | None = None) -> LinkBytes:
    """Payload bytes on every link that is used, by stage.

    Args:
        plan: any kind of plan.
        route_bytes: ``[R]`` bytes on each route, if not all of them.
    """
    nodes = [plan.topology.nodes[worker] for worker in plan.workers]
    found: LinkBytes = defaultdict(lambda: defaultdict(int))
    for (sender, receiver, stage), size_bytes in _pairs(plan, route_bytes).items():
        if nodes[sender] == nodes[receiver]:
            links = (f"send:{plan.workers[sender]}", f"take:{plan.workers[receiver]}")
        else:
            links = (f"out:{nodes[sender]}", f"in:{nodes[receiver]}")
        for link in links:
            found[link][STAGES[stage]] += size_bytes
    return {link: dict(found[link]) for link in sorted(found)}


def _pairs(plan: TransferPlan, route_bytes: Ints | None = None) -> dict[tuple[int, int, int], int]:
    """(sender, receiver, stage) to bytes."""
    routes, workers = plan.routes, len(plan.workers)
    keys = (routes.stage * workers + routes.sender) * workers + routes.receiver
    distinct, which = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(distinct), np.int64)
    route_bytes = plan.cargo.route_bytes if route_bytes is None else route_bytes
    np.add.at(sums, which.reshape(-1), route_bytes[routes.route_of_hop])
    rest, receiver = np.divmod(distinct, workers)
    stage, sender = np.divmod(rest, workers)
    columns = (sender.tolist(), receiver.tolist(), stage.tolist())
    return dict(zip(zip(*columns, strict=True), sums.tolist(), strict=True))


def link_seconds(plan: TransferPlan, loads: LinkBytes) -> dict[str, float]:
    """Seconds that each link needs for its bytes at full rate."""
    return {link: sum(stages.values()) / link_rate(plan, link) for link, stages in loads.items()}


def link_rate(plan: TransferPlan, link: str) -> float:
    """Bytes per second of a link by name."""
    way, name = link.split(":", 1)
    if way in ("send", "take"):
        return plan.topology.rates_of(plan.topology.nodes[name]).local_bytes_per_s
    rates = plan.topology.rates_of(name)
    return rates.egress_bytes_per_s if way == "out" else rates.ingress_bytes_per_s


def report_of(plan: TransferPlan, prediction: Prediction | None = None) -> dict[str, Any]:
    """Totals of one update, ready for JSON; without ``prediction``, ``predicted_s`` is ``None``."""
    loads = link_bytes(plan)
    seconds = link_seconds(plan, loads)
    worst = max(seconds, key=lambda link: (seconds[link], link), default=None)
    by_stage = {str(stage): 0 for stage in STAGES}
    egress_bytes = external_bytes = 0
    nodes, senders = plan.topology.nodes, plan.correspondence.senders
    for (sender, receiver, stage), size_bytes in _pairs(plan).items():
        by_stage[STAGES[stage]] += size_bytes
        if plan.workers[sender] in senders and plan.workers[receiver] not in senders:
            egress_bytes += size_bytes
            external_bytes += size_bytes * (nodes[plan.workers[sender]] != nodes[plan.workers[receiver]])
    return {
        "kind": plan.kind,
        "bytes_total": sum(by_stage.values()),
        "trainer_egress_bytes": egress_bytes,
        "trainer_egress_external_bytes": external_bytes,
        "bytes_by_stage": by_stage,
        "bytes_by_link": loads,
        "worst_link": worst,
        "worst_link_s": seconds[worst] if worst else 0.0,
        "buckets": len(plan.buckets.route),
        "routes": len(plan.cargo.route_bytes),
        "atoms": plan.correspondence.table.atoms,
        "lower_bound_s": plan.bound.seconds,
        "lower_bound_terms_s": plan.bound.terms_s,
        "lower_bound_method": plan.bound.method,
        "over_bound": seconds[worst] / plan.bound.seconds if worst and plan.bound.seconds else 1.0,
        "predicted_s": prediction.seconds if prediction is not None else None,
    }
