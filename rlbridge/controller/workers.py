"""The worker pool: every worker process, its job channel, and one verdict when it is gone.

A worker that fails says so on its channel, closes it, and exits; a worker that is killed only exits; a worker that
hangs falls silent. All three end in the same place: its process has exited, and the pool reports ``WorkerGone`` once,
with the best reason it has. Deciding what that means for the run is the controller's.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rlbridge.launcher.local import LocalLauncher, WorkerHandle
from rlbridge.rollout.messages import Finished, RolloutFailed, RolloutReport, StopRollout, ToRollout
from rlbridge.trainer.messages import Saved, Started, StepDone, StopTrainer, ToTrainer, TrainerFailed
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, serve
from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError, ProtocolError, WorkerError

logger = logging.getLogger(__name__)

LAST_WORDS_S = 2.0
"""After a process has exited its last message is already in the socket; reading it takes no longer than this."""

ToWorker = ToTrainer | ToRollout
FromWorker = Started | StepDone | Saved | TrainerFailed | Finished | RolloutReport | RolloutFailed


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker's process has exited before it was asked to."""

    reason: str


@dataclass(slots=True)
class Worker:
    """One worker process as the controller sees it."""

    name: str
    handle: WorkerHandle
    channel: ControlChannel[ToWorker, FromWorker] | None = None
    connected: anyio.Event = field(default_factory=anyio.Event)
    read_out: anyio.Event = field(default_factory=anyio.Event)
    last_words: str | None = None
    seen_off: bool = False
    stopping: bool = False

    async def send(self, message: ToWorker) -> None:
        """Send to the worker; PeerDiedError if it is gone."""
        if self.channel is None:
            raise PeerDiedError(f"{self.name} is not connected")
        await self.channel.send(message)


class WorkerPool:
    """Launches workers, receives what they say, and reports those that are gone.

    Everything that workers say arrives in ``inbox`` as ``(worker name, message)``.
    """

    def __init__(self, launcher: LocalLauncher, tasks: TaskGroup, transport: TransportConfig, secret: bytes) -> None:
        self.workers: dict[str, Worker] = {}
        self.endpoint = ""
        self._launcher = launcher
        self._tasks = tasks
        self._transport = transport
        self._secret = secret
        self._send: MemoryObjectSendStream[tuple[str, FromWorker | WorkerGone]]
        self.inbox: MemoryObjectReceiveStream[tuple[str, FromWorker | WorkerGone]]
        self._send, self.inbox = anyio.create_memory_object_stream(256)

    async def listen(self) -> str:
        """Open the job plane; returns its endpoint."""
        host = self._transport.bind_host
        bracketed = f"[{host}]" if ":" in host else host
        self.endpoint = await self._tasks.start(self._serve, f"tcp://{bracketed}:0")
        return self.endpoint

    async def _serve(self, endpoint: str, *, task_status: anyio.abc.TaskStatus[str]) -> None:
        await serve(
            endpoint,
            self._secret,
            self._hear,
            name="controller",
            send=ToWorker,
            receive=FromWorker,
            config=self._transport,
            task_status=task_status,
        )

    async def launch(self, name: str, spec: bytes) -> None:
        """Start one worker process and watch it."""
        worker = Worker(name, await self._launcher.start(name, spec))
        self.workers[name] = worker
        self._tasks.start_soon(self._watch, worker, name=f"watch {name}")

    async def connected(self, deadline_s: float) -> None:
        """Wait until every launched worker that is still on the books is on the job plane."""
        with anyio.move_on_after(deadline_s):
            for worker in list(self.workers.values()):
                await worker.connected.wait()
            return
        missing = ", ".join(w.name for w in self.workers.values() if not w.connected.is_set())
        raise DeadlineExceededError(missing, "connection to the job plane", deadline_s)

    async def _hear(self, channel: ControlChannel[Any, Any]) -> None:
        """Read one worker's channel to its end."""
        worker = self.workers.get(channel.peer)
        if worker is None or worker.channel is not None:
            logger.warning("refused a second or unknown worker that calls itself %r", channel.peer)
            return
        worker.channel = channel
        worker.connected.set()
        try:
            while True:
                message = await channel.receive()
                if isinstance(message, TrainerFailed | RolloutFailed):
                    worker.last_words = message.error
                else:
                    await self._send.send((worker.name, message))
        except (PeerDiedError, ProtocolError) as error:
            worker.read_out.set()
            await self._see_off(worker, str(error))

    def retire(self, name: str, reason: str) -> None:
        """Somebody else has found that a worker is lost: see to it that its process ends."""
        if name in self.workers:
            self._tasks.start_soon(self._see_off, self.workers[name], reason, name=f"retire {name}")

    async def _see_off(self, worker: Worker, reason: str) -> None:
        """A worker is lost: its process ends by itself and says why, or it hangs and is killed."""
        if worker.stopping:
            return
        with anyio.move_on_after(LAST_WORDS_S) as patience:
            await worker.handle.wait()
        if patience.cancelled_caught:
            worker.last_words = worker.last_words or reason
            worker.seen_off = True
            worker.handle.kill()

    async def _watch(self, worker: Worker) -> None:
        """Report the worker once its process is gone, unless it was asked to go."""
        status = await worker.handle.wait()
        if worker.channel is not None:
            with anyio.move_on_after(LAST_WORDS_S):
                await worker.read_out.wait()
        if worker.stopping:
            return
        how = f"killed by signal {-status}" if status < 0 else f"exited with status {status}"
        if worker.seen_off:
            how = "failed"  # the signal was the pool's own: the cause is what the worker said, or its silence
        detail = worker.last_words or worker.handle.tail_of_log(5)
        reason = f"{worker.name} {how}" + (f": {detail}" if detail else "")
        await self._send.send((worker.name, WorkerGone(reason)))

    async def stop(self, deadline_s: float) -> None:
        """Ask every worker to finish, and wait for the processes to end by themselves.

        Raises:
            WorkerError: a worker ended with an error although the run was over.
        """
        workers = list(self.workers.values())  # one that died just before may be forgotten meanwhile
        for worker in workers:
            worker.stopping = True
            try:
                await worker.send(StopTrainer() if worker.name.startswith("trainer") else StopRollout())
            except PeerDiedError:
                logger.info("%s is gone already", worker.name)
        with anyio.move_on_after(deadline_s):
            for worker in workers:
                await worker.handle.wait()
        bad = [w for w in workers if w.handle.returncode not in (0, None) and w.channel is not None]
        if bad:
            texts = "; ".join(f"{w.name}: {w.last_words or f'status {w.handle.returncode}'}" for w in bad)
            raise WorkerError(f"stopped with an error after the run was over: {texts}")

    def forget(self, name: str) -> None:
        """Take a lost worker off the books; nobody waits for it any more, not even to connect."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            worker.connected.set()


@asynccontextmanager
async def open_pool(
    launcher: LocalLauncher, tasks: TaskGroup, transport: TransportConfig, secret: bytes
) -> AsyncIterator[WorkerPool]:
    """A listening worker pool whose streams are closed at the end."""
    pool = WorkerPool(launcher, tasks, transport, secret)
    async with pool.inbox, pool._send:
        await pool.listen()
        yield pool
