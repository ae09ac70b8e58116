"""Messages between the controller and a trainer rank (the job plane). Typed, no pickle, no weights."""

from __future__ import annotations

import msgspec

from rlbridge.rollout.trajectory import Trajectory
from rlbridge.sync.stall import Span


class Example(msgspec.Struct, frozen=True):
    """One supervised pair: ``answer_ids`` ends with the end-of-sequence token."""

    prompt_ids: list[int]
    answer_ids: list[int]


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    """Controller to rank: train on ``examples`` until the expected accuracy reaches ``until``, publish version 0.

    With ``until == 0`` or no examples the rank publishes version 0 at once. Answered by ``Started``.
    """

    examples: list[Example]
    until: float


class TrainStep(msgspec.Struct, frozen=True, tag=True):
    """Controller to rank: train on this batch; the trainer is at ``version`` and will be at ``version + 1``.

    Every rank gets the whole batch and takes its own rows; ``rewards[i]`` belongs to ``trajectories[i]``.
    """

    version: int
    trajectories: list[Trajectory]
    rewards: list[float]


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Controller to rank: write a Hugging Face checkpoint to ``path`` (absolute), then answer ``Saved``."""

    path: str


class StopTrainer(msgspec.Struct, frozen=True, tag=True):
    """Controller to rank: report and exit 0."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """Rank to controller: version 0 is published."""

    warmup_steps: int
    warmup_accuracy: float
    metrics: dict[str, float]
    spans: list[Span]


class StepDone(msgspec.Struct, frozen=True, tag=True):
    """Rank to controller: the step is done and ``version`` (the new one) is handed to the bridge."""

    version: int
    metrics: dict[str, float]
    spans: list[Span]


class Saved(msgspec.Struct, frozen=True, tag=True):
    """Rank to controller: the checkpoint is complete."""

    path: str


class TrainerFailed(msgspec.Struct, frozen=True, tag=True):
    """Rank to controller: last words before a non-zero exit."""

    error: str


ToTrainer = WarmUp | TrainStep | SaveCheckpoint | StopTrainer
FromTrainer = Started | StepDone | Saved | TrainerFailed
