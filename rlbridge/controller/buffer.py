"""The rollout buffer: groups from admission to training. Pure state, no I/O, no clock.

    problem ── admit ──▶ in flight ── accept (scored) ──▶ complete ── take_batch ──▶ trained
                            │                                │
                            └── lose, to be issued again     └── too old ──▶ dropped

The counted unit is a trajectory that the controller accepted: ``generated = trained + dropped + queued``, always.
Requests lost with a worker are outside the identity: they were never accepted, and are issued again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, Trajectory
from rlbridge.sync.config import AtBound
from rlbridge.sync.staleness import StalenessPolicy
from rlbridge.transport.errors import ProtocolError, SyncError


@dataclass(slots=True)
class ScoredTrajectory:
    """A trajectory with its reward; ``correct`` is the task's own yes or no."""

    trajectory: Trajectory
    reward: float
    correct: bool


@dataclass(slots=True)
class Group:
    """One prompt and its samples. ``waiting`` maps request ids to requests whose trajectory is not there yet."""

    index: int
    problem: Problem
    waiting: dict[int, GenerationRequest]
    scored: list[ScoredTrajectory] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every sample has been accepted."""
        return not self.waiting

    @property
    def oldest_version(self) -> int:
        """Version of the oldest token of all its samples."""
        return min(item.trajectory.oldest_version for item in self.scored)


@dataclass(slots=True)
class Counts:
    """The run's books, in trajectories. ``lost`` (with a worker) and ``aborted`` (given back at an update) are requests
    that were never accepted, and were issued again: they are outside the identity."""

    generated: int = 0
    trained: int = 0
    dropped: int = 0
    queued: int = 0
    lost: int = 0
    aborted: int = 0

    def check(self) -> None:
        """Raise SyncError unless generated = trained + dropped + queued."""
        if self.generated != self.trained + self.dropped + self.queued:
            raise SyncError(
                f"the books do not balance: {self.generated} generated, but {self.trained} trained "
                f"+ {self.dropped} dropped + {self.queued} queued"
            )


class RolloutBuffer:
    """Holds every group between admission and training, and hands out batches in admission order."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self.policy = policy
        self.counts = Counts()
        self.staleness_seen: Counter[int] = Counter()
        self._groups: dict[int, Group] = {}
        self._group_of: dict[int, int] = {}

    @property
    def unfinished(self) -> int:
        """Groups that were admitted and are neither trained nor dropped."""
        return len(self._groups)

    def admit(self, index: int, problem: Problem, requests: list[GenerationRequest]) -> None:
        """Open group ``index``; its requests are on their way to a replica."""
        self._groups[index] = Group(index, problem, {request.request_id: request for request in requests})
        self._group_of.update((request.request_id, index) for request in requests)

    def knows(self, request_id: int) -> bool:
        """Whether a trajectory of this request is still wanted (False once a reissued twin arrived first)."""
        return request_id in self._group_of

    def problem_of(self, request_id: int) -> Problem:
        """The problem that a request asks; ProtocolError for an id that was never admitted or is already answered."""
        if request_id not in self._group_of:
            raise ProtocolError(f"request {request_id} was answered, but it is not open")
        return self._groups[self._group_of[request_id]].problem

    def accept(self, scored: ScoredTrajectory) -> None:
        """Count a scored trajectory as generated and queue it with its group."""
        request_id = scored.trajectory.request_id
        group = self._groups[self._group_of.pop(request_id)]
        del group.waiting[request_id]
        group.scored.append(scored)
        self.counts.generated += 1
        self.counts.queued += 1

    def lose(self, request_ids: list[int]) -> list[GenerationRequest]:
        """Requests that went with a worker: counted as lost, and given back in admission order to be issued again."""
        lost = self._open(request_ids)
        self.counts.lost += len(lost)
        return lost

    def abort(self, request_id: int) -> list[GenerationRequest]:
        """A request whose sequence was given back unfinished, to be issued again; none if it is not open any more."""
        aborted = self._open([request_id])
        self.counts.aborted += len(aborted)
        return aborted

    def _open(self, request_ids: list[int]) -> list[GenerationRequest]:
        found = [self._groups[self._group_of[i]].waiting[i] for i in request_ids if i in self._group_of]
        return sorted(found, key=lambda request: (request.group, request.sample))

    def drop_too_old(self, trainer_version: int) -> int:
        """Discard complete groups over the bound (``at_bound=drop``); returns how many trajectories went.

        Raises:
            SyncError: under ``wait`` nothing can be too old; if it is, admission is broken.
        """
        old = [
            g for g in self._groups.values() if g.complete and self.policy.too_old(trainer_version, g.oldest_version)
        ]
        if old and self.policy.at_bound is AtBound.WAIT:
            raise SyncError(
                f"group {old[0].index} (oldest token of version {old[0].oldest_version}) exceeds max_staleness="
                f"{self.policy.max_staleness} at version {trainer_version} although admission waits"
            )
        for group in old:
            del self._groups[group.index]
        dropped = sum(len(group.scored) for group in old)
        self.counts.dropped += dropped
        self.counts.queued -= dropped
        return dropped

    def take_batch(self, trainer_version: int) -> list[Group] | None:
        """The next batch in admission order, or None while it is not complete.

        Under ``wait`` the batch is exactly the next ``B`` groups; under ``drop`` it is the first ``B`` complete ones.
        Groups and samples come sorted, so that a batch does not depend on the order of arrival.
        """
        size = self.policy.groups_per_step
        waits = self.policy.at_bound is AtBound.WAIT
        groups = sorted(self._groups.values(), key=lambda group: group.index)
        chosen = groups[:size] if waits else [group for group in groups if group.complete][:size]
        if len(chosen) < size or not all(group.complete for group in chosen):
            return None
        for group in chosen:
            del self._groups[group.index]
            group.scored.sort(key=lambda item: item.trajectory.sample)
            for item in group.scored:
                oldest = item.trajectory.oldest_version
                self.staleness_seen[self.policy.staleness(trainer_version, oldest)] += 1
        trained = sum(len(group.scored) for group in chosen)
        self.counts.trained += trained
        self.counts.queued -= trained
        return chosen
