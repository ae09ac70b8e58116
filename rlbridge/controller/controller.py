"""The controller: the run's dataflow, in the process that the user started.

      task ─ prompts ─▶ admission ─ Generate ─▶ rollout workers ─ Finished ─▶ scoring ─▶ buffer
                          ▲                        ▲                                       │
             versions held│                        │ weights (UCXX, not through here)      │ batch of B groups
                          │                        │                                       ▼
                     coordinator ◀─ offers ─ trainer ranks ◀────────── TrainStep ──── training loop

Five loops, one task group:

- ``_listen``   consumes what workers say; produces trajectories to score, replies and reports; waits for the inbox.
- ``_score``    consumes finished trajectories; produces accepted ones; waits for the reward function.
- ``_follow``   consumes the coordinator's events; produces the versions that replicas hold; waits for the coordinator.
- ``_admit``    consumes prompts and versions; produces requests; waits for ``_changed``.
- ``train``     consumes batches; produces steps; waits for the buffer and the trainer.

Nothing here decides policy: staleness, placement and counting are pure objects of their own.
"""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass, field
from typing import TypeVar

import anyio
import anyio.to_thread

from rlbridge.config import JobConfig
from rlbridge.config_rules import check_prompt_length
from rlbridge.controller.admission import Admission, Placement
from rlbridge.controller.buffer import Group, RolloutBuffer
from rlbridge.controller.evaluation import EVAL_GROUP, Evaluation
from rlbridge.controller.record import RunRecord
from rlbridge.controller.scoring import Scorer
from rlbridge.controller.workers import FromWorker, WorkerGone, WorkerPool
from rlbridge.rollout.messages import Finished, Generate, RolloutReport
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, Trajectory
from rlbridge.sync.config import AtBound, SyncMode
from rlbridge.sync.coordinator import Coordinator, PlanMade, ReplicaAt, ReplicaLost, UpdateDone
from rlbridge.sync.staleness import StalenessPolicy
from rlbridge.sync.stall import now_s
from rlbridge.trainer.messages import Example, SaveCheckpoint, Saved, Started, StepDone, TrainStep, WarmUp
from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError, ProtocolError, WorkerError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer", Started, StepDone, Saved)

WARMUP_EXAMPLES_AHEAD = 1 << 40
"""Warm-up draws problems from here on, so that RL does not meet the same stretch of the training stream."""


@dataclass(slots=True)
class Replies:
    """What the trainer ranks have answered to the last order; one slot per rank."""

    kind: type
    answers: dict[str, FromWorker] = field(default_factory=dict)


