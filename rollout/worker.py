"""A rollout replica: takes requests from the controller and versions from the bridge, gives trajectories back.

::

    controller ── Generate ──▶ inbox ─▶ engine ── Finished, RolloutReport ──▶ controller
    bridge     ── version v ─────────────▲

Compute runs on the main thread. The bridge thread, behind a blocking portal, runs the event loop that owns the job
channel, the sync plane and the transport. Between two forwards the main thread takes a new version if one has come and
the messages that have come; with nothing to compute it sleeps on the inbox, which both wake.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from pathlib import Path

import anyio
import msgspec
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rlbridge.rollout.config import RolloutConfig
from rlbridge.rollout.engine.protocol import Engine
from rlbridge.rollout.engine.transformers_engine import TransformersEngine
from rlbridge.rollout.inbox import Inbox, JobChannel
from rlbridge.rollout.messages import (
    Finished,
    FromRollout,
    Generate,
    RolloutFailed,
    RolloutReport,
    StopRollout,
    ToRollout,
)
from rlbridge.sync.adapters import ReceiverAdapter
from rlbridge.sync.config import SyncConfig
from rlbridge.sync.dump import WeightDump
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.stall import Timeline, now_s
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import connect
from rlbridge.transport.errors import DeadlineExceededError, TransportError

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 1.0
_LAST_WORDS_S = 2.0
"""How long a failing replica tries to tell the controller why."""


class RolloutSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything a rollout replica has to know.

    Attributes:
        replica: its index.
        job_endpoint: the controller's job plane. sync_endpoint: the sync plane's coordinator.
        secret: the run's secret, which authenticates both.
        model_dir: local Hugging Face directory; weights are not read from it.
        seed: of the weights that the first version overwrites; requests bring their own.
        dump_dir: folder to keep the weights of every version in, or ``None``.
    """

    replica: int
    job_endpoint: str
    sync_endpoint: str
    secret: bytes
    model_dir: str
    rollout: RolloutConfig
    sync: SyncConfig
    transport: TransportConfig
    seed: int
    dump_dir: str | None = None


def run_rollout(spec: RolloutSpec) -> None:
    """Work as one rollout replica until told to stop. Blocks; call it on the process's main thread.

    Raises:
        RlbridgeError: what ended the replica early; the controller has been told, if it could still be reached.
    """
    torch.set_num_threads(spec.rollout.threads)
    torch.manual_seed(spec.seed)
    with (
        start_blocking_portal("asyncio") as portal,
        _job_channel(portal, spec) as job,
        _inbox(portal, job) as inbox,
        ExitStack() as until_told,
    ):
        try:
            timeline = Timeline()
            engine = TransformersEngine(Path(spec.model_dir), spec.rollout, spec.replica)
            bridge = until_told.enter_context(_bridge(portal, spec, engine, timeline, inbox))
            bridge.connect()
            RolloutReplica(spec, portal, job, engine, bridge, inbox, timeline).run()
        except Exception as error:
            # Before the bridge hears of it: that may end the run, and the controller should know why by then.
            portal.call(_say_last_words, job, f"{type(error).__name__}: {error}")
            raise


