"""What the controller does about workers that are gone: which error is seen, and that nothing waits for them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from rlbridge.config import JobConfig, job_from_mapping, to_mapping
from rlbridge.controller.buffer import ScoredTrajectory
from rlbridge.controller.controller import Controller
from rlbridge.controller.workers import Worker, WorkerGone, WorkerPool
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, Trajectory, VersionSpan
from rlbridge.sync.coordinator import ReplicaAt
from rlbridge.trainer.messages import StepDone, TrainStep
from rlbridge.transport.errors import SyncError, WorkerError

pytestmark = pytest.mark.anyio


class Scorer:
    """Rewards everything with 1 and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def score(self, trajectories: list[Trajectory], problems: list[Problem]) -> list[ScoredTrajectory]:
        self.asked += [trajectory.request_id for trajectory in trajectories]
        return [ScoredTrajectory(trajectory, 1.0, True) for trajectory in trajectories]


def worker(name: str) -> Worker:
    handle: Any = SimpleNamespace(kill=lambda: None)
    return Worker(name, handle)


def pool_of(*names: str) -> WorkerPool:
    nothing: Any = None
    pool = WorkerPool(nothing, nothing, nothing, b"")
    pool.workers = {name: worker(name) for name in names}
    return pool


def controller_over(pool: WorkerPool, coordinator: Any = None, scorer: Any = None) -> Controller:
    values = to_mapping(JobConfig(recipe="grpo"))
    values["sync"]["max_staleness"] = 0
    record: Any = SimpleNamespace(folder=SimpleNamespace(logs="logs"), books_of=lambda _buffer: None)
    return Controller(job_from_mapping(values), pool, coordinator, scorer, record)


def request(request_id: int, group: int = 0, sample: int = 0) -> GenerationRequest:
    return GenerationRequest(request_id, group, sample, [1], 0, SamplingParams(max_new_tokens=1))


def answer(asked: GenerationRequest, replica: int, version: int = 0) -> Trajectory:
    spans = [VersionSpan(0, 1, version)]
    return Trajectory(asked.request_id, asked.group, asked.sample, [1], [2], [0.0], spans, "stop", replica)


def close(pool: WorkerPool, *controllers: Controller) -> None:
    for stream in (pool.inbox, pool._send, *(s for c in controllers for s in (c._to_score_in, c._to_score_out))):
        stream.close()


async def test_nobody_waits_for_the_connection_of_a_worker_that_died_while_starting() -> None:
    pool = pool_of("rollout-0", "rollout-1")
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.connected, 60.0)
            await anyio.wait_all_tasks_blocked()
            pool.forget("rollout-0")
            pool.workers["rollout-1"].connected.set()
    close(pool)


async def test_an_order_to_a_dead_trainer_ends_with_the_reason_of_its_death() -> None:
    pool = pool_of("trainer-0", "rollout-0")
    controller = controller_over(pool)
    with pytest.raises(ExceptionGroup) as ended:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(controller._listen)
            tasks.start_soon(controller._order, TrainStep(0, [], []), StepDone)
            await anyio.wait_all_tasks_blocked()
            await pool._send.send(("trainer-0", WorkerGone("trainer-0 killed by signal 9")))
    (error,) = ended.value.exceptions
    assert isinstance(error, WorkerError)
    assert "trainer-0 killed by signal 9" in str(error)
    close(pool, controller)


async def test_what_a_lost_replica_was_said_to_hold_does_not_bring_it_back() -> None:
    class Coordinator:
        async def events(self) -> AsyncIterator[ReplicaAt]:
            yield ReplicaAt(0, 3)
            yield ReplicaAt(1, 3)

    pool = pool_of("trainer-0", "rollout-1")
    controller = controller_over(pool, Coordinator())
    await controller._follow()
    assert controller.held == {1: 3}
    close(pool, controller)


async def test_of_two_answers_to_one_request_the_first_counts() -> None:
    pool, scorer = pool_of("rollout-0", "rollout-1"), Scorer()
    controller, asked = controller_over(pool, scorer=scorer), request(7)
    controller.buffer.admit(0, Problem(prompt="p", answer=None), [asked])
    for replica in (0, 1):
        controller._given_back([answer(asked, replica)])
    controller._to_score_in.close()
    await controller._score()
    assert scorer.asked == [7]
    assert controller.buffer.counts.generated == 1
    close(pool, controller)


async def test_a_batch_over_the_bound_is_refused_although_admission_waits() -> None:
    pool = pool_of("rollout-0")
    controller, asked = controller_over(pool), request(7)
    controller.buffer.admit(0, Problem(prompt="p", answer=None), [asked])
    controller.buffer.accept(ScoredTrajectory(answer(asked, 0, version=0), 1.0, True))
    controller.version = 1
    with pytest.raises(SyncError, match="exceeds max_staleness=0 at version 1"):
        await controller._next_batch()
    close(pool, controller)
