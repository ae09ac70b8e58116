"""Messages between the controller and a rollout worker (the job plane). Typed, small, no pickle."""

from __future__ import annotations

import msgspec

from rlbridge.rollout.trajectory import GenerationRequest, Trajectory
from rlbridge.sync.stall import Span


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Controller to worker: admit these requests, in this order."""

    requests: list[GenerationRequest]


class StopRollout(msgspec.Struct, frozen=True, tag=True):
    """Controller to worker: finish the forward under way, drop the rest, report, exit 0."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: trajectories that ended since the last report."""

    trajectories: list[Trajectory]


class RolloutReport(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: the time and tokens since the last report (after each version, and about every second)."""

    version: int | None
    tokens: int
    spans: list[Span]


class RolloutFailed(msgspec.Struct, frozen=True, tag=True):
    """Worker to controller: last words before a non-zero exit."""

    error: str


ToRollout = Generate | StopRollout
FromRollout = Finished | RolloutReport | RolloutFailed
