"""From a question to all that can be foretold of an update. Pure."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from rlbridge.planning.job import Job, Question
from rlbridge.planning.links import Load, loads_of
from rlbridge.planning.stalls import CopyCost, ModeStall, copy_cost, predict_stalls
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.bound import Bound
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.transfer_plan import TransferPlan

BYTES_PER_S_OF_GBPS = 1e9 / 8
_HOPS_MAX = 100_000
"""So many messages of a plan are simulated: a second or two."""


class Side(msgspec.Struct, frozen=True):
    """Trainers or rollouts: their layout's name, how many workers and nodes."""

    layout: str
    workers: int
    nodes: int


class PlanOutlook(msgspec.Struct, frozen=True):
    """What one kind of plan would do.

    Attributes:
        kind: ``planned``, ``broadcast`` or ``p2p``.
        predicted_s: of one update.
        over_bound, over_planned: the ratio to the bound, and to the planned transfer's predicted time.
        simulated: the share of the plan that the prediction ran.
        loads: links, see there.
        report: the planner's own report, bytes of each single link included.
    """

    kind: str
    predicted_s: float
    over_bound: float
    over_planned: float
    simulated: float
    loads: list[Load]
    report: dict[str, Any]


class Outlook(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
        question: as it was asked.
        parameters: of the checkpoint.
        update_bytes: one copy of what the rollouts need, on the wire.
        trainer, rollout: the sides.
        nodes: in all.
        bound: the least time, with its terms.
        explained_by: the greatest of the terms, and ``explained_share`` how much of the bound it is.
        plans: the planned transfer first, then the baselines.
        copies: what staging copies.
        stalls: of the planned transfer, by mode.
    """

    question: Question
    parameters: int
    update_bytes: int
    trainer: Side
    rollout: Side
    nodes: int
    bound: Bound
    explained_by: str
    explained_share: float
    plans: list[PlanOutlook]
    copies: CopyCost
    stalls: list[ModeStall]


def outlook_of(question: Question, job: Job) -> Outlook:
    """Plan, predict, compare.

    Raises:
        PlanError: ``bucket_bytes`` is too small to hold an element.
    """
    correspondence, topology = job.correspondence, job.topology
    planned = plan_transfer(correspondence, topology, bucket_bytes=question.bucket_bytes)
    plans = [_foretold(planned, question.staging_bytes, None)]
    for kind in BaselineKind:
        baseline = plan_baseline(kind, correspondence, topology, bucket_bytes=question.bucket_bytes)
        plans.append(_foretold(baseline, question.staging_bytes, plans[0].predicted_s))
    bound = planned.bound
    explained_by = max(bound.terms_s, key=bound.terms_s.__getitem__)
    copies = copy_cost(correspondence, question.copy_gbps * BYTES_PER_S_OF_GBPS)
    return Outlook(
        question=question,
        parameters=sum(math.prod(tensor.shape) for tensor in job.spec.tensors.values()),
        update_bytes=int(correspondence.table.class_bytes.sum()),
        trainer=_side(question.trainer, list(correspondence.senders), job),
        rollout=_side(question.rollout, list(correspondence.receivers), job),
        nodes=len(set(topology.nodes.values())),
        bound=bound,
        explained_by=explained_by,
        explained_share=_ratio(bound.terms_s[explained_by], bound.seconds),
        plans=plans,
        copies=copies,
        stalls=predict_stalls(plans[0].predicted_s, copies),
    )


def _foretold(plan: TransferPlan, staging_bytes: int, planned_s: float | None) -> PlanOutlook:
    prediction = predict(plan, staging_bytes=staging_bytes, hops_max=_HOPS_MAX)
    seconds = prediction.seconds
    return PlanOutlook(
        kind=plan.kind,
        predicted_s=seconds,
        over_bound=_ratio(seconds, plan.bound.seconds),
        over_planned=1.0 if planned_s is None else _ratio(seconds, planned_s),
        simulated=prediction.simulated,
        loads=loads_of(plan),
        report=plan.report(prediction),
    )


def _ratio(value: float, of: float) -> float:
    return value / of if of else 1.0


def _side(names: tuple[str, ...], workers: list[str], job: Job) -> Side:
    title = names[0] if len(names) == 1 else f"{len(names)} saved layouts"
    return Side(title, len(workers), len({job.topology.nodes[worker] for worker in workers}))