class Controller:
    """Runs one job over workers that ``WorkerPool`` has launched. ``run`` is the whole life of it."""

    def __init__(
        self, job: JobConfig, pool: WorkerPool, coordinator: Coordinator, scorer: Scorer, record: RunRecord
    ) -> None:
        self.job, self.pool, self.coordinator, self.scorer, self.record = job, pool, coordinator, scorer, record
        if job.sync.max_staleness is None:
            raise ProtocolError("the job's staleness bound is not resolved")
        policy = StalenessPolicy(
            job.sync.max_staleness, job.sync.at_bound, job.algorithm.prompts_per_step, job.sync.batches_ahead
        )
        self.buffer = RolloutBuffer(policy)
        record.books_of(self.buffer)
        self.version = 0
        self.held: dict[int, int] = {}
        self._ids = itertools.count()
        self._admission = self._make_admission()
        self._admitting = False
        self._evaluation: Evaluation | None = None
        self._replies = Replies(Started)
        self._changed = anyio.Event()
        self._to_score_in, self._to_score_out = anyio.create_memory_object_stream[list[Trajectory]](math.inf)

    def _make_admission(self) -> Admission:
        job = self.job
        waits = job.sync.at_bound is AtBound.WAIT
        placement = Placement(
            deterministic=job.sync.mode is SyncMode.FULLY_SYNC and waits,
            rows_per_replica=2 * job.rollout.max_rows,
            last_group=job.trainer.steps * job.algorithm.prompts_per_step if waits else None,
        )
        sampling = SamplingParams(
            max_new_tokens=job.task.max_new_tokens,
            temperature=job.rollout.temperature,
            top_p=job.rollout.top_p,
            top_k=job.rollout.top_k,
        )
        return Admission(
            self.buffer,
            placement,
            job.algorithm.group_size,
            sampling,
            job.seed,
            self._problem_at,
            lambda: next(self._ids),
        )

    def _problem_at(self, index: int) -> tuple[Problem, list[int]]:
        problem = self.scorer.task.train_prompt(index)
        return problem, self._encode_all([problem.prompt])[0]

    def _encode_all(self, prompts: list[str]) -> list[list[int]]:
        rows = self.scorer.encode_all(prompts)
        check_prompt_length(self.job, max(map(len, rows), default=0))
        return rows

    def _notify(self) -> None:
        """Wake every loop that waits for the state to change."""
        self._changed.set()
        self._changed = anyio.Event()

    # -- the life of a run ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Warm up, evaluate, train, evaluate, save.

        Raises:
            RlbridgeError: whatever ended the run early, from any loop.
        """
        async with self._to_score_in, self._to_score_out, anyio.create_task_group() as loops:
            for loop in (self._listen, self._score, self._follow):
                loops.start_soon(loop)
            await self.pool.connected(self.job.launcher.start_timeout_s)
            await self._start()
            self.record.evaluated("before", await self._evaluate())
            self._admitting = True
            loops.start_soon(self._admit)
            await self.train()
            self._admitting = False
            await self._versions_reach(self.version)
            self.record.evaluated("after", await self._evaluate())
            await self._save()
            await self.pool.stop(self.job.launcher.stop_timeout_s)
            loops.cancel_scope.cancel()
        self.buffer.counts.check()

    async def _start(self) -> None:
        """Supervised warm-up where the task asks for it; ends when every replica holds version 0."""
        job = self.job
        examples: list[Example] = []
        if job.task.warmup_until > 0:
            count = job.trainer.warmup_steps_max * job.trainer.warmup_batch
            # In a thread: thousands of examples take seconds, and heartbeats must not wait for them.
            examples = await anyio.to_thread.run_sync(self.scorer.demonstrations, WARMUP_EXAMPLES_AHEAD, count)
        started = await self._order(WarmUp(examples, job.task.warmup_until if examples else 0.0), Started)
        self.record.warmed_up(started[0])
        await self._versions_reach(0)

    async def train(self) -> None:
        """Consumes one batch a step in admission order; produces versions; waits for the buffer and the trainer."""
        for _ in range(self.job.trainer.steps):
            waited_from_s = now_s()
            batch = await self._next_batch()
            self.record.step_began(self.version, batch, now_s() - waited_from_s)
            scored = [item for group in batch for item in group.scored]
            done = await self._order(
                TrainStep(self.version, [item.trajectory for item in scored], [item.reward for item in scored]),
                StepDone,
            )
            self.version += 1
            self._notify()
            self.record.step_ended(self.version, done[0].metrics, self.held)
            self.buffer.counts.check()
            every = self.job.trainer.checkpoint_every
            if every and self.version % every == 0 and self.version < self.job.trainer.steps:
                await self._save()

    async def _next_batch(self) -> list[Group]:
        timeout_s = self.job.launcher.worker_timeout_s
        with anyio.move_on_after(timeout_s):
            while True:
                if self.buffer.drop_too_old(self.version):
                    self._notify()
                batch = self.buffer.take_batch(self.version)
                if batch is not None:
                    self._notify()
                    return batch
                await self._changed.wait()
        owing = ", ".join(f"rollout-{r} ({self._admission.held(r)} open)" for r in sorted(self.held))
        raise DeadlineExceededError(owing or "no replica", f"complete batch for version {self.version}", timeout_s)

    async def _save(self) -> None:
        path = self.record.folder.checkpoint_dir(self.version)
        await self._order(SaveCheckpoint(str(path)), Saved)

    # -- orders to the trainer -------------------------------------------------------------------------------------

    @property
    def _trainers(self) -> list[str]:
        return [f"trainer-{rank}" for rank in range(self.job.trainer.ranks)]

    async def _order(self, order: WarmUp | TrainStep | SaveCheckpoint, answer: type[Answer]) -> list[Answer]:
        """Give every trainer rank the same order and wait for all answers, in rank order."""
        self._replies = Replies(answer)
        for name in self._trainers:
            try:
                await self.pool.workers[name].send(order)
            except PeerDiedError:
                logger.info("%s is gone; why is told by its process, which the pool is watching", name)
        timeout_s = self.job.launcher.worker_timeout_s
        with anyio.move_on_after(timeout_s):
            while len(self._replies.answers) < len(self._trainers):
                await self._changed.wait()
            answers = (self._replies.answers[name] for name in self._trainers)
            return [given for given in answers if isinstance(given, answer)]
        late = ", ".join(name for name in self._trainers if name not in self._replies.answers)
        raise DeadlineExceededError(late, f"answer {answer.__name__} to {type(order).__name__}", timeout_s)

    # -- loops -------------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        """Consumes the workers' messages; produces replies, reports and accepted trajectories; waits for the inbox."""
        async for name, message in self.pool.inbox:
            if isinstance(message, WorkerGone):
                await self._worker_gone(name, message.reason)
            elif isinstance(message, Finished):
                self._given_back(message.trajectories)
            elif isinstance(message, RolloutReport):
                self.record.reported(name, message)
            elif isinstance(message, self._replies.kind):
                self._replies.answers[name] = message
                if isinstance(message, Started | StepDone):
                    self.record.add_spans(name, message.spans)
            else:
                raise ProtocolError(f"{name} sent {type(message).__name__}, which nobody waits for")
            self._notify()

    async def _follow(self) -> None:
        """Consumes the coordinator's events; produces what each replica holds; waits for the coordinator."""
        async for event in self.coordinator.events():
            if isinstance(event, PlanMade):
                self.record.planned(event)
            elif isinstance(event, ReplicaAt):
                if event.replica not in self._live_replicas:
                    continue  # said before it was lost; nobody would issue again what it were given now
                self.held[event.replica] = event.version
                self._admission.add_replica(event.replica)
                self._notify()
            elif isinstance(event, UpdateDone):
                self.record.updated(event)
            elif isinstance(event, ReplicaLost):
                self.pool.retire(f"rollout-{event.replica}", event.reason)

    async def _admit(self) -> None:
        """Consumes prompts and versions; produces requests; waits for a change that may allow more."""
        while True:
            changed = self._changed
            work = self._admission.next(self.version, self.held) if self._admitting else {}
            await self._send_out(work)
            await changed.wait()

    async def _send_out(self, work: dict[int, list[GenerationRequest]]) -> None:
        for replica, requests in work.items():
            try:
                await self.pool.workers[f"rollout-{replica}"].send(Generate(requests))
            except (PeerDiedError, KeyError):
                logger.info("rollout-%d is gone; what it was to do will be issued again", replica)

    # -- trajectories -------------------------------------------------------------------------------------------------

    def _given_back(self, trajectories: list[Trajectory]) -> None:
        """Clear the books of the replica that held them; queue for scoring what is finished, reissue what is not."""
        wanted = []
        for trajectory in trajectories:
            self._admission.answered(trajectory.replica, trajectory.request_id)
            if not self._is_open(trajectory):
                continue
            if trajectory.finish_reason != "abort":
                wanted.append(trajectory)
            elif trajectory.group != EVAL_GROUP:
                self._admission.again(trajectory.request_id)
            elif self._evaluation is not None:
                self._evaluation.again(trajectory.request_id)
        if wanted:
            self._to_score_in.send_nowait(wanted)

    async def _score(self) -> None:
        """Consumes finished trajectories; produces accepted ones with rewards; waits for the reward function."""
        async for trajectories in self._to_score_out:
            # Open when it was queued, but a reissued twin may have been in the queue before it.
            wanted = [trajectory for trajectory in trajectories if self._is_open(trajectory)]
            for item in await self.scorer.score(wanted, [self._problem_of(t) for t in wanted]):
                if item.trajectory.group != EVAL_GROUP:
                    self.buffer.accept(item)
                elif self._evaluation is not None:
                    self._evaluation.accept(item)
            self._notify()

    def _is_open(self, trajectory: Trajectory) -> bool:
        """Whether nobody has answered its request yet: a reissued twin may have been faster."""
        if trajectory.group == EVAL_GROUP:
            return self._evaluation is not None and self._evaluation.asks(trajectory.request_id)
        return self.buffer.knows(trajectory.request_id)

    def _problem_of(self, trajectory: Trajectory) -> Problem:
        if trajectory.group == EVAL_GROUP and self._evaluation is not None:
            return self._evaluation.problem_of(trajectory.request_id)
        return self.buffer.problem_of(trajectory.request_id)

    # -- evaluation ---------------------------------------------------------------------------------------------------

    async def _evaluate(self) -> Evaluation:
        """Greedy accuracy on the held-out set, while no update is under way."""
        self._evaluation = Evaluation.of(
            self.scorer.task.eval_problems(),
            self._encode_all,
            lambda: next(self._ids),
            self.job.task.max_new_tokens,
        )
        timeout_s = self.job.launcher.worker_timeout_s
        with anyio.move_on_after(timeout_s):
            while not self._evaluation.done.is_set():
                changed = self._changed
                await self._send_out(self._evaluation.deal(sorted(self.held)))
                await changed.wait()
            return self._evaluation
        raise DeadlineExceededError(
            "rollout workers", f"{len(self._evaluation.requests)} evaluation answers", timeout_s
        )

    async def _versions_reach(self, version: int) -> None:
        """Wait until every live replica holds ``version``."""
        timeout_s = self.job.launcher.worker_timeout_s
        with anyio.move_on_after(timeout_s):
            while any(self.held.get(replica, -1) < version for replica in self._live_replicas):
                await self._changed.wait()
            return
        late = [f"rollout-{r}" for r in self._live_replicas if self.held.get(r, -1) < version]
        raise DeadlineExceededError(", ".join(late), f"policy version {version}", timeout_s)

    # -- loss of workers ----------------------------------------------------------------------------------------------

    @property
    def _live_replicas(self) -> list[int]:
        return sorted(int(name.split("-")[1]) for name in self.pool.workers if name.startswith("rollout-"))

    async def _worker_gone(self, name: str, reason: str) -> None:
        """A trainer rank takes the run with it; a rollout worker does not, as long as another one is left."""
        if name.startswith("trainer-"):
            raise WorkerError(
                f"{reason}. The run cannot go on without a trainer rank; logs are in {self.record.folder.logs}"
            )
        replica = int(name.split("-")[1])
        self._dismiss(replica, reason)
        if not self._live_replicas:
            raise WorkerError(f"no rollout worker is left; the last one: {reason}")
        await self.coordinator.lose(replica, reason)

    def _dismiss(self, replica: int, reason: str) -> None:
        """Take a replica out of service and issue again what it held."""
        worker = self.pool.workers.get(f"rollout-{replica}")
        if worker is None:
            return
        worker.stopping = True
        worker.handle.kill()
        self.pool.forget(worker.name)
        self.held.pop(replica, None)
        lost = self._admission.remove_replica(replica)
        self.record.lost_replica(replica, reason, lost)
        self._notify()
