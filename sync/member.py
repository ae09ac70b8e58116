"""The shell of a worker machine: carries its messages, opens its links, runs its programs, on the bridge's loop.

Three tasks: ``_listen`` turns messages into events, ``_speak`` sends what the machine wants to say, ``_work`` closes
and opens links and runs programs, one activity at a time. What the main thread waits for are ``Promise`` objects.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import anyio
import msgspec
import torch
from anyio.abc import TaskStatus

from rlbridge.sync import messages as m
from rlbridge.sync.executor import BufferPool, Execution, LinkError, Staging
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.worker import WorkerMachine
from rlbridge.sync.opaque import is_virtual
from rlbridge.sync.packing import PreparedBucket, prepare
from rlbridge.sync.plan.program import Program
from rlbridge.sync.stall import Timeline
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, connect
from rlbridge.transport.errors import DeadlineExceededError, RlbridgeError, SyncError, TransportError
from rlbridge.transport.protocol import Transport, TransportAddress

logger = logging.getLogger(__name__)

T = TypeVar("T")
Tensors = Mapping[str, torch.Tensor]
TransportFactory = Callable[[TransportConfig, str], Transport]
"""Makes the transport of the worker with this name; called on the bridge's loop."""
JoinMaker = Callable[[TransportAddress], m.Join]
Channel = ControlChannel[m.FromWorker, m.ToWorker]
_DIAL_S = 10.0
Activity = e.CloseLinks | e.ConnectPeers | e.Execute


class Promise(Generic[T]):
    """A value that arrives once, or an error in its place."""

    def __init__(self) -> None:
        self.event = anyio.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    def set(self, value: T) -> None:
        """Deliver the value."""
        self._value = value
        self.event.set()

    def fail(self, error: Exception) -> None:
        """Deliver an error, unless the value is there already."""
        if not self.event.is_set():
            self._error = error
            self.event.set()

    def result(self) -> T:
        """The value; raises the error."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # set() was called


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberSettings:
    """Where a member's coordinator is, and how it gets there."""

    name: str
    endpoint: str
    secret: bytes
    transport: TransportConfig
    transport_factory: TransportFactory
    timeline: Timeline
    on_news: Callable[[], None]


class Binding:
    """A program bound to tensors; a bucket is bound again only when its program or a tensor's memory is another one."""

    def __init__(self) -> None:
        self._plan_hash = ""
        self._layout: dict[str, tuple[Any, ...]] = {}
        self._prepared: dict[int, PreparedBucket] = {}

    def to(self, program: Program, tensors: Tensors) -> dict[int, PreparedBucket]:
        """The program's buckets with pieces, by number. Pieces of virtual tensors count if ``tensors`` has them."""
        layout = {name: (t.data_ptr(), t.shape, t.stride(), t.dtype) for name, t in tensors.items()}
        if program.plan_hash != self._plan_hash:
            self._prepared, self._layout, self._plan_hash = {}, {}, program.plan_hash
        # Most tensors stay where they are; exported ones may be new ones at each version.
        moved = {name for name, place in layout.items() if self._layout.get(name) != place}
        for bucket in program.buckets if moved else ():
            pieces = tuple(p for p in bucket.pieces if p.runtime in layout or not is_virtual(p.runtime))
            if pieces and (bucket.bucket not in self._prepared or any(p.runtime in moved for p in pieces)):
                self._prepared[bucket.bucket] = prepare(msgspec.structs.replace(bucket, pieces=pieces), tensors)
        self._layout = layout
        return self._prepared


