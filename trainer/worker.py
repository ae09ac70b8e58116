"""A trainer rank: takes batches from the controller, makes versions, hands them to the bridge.

::

    controller ── WarmUp, TrainStep ──▶ rank ── weights of version v ──▶ bridge (sync) ──▶ rollouts
               ◀── Started, StepDone ──

Compute runs on the main thread. The bridge thread, behind a blocking portal, runs the event loop that owns the job
channel, the sync plane and the transport, so that heartbeats and transfers progress during a backward pass.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path

import anyio
import msgspec
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rlbridge.sync.adapters import SenderAdapter
from rlbridge.sync.config import SyncConfig
from rlbridge.sync.dump import WeightDump
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.stall import Timeline
from rlbridge.trainer.batch import collate_trajectories
from rlbridge.trainer.checkpoint import save_checkpoint
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.learner import Learner
from rlbridge.trainer.messages import (
    FromTrainer,
    SaveCheckpoint,
    Saved,
    Started,
    StepDone,
    StopTrainer,
    ToTrainer,
    TrainerFailed,
    TrainStep,
    WarmUp,
)
from rlbridge.trainer.parallel import any_rank, process_group
from rlbridge.trainer.policy import Policy, load_policy
from rlbridge.trainer.warmup import warm_up
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, connect
from rlbridge.transport.errors import ProtocolError, TransportError

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2.0
"""How long a failing rank tries to tell the controller why."""


class TrainerSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything a trainer rank has to know.

    Attributes:
        rank, world: this rank among the trainer ranks.
        job_endpoint: the controller's job plane. sync_endpoint: the sync plane's coordinator.
        secret: the run's secret, which authenticates both.
        model_dir: local Hugging Face checkpoint. run_dir: the run's folder.
        temperature: of the sampler.
        dump_dir: folder to keep the weights of every version in, or ``None``.
        collective_timeout_s: deadline of every collective of the ranks; covers rank 0 writing a checkpoint.
    """

    rank: int
    world: int
    job_endpoint: str
    sync_endpoint: str
    secret: bytes
    model_dir: str
    run_dir: str
    algorithm: AlgorithmConfig
    trainer: TrainerConfig
    sync: SyncConfig
    transport: TransportConfig
    temperature: float
    seed: int
    dump_dir: str | None = None
    collective_timeout_s: float = 600.0

    @property
    def rendezvous(self) -> Path:
        """A file that only the ranks of this very run know; they find each other through it."""
        name = hashlib.blake2b(self.secret, digest_size=8, person=b"rendezvous").hexdigest()
        return Path(self.run_dir) / f".trainers-{name}"


JobChannel = ControlChannel[FromTrainer, ToTrainer]


def run_trainer(spec: TrainerSpec) -> None:
    """Work as one trainer rank until told to stop. Blocks; call it on the process's main thread.

    Raises:
        RlbridgeError: what ended the rank early; the controller has been told, if it could still be reached.
    """
    torch.set_num_threads(spec.trainer.threads)
    with start_blocking_portal("asyncio") as portal, _job_channel(portal, spec) as job:
        try:
            with process_group(spec.rank, spec.world, spec.rendezvous, spec.collective_timeout_s):
                policy = load_policy(Path(spec.model_dir), with_values=spec.algorithm.has_critic)
                timeline = Timeline()
                with _bridge(portal, spec, policy, timeline) as bridge:
                    bridge.connect()
                    TrainerRank(spec, portal, job, policy, bridge, timeline).run()
        except Exception as error:
            portal.call(_say_last_words, job, f"{type(error).__name__}: {error}")
            raise


