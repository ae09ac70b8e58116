"""Staleness policy: which prompts may start where, and which trajectories are too old to train on. Pure.

Groups (one prompt, all its samples) are numbered in the order of admission; ``B`` groups make the batch of one step.
The step that trains group ``i`` begins at policy version ``first_version + i // B`` as long as batches train in
admission order and nothing is dropped. A trajectory's staleness is the trainer's version when its step begins, less
the version of its oldest token, so a group that starts on weights of version ``r`` can be held under the bound
beforehand: ``first_version + i // B - r <= max_staleness``.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlbridge.sync.config import AtBound
from rlbridge.transport.errors import ConfigError, SyncError


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """The hard bound, and what happens at it.

    Attributes:
        max_staleness: in policy versions; 0 is on-policy.
        at_bound: ``wait`` holds prompts back; ``drop`` generates on and discards what is too old.
        groups_per_step: ``B``.
        batches_ahead: under ``wait``, batches that may be unfinished beside the one in training.
        first_version: trainer version at which group 0 trains.
    """

    max_staleness: int
    at_bound: AtBound
    groups_per_step: int
    batches_ahead: float = 1.0
    first_version: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(
                f"sync.max_staleness={self.max_staleness}: the bound counts versions and cannot be negative"
            )
        if self.groups_per_step < 1:
            raise ConfigError(f"algorithm.prompts_per_step={self.groups_per_step}: a step needs at least one prompt")
        if self.batches_ahead < 1:
            raise ConfigError(f"sync.batches_ahead={self.batches_ahead}: below 1 no batch would ever be complete")

    def may_admit(self, group: int, replica_version: int, trainer_version: int) -> bool:
        """Whether ``group`` may start on a replica that holds ``replica_version``.

        Under ``wait`` the answer depends on the step that will train the group, so what is admitted is never too old.
        Under ``drop`` the step is not known beforehand; a replica that is already over the bound would only make waste.
        """
        if self.at_bound is AtBound.WAIT:
            return self.first_version + group // self.groups_per_step - replica_version <= self.max_staleness
        return trainer_version - replica_version <= self.max_staleness

    def capacity(self) -> int:
        """Most groups that may be unfinished (generating or waiting) at once.

        Under ``wait`` the rule of ``may_admit`` alone would let fast replicas run ahead until every token is as old as
        the bound allows. Under ``drop`` this is all that keeps the queue from growing.
        """
        batches = self.batches_ahead if self.at_bound is AtBound.WAIT else self.max_staleness + 2
        return int(batches * self.groups_per_step)

    def staleness(self, trainer_version: int, oldest_version: int) -> int:
        """Staleness of a trajectory whose step begins at ``trainer_version``.

        Raises:
            SyncError: the trajectory is from the future, which means that versions were mixed up.
        """
        staleness = trainer_version - oldest_version
        if staleness < 0:
            raise SyncError(
                f"a trajectory of version {oldest_version} reached a trainer of version {trainer_version}: "
                "staleness is negative, so a version was announced before it was trained"
            )
        return staleness

    def too_old(self, trainer_version: int, oldest_version: int) -> bool:
        """Whether a trajectory must not be trained on in the step that begins at ``trainer_version``."""
        return self.staleness(trainer_version, oldest_version) > self.max_staleness
