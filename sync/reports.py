"""What a coordinator tells its host."""

from __future__ import annotations

from typing import Any

import msgspec


class UpdateStats(msgspec.Struct, frozen=True):
    """One weight update, measured.

    Attributes:
        version: the policy version that was delivered.
        bytes_total: payload bytes that were sent, forwarding included.
        trainer_egress_bytes: payload bytes that left the trainer ranks.
        transfer_s: from the first ``Start`` to the last ``Verified``, repeats after a loss included.
        lower_bound_s: the plan's bound for the same bytes.
        sender_stall_s, receiver_stall_s: seconds each worker was blocked by this update, by name.
        digests_checked: bucket digests that were compared and matched, over all receivers.
    """

    version: int
    bytes_total: int
    trainer_egress_bytes: int
    transfer_s: float
    lower_bound_s: float
    sender_stall_s: dict[str, float]
    receiver_stall_s: dict[str, float]
    digests_checked: int


class PlanMade(msgspec.Struct, frozen=True):
    """Every worker holds the plan of ``epoch`` and its links are open.

    Attributes:
        plan_hash: equal on all workers.
        workers: who takes part.
        report: the planner's own summary, JSON-able.
    """

    epoch: int
    plan_hash: str
    workers: list[str]
    report: dict[str, Any]


class ReplicaAt(msgspec.Struct, frozen=True):
    """All ranks of ``replica`` compute with ``version``."""

    replica: int
    version: int


class UpdateDone(msgspec.Struct, frozen=True):
    """Every replica computes with ``version`` and no worker is blocked by it any more."""

    version: int
    stats: UpdateStats


class ReplicaLost(msgspec.Struct, frozen=True):
    """``replica`` died, failed, or was late; the others go on."""

    replica: int
    reason: str


CoordinatorEvent = PlanMade | ReplicaAt | UpdateDone | ReplicaLost
