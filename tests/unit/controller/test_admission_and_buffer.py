"""A pure simulation of the run: admission, generation, loss of replicas, training, in random order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbridge.controller.admission import Admission, Placement, request_seed
from rlbridge.controller.buffer import RolloutBuffer, ScoredTrajectory
from rlbridge.controller.evaluation import Evaluation
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, Trajectory, VersionSpan
from rlbridge.sync.config import AtBound
from rlbridge.sync.staleness import StalenessPolicy
from rlbridge.transport.errors import ConfigError, ProtocolError, SyncError

SAMPLING = SamplingParams(max_new_tokens=4)


def problem_at(index: int) -> tuple[Problem, list[int]]:
    return Problem(prompt=f"p{index}", answer=None), [1, 2]


def make(
    bound: int,
    at_bound: AtBound = AtBound.WAIT,
    groups: int = 4,
    samples: int = 2,
    deterministic: bool = False,
    last_group: int | None = None,
    ahead: float = 100.0,
) -> Admission:
    buffer = RolloutBuffer(StalenessPolicy(bound, at_bound, groups, ahead))
    ids = itertools.count()
    return Admission(
        buffer,
        Placement(deterministic=deterministic, rows_per_replica=1000, last_group=last_group),
        samples,
        SAMPLING,
        0,
        problem_at,
        lambda: next(ids),
    )


def answer(request: GenerationRequest, version: int, replica: int = 0, newest: int | None = None) -> ScoredTrajectory:
    newest = version if newest is None else newest
    trajectory = Trajectory(
        request.request_id,
        request.group,
        request.sample,
        request.prompt_ids,
        [3, 4],
        [0.0, 0.0],
        [VersionSpan(0, 1, version), VersionSpan(1, 2, newest)],
        "stop",
        replica,
    )
    return ScoredTrajectory(trajectory, 1.0, True)


def test_bound_zero_admits_exactly_one_batch_per_version() -> None:
    admission = make(bound=0)
    admission.add_replica(0)
    first = admission.next(0, {0: 0})[0]
    assert sorted({r.group for r in first}) == [0, 1, 2, 3]
    assert admission.next(0, {0: 0}) == {}
    for request in first:
        admission.answered(0, request.request_id)
        admission.buffer.accept(answer(request, 0))
    batch = admission.buffer.take_batch(0)
    assert batch is not None
    assert [group.index for group in batch] == [0, 1, 2, 3]
    assert admission.next(1, {0: 0}) == {}, "the replica still holds version 0"
    assert sorted({r.group for r in admission.next(1, {0: 1})[0]}) == [4, 5, 6, 7]


def test_deterministic_placement_is_prompt_modulo_replicas() -> None:
    admission = make(bound=0, deterministic=True)
    admission.add_replica(0)
    admission.add_replica(1)
    out = admission.next(0, {0: 0, 1: 0})
    assert {r.group for r in out[0]} == {0, 2}
    assert {r.group for r in out[1]} == {1, 3}


def test_replica_without_a_version_gets_nothing() -> None:
    admission = make(bound=4)
    admission.add_replica(0)
    assert admission.next(0, {}) == {}


def test_no_group_past_the_last() -> None:
    admission = make(bound=8, last_group=6)
    admission.add_replica(0)
    assert max(r.group for r in admission.next(0, {0: 0})[0]) == 5


def test_no_more_than_the_batches_ahead_are_unfinished() -> None:
    admission = make(bound=8, ahead=1.5)
    admission.add_replica(0)
    requests = admission.next(0, {0: 0})[0]
    assert sorted({r.group for r in requests}) == list(range(6))
    for request in requests:
        admission.buffer.accept(answer(request, 0))
    assert admission.next(0, {0: 0}) == {}, "a complete batch that waits for the trainer is still unfinished business"
    assert admission.buffer.take_batch(0) is not None
    assert sorted({r.group for r in admission.next(0, {0: 0})[0]}) == list(range(6, 10))


def test_less_than_a_batch_ahead_is_refused() -> None:
    with pytest.raises(ConfigError, match="batches_ahead"):
        StalenessPolicy(1, AtBound.WAIT, 4, 0.5)


def test_seeds_differ_by_every_coordinate() -> None:
    seeds = {request_seed(s, g, i) for s in range(3) for g in range(20) for i in range(8)}
    assert len(seeds) == 3 * 20 * 8


def test_a_trajectory_from_the_future_is_an_error() -> None:
    with pytest.raises(SyncError, match="negative"):
        StalenessPolicy(2, AtBound.WAIT, 1).staleness(3, 4)


@pytest.mark.parametrize(("bound", "groups"), [(-1, 4), (0, 0)])
def test_nonsense_bounds_are_refused(bound: int, groups: int) -> None:
    with pytest.raises(ConfigError):
        StalenessPolicy(bound, AtBound.WAIT, groups)


def test_a_sequence_given_back_is_issued_again_and_is_no_loss() -> None:
    admission = make(bound=0)
    admission.add_replica(0)
    first = admission.next(0, {0: 0})[0][0]
    admission.answered(0, first.request_id)
    admission.again(first.request_id)
    assert admission.next(0, {0: 0}) == {0: [first]}
    assert (admission.buffer.counts.aborted, admission.buffer.counts.lost) == (1, 0)


def test_an_evaluation_request_given_back_is_dealt_again() -> None:
    problems = [Problem(prompt="a"), Problem(prompt="b")]
    ids = itertools.count()
    evaluation = Evaluation.of(problems, lambda texts: [[1] for _ in texts], lambda: next(ids), 4)
    dealt = evaluation.deal([0, 1])
    assert evaluation.deal([0, 1]) == {}
    evaluation.again(dealt[1][0].request_id)
    assert evaluation.deal([0, 1]) == {0: dealt[1]}
    assert evaluation.deal([1]) == {1: [*dealt[0], *dealt[1]]}, "replica 0 is gone"


def test_an_answer_nobody_asked_for_is_refused() -> None:
    with pytest.raises(ProtocolError, match="7"):
        make(bound=0).buffer.problem_of(7)


def test_waiting_finds_a_broken_admission() -> None:
    admission = make(bound=1, groups=1, samples=1)
    admission.add_replica(0)
    (request,) = admission.next(0, {0: 0})[0][:1]
    admission.buffer.accept(answer(request, 0))
    with pytest.raises(SyncError, match="max_staleness"):
        admission.buffer.drop_too_old(5)


def test_drop_counts_what_it_discards_and_trains_the_fresh() -> None:
    admission = make(bound=1, at_bound=AtBound.DROP, groups=2, samples=2)
    admission.add_replica(0)
    requests = admission.next(0, {0: 0})[0]
    assert len({r.group for r in requests}) == admission.buffer.policy.capacity() == 6
    for request in requests:
        admission.buffer.accept(answer(request, 0 if request.group < 3 else 2))
    assert admission.buffer.drop_too_old(3) == 6
    batch = admission.buffer.take_batch(3)
    assert batch is not None
    assert [group.index for group in batch] == [3, 4]
    counts = admission.buffer.counts
    assert (counts.generated, counts.trained, counts.dropped, counts.queued) == (12, 4, 6, 2)
    counts.check()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), bound=st.integers(0, 4), at_bound=st.sampled_from(AtBound), replicas=st.integers(1, 3))
def test_random_runs_keep_the_bound_and_the_books(
    data: st.DataObject, bound: int, at_bound: AtBound, replicas: int
) -> None:
    """Whatever the order of answers, updates and losses: staleness <= bound, the books balance, batches are whole."""
    groups, samples = 3, 2
    admission = make(bound, at_bound, groups, samples)
    buffer = admission.buffer
    version = 0
    versions = dict.fromkeys(range(replicas), 0)
    held: dict[int, dict[int, tuple[GenerationRequest, int]]] = {replica: {} for replica in versions}
    for replica in versions:
        admission.add_replica(replica)

    for _ in range(data.draw(st.integers(5, 40), label="events")):
        for replica, requests in admission.next(version, versions).items():
            held[replica].update((r.request_id, (r, versions[replica])) for r in requests)
        event = data.draw(st.sampled_from(["answer", "answer", "train", "update", "lose"]))
        replica = data.draw(st.sampled_from(sorted(versions)))
        if event == "answer" and held[replica]:
            request_id = data.draw(st.sampled_from(sorted(held[replica])))
            request, oldest = held[replica].pop(request_id)
            admission.answered(replica, request_id)
            buffer.accept(answer(request, oldest, replica, versions[replica]))
        elif event == "train":
            if at_bound is AtBound.DROP:
                buffer.drop_too_old(version)
            batch = buffer.take_batch(version)
            if batch is not None:
                assert len(batch) == groups
                assert all(len(group.scored) == samples for group in batch)
                version += 1
        elif event == "update":
            versions[replica] = version
        elif event == "lose" and len(versions) > 1:
            lost = admission.remove_replica(replica)
            assert lost == len(held.pop(replica))
            del versions[replica]
        buffer.counts.check()
    assert all(staleness <= bound for staleness in buffer.staleness_seen)


@settings(max_examples=50, deadline=None)
@given(
    bound=st.integers(0, 3),
    ahead=st.sampled_from([1.0, 1.5, 100.0]),
    lose=st.booleans(),
    order=st.randoms(use_true_random=False),
)
def test_waiting_wastes_nothing_and_never_sticks(bound: int, ahead: float, lose: bool, order: object) -> None:
    """Under ``wait`` every admitted trajectory is trained, in admission order, also when a replica dies."""
    admission = make(bound, groups=2, samples=2, last_group=10, ahead=ahead)
    versions = {0: 0, 1: 0}
    for replica in versions:
        admission.add_replica(replica)
    open_requests: list[tuple[int, GenerationRequest, int]] = []
    trained: list[int] = []
    version = 0
    while version < 5:
        for replica, requests in admission.next(version, versions).items():
            open_requests += [(replica, request, versions[replica]) for request in requests]
        if lose and version == 2 and 1 in versions:
            admission.remove_replica(1)
            del versions[1]
            open_requests = [entry for entry in open_requests if entry[0] == 0]
            continue
        assert open_requests, "nothing is open and nothing may be admitted: the run would stand still"
        order.shuffle(open_requests)  # type: ignore[attr-defined]
        replica, request, oldest = open_requests.pop()
        admission.answered(replica, request.request_id)
        admission.buffer.accept(answer(request, oldest, replica))
        while (batch := admission.buffer.take_batch(version)) is not None:
            trained += [group.index for group in batch]
            version += 1
            versions = dict.fromkeys(versions, version)
    assert trained == list(range(10))
    assert admission.buffer.counts.dropped == 0