class RolloutReplica:
    """The loop of one replica. Generates nothing before the bridge has brought a version."""

    def __init__(
        self,
        spec: RolloutSpec,
        portal: BlockingPortal,
        job: JobChannel,
        engine: Engine,
        bridge: ReceiverAdapter,
        inbox: Inbox,
        timeline: Timeline,
    ) -> None:
        self._spec = spec
        self._portal = portal
        self._job = job
        self._engine = engine
        self._bridge = bridge
        self._inbox = inbox
        self._timeline = timeline
        self._dump = WeightDump(spec.dump_dir, f"rollout-{spec.replica}")
        self._stopped = False
        self._busy_since_s: float | None = None
        self._reported_s = now_s()
        self._reported_tokens = 0

    def run(self) -> None:
        """Alternate between forwards and what came meanwhile; returns after ``StopRollout`` and a last report.

        A controller that dies ends the wait: its heartbeats stop, and the inbox raises.
        """
        while not self._stopped:
            self._take_version()
            self._take_messages()
            if not self._stopped:
                self._compute_or_sleep()
        self._report()

    def _take_version(self) -> None:
        """Receive or apply a version if the bridge has one; blocks as long as the staging mode says."""
        if self._bridge.has_news:
            self._end_busy()
        version = self._bridge.poll_requests()
        if version is None:
            return
        with self._timeline.span("work/rollout/new_version", version):
            aborted = self._engine.set_version(version, self._spec.sync.kv_cache)
        self._dump.write(version, self._engine.live_tensors())
        if aborted:
            self._send(Finished(aborted))
        self._report()

    def _take_messages(self) -> None:
        for message in self._inbox.take():
            match message:
                case Generate(requests):
                    self._engine.submit(requests)
                case StopRollout():
                    self._stopped = True

    def _compute_or_sleep(self) -> None:
        if self._engine.version is not None and self._engine.has_work:
            if self._busy_since_s is None:
                self._busy_since_s = now_s()
            if finished := self._engine.step():
                self._send(Finished(finished))
        else:
            self._end_busy()
            with self._timeline.span("idle/rollout/wait_for_prompts", self._engine.version):
                self._inbox.wait(lambda: self._bridge.has_news, self._sleep_s())
        if now_s() - self._reported_s >= _REPORT_EVERY_S and self._unreported_tokens:
            self._report()

    def _sleep_s(self) -> float | None:
        """Until the next report if there is anything to report, else as long as nothing happens."""
        return max(0.0, self._reported_s + _REPORT_EVERY_S - now_s()) if self._unreported_tokens else None

    @property
    def _unreported_tokens(self) -> int:
        return self._engine.tokens_generated - self._reported_tokens

    def _end_busy(self) -> None:
        """Close the span of a busy stretch: one for many forwards, since one each would flood the timeline."""
        if self._busy_since_s is not None:
            self._timeline.add("work/rollout/decode", self._busy_since_s, now_s(), self._engine.version)
            self._busy_since_s = None

    def _report(self) -> None:
        """Tell the controller what happened since the last report."""
        self._end_busy()
        self._send(RolloutReport(self._engine.version, self._unreported_tokens, self._timeline.drain()))
        self._reported_tokens, self._reported_s = self._engine.tokens_generated, now_s()

    def _send(self, message: FromRollout) -> None:
        self._portal.call(_deliver, self._job, message, self._spec.transport.update_timeout_s)


@contextmanager
def _job_channel(portal: BlockingPortal, spec: RolloutSpec) -> Iterator[JobChannel]:
    channel: AbstractAsyncContextManager[JobChannel] = connect(
        spec.job_endpoint,
        spec.secret,
        name=f"rollout-{spec.replica}",
        send=FromRollout,
        receive=ToRollout,
        config=spec.transport,
    )
    with portal.wrap_async_context_manager(channel) as job:
        yield job


@contextmanager
def _inbox(portal: BlockingPortal, job: JobChannel) -> Iterator[Inbox]:
    """An inbox that a task on the bridge thread fills as long as the context is open."""
    inbox = Inbox()
    filling = portal.start_task_soon(inbox.fill, job)
    try:
        yield inbox
    finally:
        filling.cancel()


def _bridge(
    portal: BlockingPortal, spec: RolloutSpec, engine: Engine, timeline: Timeline, inbox: Inbox
) -> ReceiverAdapter:
    return ReceiverAdapter(
        coordinator=spec.sync_endpoint,
        secret=spec.secret,
        replica=spec.replica,
        rank=0,
        world=1,
        spec=read_spec(Path(spec.model_dir)),
        load_weights=engine.load_weights,
        live_tensors=engine.live_tensors,
        sync=spec.sync,
        transport=spec.transport,
        timeline=timeline,
        portal=portal,
        on_news=inbox.wake,
    )


async def _deliver(job: JobChannel, message: FromRollout, timeout_s: float) -> None:
    with anyio.move_on_after(timeout_s):
        await job.send(message)
        return
    raise DeadlineExceededError("the controller", f"room for {type(message).__name__}", timeout_s)


async def _say_last_words(job: JobChannel, error: str) -> None:
    try:
        with anyio.move_on_after(_LAST_WORDS_S):
            await job.send(RolloutFailed(error))
    except TransportError as unreachable:
        logger.warning("the controller cannot be told of a failure (%s): %s", error, unreachable)