class Member:
    """One worker on the sync plane.

    Args:
        machine: decides; this class only carries out.
        join: builds the first message once the transport's address is known.
        settings: the coordinator's address and so on.
        reserved_bytes: part of the budget for staging memory that is not for bucket buffers.

    Attributes:
        error: why nothing works any more, or ``None``.
        exports: checkpoint tensors that trainer ranks export at every version; known once linked.
    """

    def __init__(
        self, machine: WorkerMachine, join: JoinMaker, settings: MemberSettings, reserved_bytes: int = 0
    ) -> None:
        self.machine, self.settings = machine, settings
        self.error: Exception | None = None
        self.program: Program | None = None
        self.exports: tuple[str, ...] = ()
        self.staging = Staging()
        self._join = join
        self._pool = BufferPool(settings.transport.staging_bytes - reserved_bytes)
        self._peers: dict[str, TransportAddress] = {}
        self._promises: WeakSet[Promise[Any]] = WeakSet()  # one that nobody holds needs no failing
        self._linked: Promise[None] = self.promise()
        self._heard_s = time.monotonic()
        self._activity = anyio.CancelScope()
        self._say, self._outbox = anyio.create_memory_object_stream[m.FromWorker](math.inf)
        self._do, self._todo = anyio.create_memory_object_stream[Activity](math.inf)

    # --- life ------------------------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, join, report ``started``, go on until ``leave`` or an error.

        Raises:
            RlbridgeError: the coordinator could not be reached. Later errors are raised to who waits or calls.
        """
        s = self.settings
        with self._say, self._outbox, self._do, self._todo:
            transport = s.transport_factory(s.transport, s.name)
            try:
                dialled: AbstractAsyncContextManager[Channel] = connect(
                    s.endpoint,
                    s.secret,
                    name=s.name,
                    send=m.FromWorker,
                    receive=m.ToWorker,
                    config=_dialling(s.transport),
                )
                async with dialled as channel:
                    self.transmit(self._join(transport.address))
                    task_status.started()
                    await self._serve(channel, transport)
            finally:
                with anyio.CancelScope(shield=True):
                    await transport.aclose()

    async def _serve(self, channel: Channel, transport: Transport) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._listen, channel)
            tasks.start_soon(self._work, transport)
            await self._speak(channel)
            tasks.cancel_scope.cancel()

    async def _listen(self, channel: Channel) -> None:
        try:
            while True:
                message = await channel.receive()
                self._heard_s = time.monotonic()
                self._take(message)
        except TransportError as error:
            self.abandon(error)

    async def _speak(self, channel: Channel) -> None:
        """Send what there is to say, until ``leave`` or ``abandon`` closes the outbox."""
        try:
            async for message in self._outbox:
                await channel.send(message)
        except TransportError as error:
            self.abandon(error)

    async def _work(self, transport: Transport) -> None:
        async for activity in self._todo:
            if not isinstance(activity, e.CloseLinks) and _epoch_of(activity) != self.machine.epoch:
                continue  # a new epoch came before it began, and found nothing to cancel
            with anyio.CancelScope() as self._activity:
                self._take(await self._carry_out(activity, transport))

    async def _carry_out(self, activity: Activity, transport: Transport) -> e.WorkerEvent:
        try:
            match activity:
                case e.CloseLinks(new_epoch):
                    return await self._close_links(new_epoch, transport)
                case e.ConnectPeers(epoch):
                    return await self._open_links(epoch, transport)
                case e.Execute():
                    return await self._execute(activity, transport)
        except LinkError as error:
            return e.LinkFailed(_epoch_of(activity), error.peer, error)
        except Exception as error:  # a tensor may raise anything; all of it ends this worker
            return e.Trouble(error)

    # --- activities ------------------------------------------------------------------------------------------------

    async def _close_links(self, new_epoch: m.NewEpoch, transport: Transport) -> e.WorkerEvent:
        for peer in self._peers:
            await transport.disconnect(peer)
        self._peers, self.program, self.staging = new_epoch.peers, new_epoch.program, Staging()
        self.exports = new_epoch.exports
        return e.LinksClosed(new_epoch.epoch)

    async def _open_links(self, epoch: int, transport: Transport) -> e.WorkerEvent:
        for peer, address in self._peers.items():
            try:
                await transport.connect(peer, address)
            except TransportError as error:
                raise LinkError(peer, error) from error
        return e.LinksOpened(epoch)

    async def _execute(self, execute: e.Execute, transport: Transport) -> e.WorkerEvent:
        if self.program is None:
            raise SyncError("told to run a program before there is one")
        execution = Execution(
            program=self.program,
            transport=transport,
            epoch=execute.epoch,
            version=execute.version,
            treatment=execute.treatment,
            prepared=self.bind(execute, self.program),
            pool=self._pool,
            staging=self.staging,
        )
        with self.settings.timeline.span("weights/transfer", execute.version):
            stats = await execution.run()
        self.executed(execute, self.program)
        return e.Executed(execute.epoch, execute.version, stats)

    def bind(self, execute: e.Execute, program: Program) -> Mapping[int, PreparedBucket]:
        """The tensors of this run; a sender packs from a slot, a receiver unpacks into what its main thread gave."""
        raise NotImplementedError

    def executed(self, execute: e.Execute, program: Program) -> None:
        """A program ran to its end."""

    # --- machine ---------------------------------------------------------------------------------------------------

    def feed(self, event: e.WorkerEvent) -> None:
        """Give the machine one event and carry out what it says."""
        for instruction in self.machine.handle(event):
            match instruction:
                case e.Transmit(message):
                    self.transmit(message)
                case e.CloseLinks() | e.ConnectPeers() | e.Execute():
                    if isinstance(instruction, e.CloseLinks):
                        self._activity.cancel()
                    self._do.send_nowait(instruction)
                case e.Abandon(error):
                    self.abandon(error)
                case _:
                    self.perform(instruction)
        if self.machine.linked:
            self._linked.set(None)

    def _take(self, event: e.WorkerEvent) -> None:
        """``feed`` where nobody waits for the outcome: an event that the machine refuses ends this worker."""
        try:
            self.feed(event)
        except RlbridgeError as error:
            self.feed(e.Trouble(error))

    def perform(self, instruction: e.Instruction) -> None:
        """Carry out what only this kind of member knows."""
        raise NotImplementedError

    def transmit(self, message: m.FromWorker) -> None:
        """Queue ``message`` for the coordinator."""
        if self.error is None:
            self._say.send_nowait(message)

    def abandon(self, error: Exception) -> None:
        """Fail every wait, now and later; what is queued is still sent."""
        if self.error is not None:
            return
        self.error = error
        for promise in list(self._promises):
            promise.fail(error)
        self._say.close()
        self.settings.on_news()

    # --- for the main thread ---------------------------------------------------------------------------------------

    def promise(self) -> Promise[Any]:
        """A promise that ``abandon`` fails."""
        promise: Promise[Any] = Promise()
        if self.error is not None:
            promise.fail(self.error)
        self._promises.add(promise)
        return promise

    async def kept(self, promise: Promise[T], what: str, timeout_s: float | None = None) -> T:
        """Wait for ``promise``; without ``timeout_s`` the deadline counts from the coordinator's last message.

        The coordinator keeps the deadline of each phase and names who is late; this one catches the rest.

        Raises:
            DeadlineExceededError: it did not come in time. Without ``timeout_s`` this is the end of the worker.
        """
        start_s = time.monotonic()
        allowed_s = timeout_s if timeout_s is not None else self._patience_s()
        while not promise.event.is_set():
            since_s = start_s if timeout_s is not None else max(start_s, self._heard_s)
            left_s = since_s + allowed_s - time.monotonic()
            if left_s <= 0:
                error = DeadlineExceededError("the coordinator", what, time.monotonic() - start_s)
                if timeout_s is None:
                    self.feed(e.Trouble(error))
                raise error
            with anyio.move_on_after(left_s):
                await promise.event.wait()
        return promise.result()

    def _patience_s(self) -> float:
        # Two of the coordinator's phases may pass without a word to this worker, and a dead peer shows late.
        config = self.settings.transport
        phase_s = config.update_timeout_s if self.machine.linked else config.connect_timeout_s
        return 2 * phase_s + config.dead_after_s

    async def linked(self) -> None:
        """Wait until the links of the first epoch are open."""
        await self.kept(self._linked, "plan of the first epoch")

    async def leave(self) -> None:
        """Say goodbye and end ``run``."""
        if self.error is None:
            self.transmit(m.Leave())
            self._say.close()

    async def fail(self, error: Exception) -> None:
        """Tell the coordinator that this worker failed, and end ``run``."""
        self.feed(e.Trouble(error))


async def refuse(settings: MemberSettings, refusal: m.Refused) -> None:
    """Tell the coordinator why this worker never joins. If it cannot be reached, nobody waits for this worker there."""
    s = settings
    try:
        with anyio.move_on_after(s.transport.dead_after_s):
            dialled: AbstractAsyncContextManager[Channel] = connect(
                s.endpoint, s.secret, name=s.name, send=m.FromWorker, receive=m.ToWorker, config=_dialling(s.transport)
            )
            async with dialled as channel:
                await channel.send(refusal)
    except RlbridgeError as error:
        logger.warning("%s could not tell the coordinator why it does not join: %s", s.name, error)


def _dialling(config: TransportConfig) -> TransportConfig:
    """The coordinator's endpoint is known only once it listens: if nobody listens, it is gone."""
    return replace(config, connect_timeout_s=min(config.connect_timeout_s, _DIAL_S))


def _epoch_of(activity: Activity) -> int:
    return activity.new.epoch if isinstance(activity, e.CloseLinks) else activity.epoch