class TrainerRank:
    """The loop of one rank. Owns the policy's version: 0 after the warm-up, one more after each step."""

    def __init__(
        self,
        spec: TrainerSpec,
        portal: BlockingPortal,
        job: JobChannel,
        policy: Policy,
        bridge: SenderAdapter,
        timeline: Timeline,
    ) -> None:
        self._spec = spec
        self._portal = portal
        self._job = job
        self._policy = policy
        self._bridge = bridge
        self._timeline = timeline
        self._learner = Learner(policy, spec.algorithm, spec.trainer, temperature=spec.temperature)
        self._dump = WeightDump(spec.dump_dir, f"trainer-{spec.rank}")
        self._version: int | None = None

    def run(self) -> None:
        """Answer the controller's messages one by one; waits for nothing but the next message and the bridge.

        A controller that dies ends the wait: its heartbeats stop, and the channel raises.
        """
        while True:
            with self._timeline.span("idle/trainer/wait_for_data", self._version):
                message = self._portal.call(self._job.receive)
            match message:
                case WarmUp():
                    answer: FromTrainer = self._start(message)
                case TrainStep():
                    answer = self._step(message)
                case SaveCheckpoint():
                    answer = self._save(message)
                case StopTrainer():
                    return
            self._portal.call(self._job.send, answer)

    def _start(self, message: WarmUp) -> Started:
        if self._version is not None:
            raise ProtocolError(f"asked to warm up at version {self._version}; a warm-up makes version 0")
        with self._timeline.span("work/trainer/warm_up"):
            result = warm_up(
                self._policy,
                message.examples,
                until=message.until,
                config=self._spec.trainer,
                temperature=self._spec.temperature,
                seed=self._spec.seed,
            )
        self._publish(0)
        metrics = {"train/warmup_steps": float(result.steps), "train/warmup_accuracy": result.accuracy}
        return Started(result.steps, result.accuracy, metrics, self._timeline.drain())

    def _step(self, message: TrainStep) -> StepDone:
        if message.version != self._version:
            raise ProtocolError(f"asked to train version {message.version}, but the policy is at {self._version}")
        with self._timeline.span("work/trainer/step", message.version):
            batch = collate_trajectories(message.trajectories, message.rewards)
            metrics = self._learner.step(batch, message.version)
        self._publish(message.version + 1)
        return StepDone(message.version + 1, metrics, self._timeline.drain())

    def _save(self, message: SaveCheckpoint) -> Saved:
        if self._version is None:
            raise ProtocolError("asked for a checkpoint before version 0 exists; send WarmUp first")
        with self._timeline.span("work/trainer/save_checkpoint", self._version):
            save_checkpoint(self._policy, Path(self._spec.model_dir), Path(message.path), self._version)
        return Saved(message.path)

    def _publish(self, version: int) -> None:
        """Hand the weights to the bridge; blocks as long as the staging mode says."""
        self._version = version
        self._dump.write(version, self._policy.live_tensors())
        self._bridge.send_weights(version)


@contextmanager
def _job_channel(portal: BlockingPortal, spec: TrainerSpec) -> Iterator[JobChannel]:
    channel: AbstractAsyncContextManager[JobChannel] = connect(
        spec.job_endpoint,
        spec.secret,
        name=f"trainer-{spec.rank}",
        send=FromTrainer,
        receive=ToTrainer,
        config=spec.transport,
    )
    with portal.wrap_async_context_manager(channel) as job:
        yield job


def _bridge(portal: BlockingPortal, spec: TrainerSpec, policy: Policy, timeline: Timeline) -> SenderAdapter:
    return SenderAdapter(
        coordinator=spec.sync_endpoint,
        secret=spec.secret,
        rank=spec.rank,
        world=spec.world,
        spec=read_spec(Path(spec.model_dir)),
        load_weights=policy.load_weights,
        live_tensors=policy.live_tensors,
        any_rank=any_rank,
        sync=spec.sync,
        transport=spec.transport,
        timeline=timeline,
        portal=portal,
    )


async def _say_last_words(job: JobChannel, error: str) -> None:
    try:
        with anyio.move_on_after(_LAST_WORDS_S):
            await job.send(TrainerFailed(error))
    except TransportError as unreachable:
        logger.warning("the controller cannot be told of a failure (%s): %s", error, unreachable)
