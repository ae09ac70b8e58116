"""Admission and buffer while the trainer trains, replicas lag, die and are replaced, and updates abort sequences.

Staleness stays within its bound and is never negative; every trajectory that was generated is trained, dropped or
queued; under ``wait`` nothing is wasted.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
from depth import interleavings
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.controller.admission import Admission, Placement
from rlbridge.controller.buffer import RolloutBuffer, ScoredTrajectory
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, Trajectory, VersionSpan
from rlbridge.sync.config import AtBound
from rlbridge.sync.staleness import StalenessPolicy

SAMPLING = SamplingParams(max_new_tokens=4)


class Run:
    """A run whose replicas hold versions of their own; a sequence may have begun under any older one."""

    def __init__(self, policy: StalenessPolicy, samples: int, replicas: int, deterministic: bool, rows: int) -> None:
        ids = itertools.count()
        self.policy, self.replicas = policy, replicas
        self.buffer = RolloutBuffer(policy)
        self.admission = Admission(
            self.buffer,
            Placement(deterministic=deterministic, rows_per_replica=rows, last_group=None),
            samples,
            SAMPLING,
            0,
            lambda index: (Problem(prompt=f"p{index}", answer=None), [1, 2]),
            lambda: next(ids),
        )
        self.version = policy.first_version
        self.versions = dict.fromkeys(range(replicas), self.version)
        self.open: dict[int, dict[int, tuple[GenerationRequest, int]]] = {replica: {} for replica in self.versions}
        self.accepted: Counter[tuple[int, int]] = Counter()
        self.trained: list[int] = []
        for replica in self.versions:
            self.admission.add_replica(replica)
        self.admit()

    def admit(self) -> None:
        for replica, requests in self.admission.next(self.version, self.versions).items():
            for request in requests:
                assert request.request_id not in self.open[replica], "issued twice to one replica"
                self.open[replica][request.request_id] = (request, self.versions[replica])

    def answer(self, replica: int, turn: random.Random) -> None:
        if self.open[replica]:
            request, oldest = self.open[replica].pop(turn.choice(sorted(self.open[replica])))
            self.admission.answered(replica, request.request_id)
            if self.buffer.knows(request.request_id):
                self.buffer.accept(_scored(request, oldest, self.versions[replica], replica))
                self.accepted[request.group, request.sample] += 1

    def update(self, replica: int, turn: random.Random) -> None:
        self.versions[replica] = turn.randint(self.versions[replica], self.version)

    def abort(self, replica: int, turn: random.Random) -> None:
        """An update that gives every unfinished sequence back."""
        self.versions[replica] = self.version
        for request_id in list(self.open[replica]):
            del self.open[replica][request_id]
            self.admission.answered(replica, request_id)
            self.admission.again(request_id)

    def train(self, replica: int, turn: random.Random) -> None:
        if self.policy.at_bound is AtBound.DROP:
            self.buffer.drop_too_old(self.version)
        batch = self.buffer.take_batch(self.version)
        if batch is None:
            return
        assert len(batch) == self.policy.groups_per_step
        for group in batch:
            assert 0 <= self.version - group.oldest_version <= self.policy.max_staleness
        self.trained += [group.index for group in batch]
        self.version += 1

    def lose(self, replica: int, turn: random.Random) -> None:
        if len(self.versions) > 1:
            assert self.admission.remove_replica(replica) == len(self.open.pop(replica))
            del self.versions[replica]

    def come(self, replica: int, turn: random.Random) -> None:
        """A replacement serves nothing before it holds a version, and then the trainer's."""
        for missing in set(range(self.replicas)) - set(self.versions):
            self.admission.add_replica(missing)
            self.open[missing] = {}
            self.admit()
            assert not self.open[missing], "asked a replica that holds no version"
            self.versions[missing] = self.version

    def check(self) -> None:
        counts = self.buffer.counts
        counts.check()
        assert min(counts.generated, counts.trained, counts.dropped, counts.queued) >= 0
        assert counts.generated == sum(self.accepted.values())
        assert all(0 <= seen <= self.policy.max_staleness for seen in self.buffer.staleness_seen)
        assert all(times == 1 for times in self.accepted.values()), "one sample was counted twice"
        assert self.buffer.unfinished <= self.policy.capacity()
        if self.policy.at_bound is AtBound.WAIT:
            assert counts.dropped == 0
            assert self.trained == list(range(len(self.trained))), "batches train in admission order"


def _scored(request: GenerationRequest, oldest: int, newest: int, replica: int) -> ScoredTrajectory:
    spans = [VersionSpan(0, 1, oldest), VersionSpan(1, 2, newest)]
    trajectory = Trajectory(
        request.request_id,
        request.group,
        request.sample,
        request.prompt_ids,
        [3, 4],
        [0.0, 0.0],
        spans,
        "stop",
        replica,
    )
    return ScoredTrajectory(trajectory, 1.0, True)


@pytest.mark.parametrize("at_bound", AtBound)
def test_staleness_and_books_hold_whatever_happens(at_bound: AtBound) -> None:
    @interleavings(150)
    @given(
        bound=st.integers(0, 4),
        groups=st.integers(1, 3),
        samples=st.integers(1, 3),
        replicas=st.integers(1, 3),
        first=st.sampled_from([0, 57]),
        ahead=st.sampled_from([1.0, 1.5, 4.0]),
        deterministic=st.booleans(),
        rows=st.sampled_from([3, 100]),
        events=st.integers(20, 250),
        seed=st.integers(0, 2**32),
    )
    def storms(bound, groups, samples, replicas, first, ahead, deterministic, rows, events, seed) -> None:
        policy = StalenessPolicy(bound, at_bound, groups, ahead, first)
        run, turn = Run(policy, samples, replicas, deterministic, rows), random.Random(seed)
        happenings = [run.answer] * 6 + [run.train] * 2 + [run.update] * 2 + [run.abort, run.lose, run.come]
        for _ in range(events):
            turn.choice(happenings)(turn.choice(sorted(run.versions)), turn)
            run.admit()
            run.check()
        before = run.version
        for _ in range(50 * groups * samples * replicas):  # everybody lives, answers and is up to date: it goes on
            run.come(0, turn)
            for replica in run.versions:
                run.versions[replica] = run.version
                run.answer(replica, turn)
            run.train(0, turn)
            run.admit()
            run.check()
        assert run.version > before, "the run stands still"

    storms()
