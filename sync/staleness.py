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
        first_version: trainer version at which group 0 trains.
    """

    max_staleness: int
    at_bound: AtBound
    groups_per_step: int
    first_version: int = 0

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise ConfigError(
                f"sync.max_staleness={self.max_staleness}: the bound counts versions and cannot be negative"
            )
        if self.groups_per_step < 1:
            raise ConfigError(f"algorithm.prompts_per_step={self.groups_per_step}: a step needs at least one prompt")

    def may_admit(self, group: int, replica_version: int, trainer_version: int) -> bool:
        """Whether ``group`` may start on a replica that holds ``replica_version``.

        Under ``wait`` the answer depends on the step that will train the group, so what is admitted is never too old.
        Under ``drop`` the step is not known beforehand; a replica that is already over the bound would only make waste.
        """
        if self.at_bound is AtBound.WAIT:
            return self.first_version + group // self.groups_per_step - replica_version <= self.max_staleness
        return trainer_version - replica_version <= self.max_staleness

    def capacity(self) -> int:
        """Most groups that may be unfinished or queued at once: under ``drop`` this, not the rule, bounds the queue."""
        return (self.max_staleness + 2) * self.groups_per_step

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
