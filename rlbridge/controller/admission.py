"""Admission: which request goes to which replica, and when. Pure state; the controller does the sending.

Consumes problems by index and the versions that replicas hold; produces requests per replica. Waits for nothing: the
controller asks again whenever a version, a capacity or the trainer moved on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rlbridge.controller.buffer import RolloutBuffer
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams


def request_seed(seed: int, *coordinates: int) -> int:
    """A 63-bit seed that depends on every coordinate, equal in every process and Python version."""
    text = "/".join(str(part) for part in (seed, *coordinates))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, slots=True)
class Placement:
    """How requests are spread.

    Attributes:
        deterministic: prompt ``i`` goes to replica ``i mod R`` (``fully_sync``), so that two runs with one seed batch
            alike; else the least loaded replica that may take it.
        rows_per_replica: requests that one replica may hold at once; more would only wait there and age. Not applied
            when deterministic.
        last_group: groups from this index on are never needed; ``None`` for no end.
    """

    deterministic: bool
    rows_per_replica: int
    last_group: int | None


@dataclass(slots=True)
class Admission:
    """Admits groups in order and keeps track of what each replica holds."""

    buffer: RolloutBuffer
    placement: Placement
    group_size: int
    sampling: SamplingParams
    seed: int
    problem_at: Callable[[int], tuple[Problem, list[int]]]
    next_request_id: Callable[[], int]
    _next_group: int = 0
    _held: dict[int, dict[int, GenerationRequest]] = field(default_factory=dict)
    _again: list[GenerationRequest] = field(default_factory=list)

    def add_replica(self, replica: int) -> None:
        """A replica can take requests."""
        self._held.setdefault(replica, {})

    def held(self, replica: int) -> int:
        """Requests that are on ``replica`` now."""
        return len(self._held.get(replica, {}))

    def answered(self, replica: int, request_id: int) -> None:
        """A trajectory came back (or was given back)."""
        self._held.get(replica, {}).pop(request_id, None)

    def again(self, request_id: int) -> None:
        """Issue a request once more: its sequence was given back unfinished."""
        self._again.extend(self.buffer.abort(request_id))

    def remove_replica(self, replica: int) -> int:
        """A replica is gone; what it held will be issued again. Returns how many requests were lost with it."""
        lost = self.buffer.lose(list(self._held.pop(replica, {})))
        self._again.extend(lost)
        return len(lost)

    def next(self, trainer_version: int, versions: Mapping[int, int]) -> dict[int, list[GenerationRequest]]:
        """Everything that may start now, by replica, given the version each live replica holds."""
        ready = {replica: versions[replica] for replica in self._held if replica in versions}
        out: dict[int, list[GenerationRequest]] = {}
        self._reissue(trainer_version, ready, out)
        while ready and self._may_open_group():
            replica = self._choose(self._next_group, trainer_version, ready)
            if replica is None:
                break
            requests = self._open_group(self._next_group)
            self._next_group += 1
            self._hand_out(replica, requests, out)
        return out

    def _may_open_group(self) -> bool:
        if self.placement.last_group is not None and self._next_group >= self.placement.last_group:
            return False
        return self.buffer.unfinished < self.buffer.policy.capacity()

    def _choose(self, group: int, trainer_version: int, ready: Mapping[int, int]) -> int | None:
        """The replica for ``group``, or None if none may take it yet."""
        policy = self.buffer.policy
        if self.placement.deterministic:
            order = sorted(self._held)
            replica = order[group % len(order)]
            admits = replica in ready and policy.may_admit(group, ready[replica], trainer_version)
            return replica if admits else None
        room = self.placement.rows_per_replica - self.group_size
        open_replicas = [
            (self.held(replica), replica)
            for replica, version in ready.items()
            if self.held(replica) <= max(room, 0) and policy.may_admit(group, version, trainer_version)
        ]
        return min(open_replicas)[1] if open_replicas else None

    def _reissue(self, trainer_version: int, ready: Mapping[int, int], out: dict[int, list[GenerationRequest]]) -> None:
        """Lost requests go first: their groups hold up the oldest batch."""
        still: list[GenerationRequest] = []
        for request in self._again:
            admits = [
                (self.held(replica), replica)
                for replica, version in ready.items()
                if self.buffer.policy.may_admit(request.group, version, trainer_version)
            ]
            if admits:
                self._hand_out(min(admits)[1], [request], out)
            else:
                still.append(request)
        self._again = still

    def _open_group(self, index: int) -> list[GenerationRequest]:
        problem, prompt_ids = self.problem_at(index)
        requests = [
            GenerationRequest(
                request_id=self.next_request_id(),
                group=index,
                sample=sample,
                prompt_ids=prompt_ids,
                seed=request_seed(self.seed, index, sample),
                sampling=self.sampling,
            )
            for sample in range(self.group_size)
        ]
        self.buffer.admit(index, problem, requests)
        return requests

    def _hand_out(
        self, replica: int, requests: list[GenerationRequest], out: dict[int, list[GenerationRequest]]
    ) -> None:
        self._held[replica].update((request.request_id, request) for request in requests)
        out.setdefault(replica, []).extend(requests)
