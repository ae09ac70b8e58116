"""What a rollout worker asks of an engine. The worker and the bridge speak only this protocol."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from rlbridge.rollout.trajectory import GenerationRequest, Trajectory
from rlbridge.sync.config import KvCachePolicy


@runtime_checkable
class Engine(Protocol):
    """Turns requests into trajectories, one forward at a time, so that weights may change between any two forwards."""

    @property
    def version(self) -> int | None:
        """Policy version of the weights; ``None`` until the first ``set_version``."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a request is waiting or being decoded."""
        ...

    @property
    def tokens_generated(self) -> int:
        """Tokens sampled since the engine was made."""
        ...

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, in this order: all of them or, if one is unusable, none.

        Raises:
            TaskError: a request does not fit the engine (empty prompt, unknown token, too long).
            ConfigError: its sampling parameters are out of range.
        """
        ...

    def step(self) -> list[Trajectory]:
        """Run one forward and sample one token for each of its sequences; returns the trajectories that ended.

        Raises:
            SyncError: the engine holds no version yet, or its weights give logits that are not finite.
        """
        ...

    def abort(self) -> list[Trajectory]:
        """Give back every sequence in mid-generation (``finish_reason="abort"``); requests not begun stay queued."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy checkpoint tensors into the live ones, casting; a call may hold any subset of the checkpoint.

        Raises:
            LayoutError: an unknown name, or a shape that does not fit.
        """
        ...

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """Every runtime tensor that a checkpoint can fill; tied ones may come under all of their names.

        Writing to them changes the policy.
        """
        ...

    def set_version(self, version: int, kv_cache: KvCachePolicy) -> list[Trajectory]:
        """Say, between two steps, that the live tensors now hold ``version``; returns what ``kv_cache`` aborted.

        Raises:
            SyncError: ``version`` is not newer than the one held.
        """
        ...
