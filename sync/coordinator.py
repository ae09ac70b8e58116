"""Hosts one job's weight path: membership, plan, commits. Carries messages and keeps time; its machine decides.

::

    coordinator = Coordinator(secret=..., senders=1, receivers={0: 1, 1: 1}, sync=..., transport=...)
    async with anyio.create_task_group() as tasks:
        endpoint = await tasks.start(coordinator.run)
        async for event in coordinator.events(): ...
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Mapping
from typing import cast

import anyio
import msgspec
from anyio.abc import TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from rlbridge.sync import messages as m
from rlbridge.sync.config import SyncConfig
from rlbridge.sync.correspondence import correspond, export_dtypes
from rlbridge.sync.coverage import coverage
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines.coordinator import CoordinatorMachine
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.memory import MemoryCost, describe, memory_cost, refuse_beyond
from rlbridge.sync.memory import table as memory_table
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.program import Program
from rlbridge.sync.reports import CoordinatorEvent, PlanMade, ReplicaAt, ReplicaLost, UpdateDone, UpdateStats
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, serve
from rlbridge.transport.errors import (
    ConfigError,
    DeadlineExceededError,
    PlanError,
    ProtocolError,
    RlbridgeError,
    TransportError,
)
from rlbridge.transport.topology import Topology

logger = logging.getLogger(__name__)

Channel = ControlChannel[m.ToWorker, m.FromWorker]
_GOODBYE_S = 2.0
"""At the end: seconds for workers to hear why, and to hang up."""
_LATECOMERS_S = 10.0
"""If a job ends before it began: seconds for those that have not come yet to hear why."""


class Coordinator:
    """Plans once per epoch, then sees each version through.

    Args:
        secret: the run's shared secret; who does not know it cannot join.
        senders: number of trainer ranks.
        receivers: replica to its number of ranks; the first plan waits for all of them.
        sync, transport: settings; equal on all workers.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        senders: int,
        receivers: Mapping[int, int],
        sync: SyncConfig,
        transport: TransportConfig,
    ) -> None:
        self._secret, self._sync, self._transport = secret, sync, transport
        self._machine = CoordinatorMachine(
            Membership(senders, dict(receivers)),
            connect_timeout_s=transport.connect_timeout_s,
            update_timeout_s=transport.update_timeout_s,
            now_s=time.monotonic(),
        )
        self._outboxes: dict[str, MemoryObjectSendStream[m.ToWorker]] = {}
        self._plans, self._planned = anyio.create_memory_object_stream[c.MakePlan](math.inf)
        self._publish, self._events = anyio.create_memory_object_stream[CoordinatorEvent](math.inf)
        self._changed = anyio.Event()
        self._ended = anyio.Event()
        self._unheard: set[str] = set()
        self._refused: set[str] = set()
        self._stopped = False
        self._error: RlbridgeError | None = None

    async def run(self, *, task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until every worker has left or ``stop``; reports the endpoint as started.

        Raises:
            RlbridgeError: the job cannot go on: a sender died or failed, no receiver is left, no plan exists, or
                somebody is late. Every worker that is left hears the same error.
        """
        with self._publish, self._plans, self._planned:
            async with anyio.create_task_group() as tasks:
                task_status.started(await tasks.start(self._serve))
                tasks.start_soon(self._plan)
                tasks.start_soon(self._keep_time)
                await self._ended.wait()
                await self._say_goodbye()
                tasks.cancel_scope.cancel()
        if self._error is not None:
            raise self._error

    async def events(self) -> AsyncIterator[CoordinatorEvent]:
        """What happens, until ``run`` ends. One consumer; what happens after it left is dropped."""
        with self._events:
            async for event in self._events:
                yield event

    async def lose(self, replica: int, reason: str) -> None:
        """The host knows that ``replica`` is gone, perhaps sooner than its channel does."""
        self._feed(c.Lose(replica, reason))

    def stop(self) -> None:
        """Let ``run`` return; workers that are left find the coordinator gone."""
        self._stopped = True
        self._ended.set()

    # --- workers ---------------------------------------------------------------------------------------------------

    async def _serve(self, *, task_status: TaskStatus[str]) -> None:
        host = self._transport.bind_host
        await serve(
            f"tcp://[{host}]:0" if ":" in host else f"tcp://{host}:0",
            self._secret,
            self._hear,
            name="coordinator",
            send=m.ToWorker,
            receive=m.FromWorker,
            config=self._transport,
            task_status=task_status,
        )

    async def _hear(self, channel: Channel) -> None:
        """One worker, from its ``Join`` to its end."""
        worker = channel.peer
        join = await self._join_of(channel)
        if join is None:
            return
        send, receive = anyio.create_memory_object_stream[m.ToWorker](math.inf)
        self._outboxes[worker] = send
        try:
            with send, receive:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._speak, channel, receive)
                    self._feed(c.Heard(worker, join))
                    await self._listen(worker, channel)
                    tasks.cancel_scope.cancel()
        finally:
            del self._outboxes[worker]
            self._wake()

    async def _join_of(self, channel: Channel) -> m.Join | None:
        """The first message, if it is what it must be; ``None`` from a worker that cannot take part."""
        worker = channel.peer
        try:
            first = await channel.receive()
            if self._error is not None:
                await channel.send(m.Stop(m.ErrorReport.of(self._error)))
                self._unheard.discard(worker)
                self._wake()
                return None
            if isinstance(first, m.Join | m.Refused) and first.worker == worker and worker not in self._outboxes:
                if isinstance(first, m.Join):
                    return first
                self._refused.add(worker)
                self._feed(c.Heard(worker, first))
                return None
            refusal = ProtocolError(f"{worker} must join first, once, and as itself; it sent {type(first).__name__}")
            await channel.send(m.Stop(m.ErrorReport.of(refusal)))
        except TransportError as error:
            logger.warning("%s went before it joined: %s", worker, error)
        return None

    async def _listen(self, worker: str, channel: Channel) -> None:
        message: m.FromWorker | None = None
        try:
            while not isinstance(message, m.Leave):
                message = await channel.receive()
                self._feed(c.Heard(worker, message))
        except TransportError as error:
            self._feed(c.Gone(worker, str(error)))

    async def _speak(self, channel: Channel, outbox: MemoryObjectReceiveStream[m.ToWorker]) -> None:
        try:
            async for message in outbox:
                await channel.send(message)
        except TransportError as error:
            self._feed(c.Gone(channel.peer, str(error)))

    async def _say_goodbye(self) -> None:
        if self._stopped:
            return
        if self._error is not None:
            report = m.ErrorReport.of(self._error)
            for outbox in self._outboxes.values():
                outbox.send_nowait(m.Stop(report))
            if self._machine.epoch == 0 and not isinstance(self._error, DeadlineExceededError):
                self._unheard = set(self._machine.members.missing()) - self._refused
        with anyio.move_on_after(_LATECOMERS_S):
            while self._unheard:
                await self._changed.wait()
        with anyio.move_on_after(_GOODBYE_S):
            while self._outboxes:
                await self._changed.wait()

    # --- machine ---------------------------------------------------------------------------------------------------

    def _feed(self, event: c.Event) -> None:
        for instruction in self._machine.handle(event, time.monotonic()):
            match instruction:
                case c.Tell(worker, message) if worker in self._outboxes:
                    self._outboxes[worker].send_nowait(message)
                case c.MakePlan():
                    self._plans.send_nowait(instruction)
                case c.Publish(report):
                    self._tell_host(report)
                case c.Finish(error):
                    self._error = error
                    self._ended.set()
        self._wake()

    def _tell_host(self, report: CoordinatorEvent) -> None:
        try:
            self._publish.send_nowait(report)
        except anyio.BrokenResourceError:
            # The host has what it wanted and left; the workers' goodbyes are still to be heard.
            logger.debug("nobody follows events() any more: %s", report)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def _keep_time(self) -> None:
        while True:
            deadline_s = self._machine.deadline_s
            changed = self._changed
            with anyio.move_on_after(None if deadline_s is None else deadline_s - time.monotonic()):
                await changed.wait()
            if deadline_s is not None and time.monotonic() >= deadline_s:
                self._feed(c.Tick())

    async def _plan(self) -> None:
        async for order in self._planned:
            try:
                event: c.Event = await anyio.to_thread.run_sync(make_plan, order, self._sync, self._transport)
            except RlbridgeError as error:
                event = c.NoPlan(order.epoch, error)
            self._feed(event)


def make_plan(order: c.MakePlan, sync: SyncConfig, transport: TransportConfig) -> c.Planned:
    """Plan for the members of ``order``. Pure; takes as long as planning takes.

    Raises:
        LayoutError, PlanError: the layouts do not fit. ConfigError: they need more memory than there is.
    """
    spec = next((join.spec for join in order.members if join.spec is not None), None)
    if spec is None:
        raise PlanError("no member has sent the checkpoint's spec")
    layouts = {
        role: {join.worker: join.layout for join in order.members if join.role == role}
        for role in ("sender", "receiver")
    }
    correspondence = correspond(spec, layouts["sender"], layouts["receiver"], export_dtypes(spec, sync.export_dtype))
    topology = Topology.of({join.worker: join.address for join in order.members}, transport)
    plan = plan_transfer(correspondence, topology, bucket_bytes=transport.bucket_bytes)
    programs = {worker: plan.program(worker) for worker in plan.workers}
    costs = _checked_memory(order, programs, sync, transport)
    prediction = predict(plan, staging_bytes=transport.staging_bytes)
    report = plan.report(prediction) | {
        "coverage": msgspec.to_builtins(coverage(correspondence)),
        "memory": memory_table(costs),
    }
    computed = {name for layout in layouts["sender"].values() for name in layout.opaque_inputs}
    return c.Planned(
        epoch=order.epoch,
        plan_hash=plan.hash,
        programs=programs,
        lower_bound_s=float(cast(float, report["lower_bound_s"])),
        report=report,
        exports=tuple(name for name in spec.tensors if name in computed),
    )


def _checked_memory(
    order: c.MakePlan, programs: Mapping[str, Program], sync: SyncConfig, transport: TransportConfig
) -> dict[str, MemoryCost]:
    costs = {join.worker: memory_cost(join, programs[join.worker], sync, transport) for join in order.members}
    for worker, cost in costs.items():
        logger.info("epoch %d: sync=%s costs %s %s", order.epoch, sync.mode, worker, describe(cost))
    try:
        refuse_beyond(costs, order.members, sync)
    except ConfigError as error:
        if order.epoch == 1:
            raise
        logger.warning("%s", error)  # a job that runs is not ended by what a newcomer changes
    return costs


__all__ = ["Coordinator", "CoordinatorEvent", "PlanMade", "ReplicaAt", "ReplicaLost", "UpdateDone", "UpdateStats"]
