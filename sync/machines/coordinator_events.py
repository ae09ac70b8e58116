"""Events and instructions of the coordinator's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlbridge.sync import messages as m
from rlbridge.sync.plan.program import Program
from rlbridge.sync.reports import CoordinatorEvent
from rlbridge.transport.errors import RlbridgeError

# --- events --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Heard:
    """``worker`` sent ``message``; for a ``Join``, the channel's peer and the joiner must be one."""

    worker: str
    message: m.FromWorker


@dataclass(frozen=True, slots=True)
class Gone:
    """The channel of ``worker`` ended without ``Leave``."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Lose:
    """The host knows that ``replica`` is gone."""

    replica: int
    reason: str


@dataclass(frozen=True, slots=True)
class Planned:
    """``MakePlan`` is carried out: a program for every member."""

    epoch: int
    plan_hash: str
    programs: Mapping[str, Program]
    lower_bound_s: float
    report: dict[str, Any]
    exports: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NoPlan:
    """``MakePlan`` failed."""

    epoch: int
    error: RlbridgeError


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


# --- instructions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tell:
    """Send ``message`` to ``worker``."""

    worker: str
    message: m.ToWorker


@dataclass(frozen=True, slots=True)
class MakePlan:
    """Plan for these members, off the loop; then report ``Planned`` or ``NoPlan``."""

    epoch: int
    members: tuple[m.Join, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Hand ``event`` to the host."""

    event: CoordinatorEvent


@dataclass(frozen=True, slots=True)
class Finish:
    """Everybody left (``error is None``), or the bridge cannot go on: tell all workers, then raise."""

    error: RlbridgeError | None


Event = Heard | Gone | Lose | Planned | NoPlan | Tick
Instruction = Tell | MakePlan | Publish | Finish
