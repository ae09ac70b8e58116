"""A whole bridge in one event loop: the real coordinator and the awaited adapters over the in-process transport."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
from anyio.abc import TaskStatus
from computing_engines import SPEC
from one_process_bridge import KIB, SECRET

from rlbridge.sync import AsyncReceiverAdapter, AsyncSenderAdapter, Coordinator, OnBusy, SyncConfig, SyncMode
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import RlbridgeError
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.protocol import Transport

TRANSPORT = TransportConfig(bucket_bytes=16 * KIB, staging_bytes=128 * KIB, connect_timeout_s=30.0)


@asynccontextmanager
async def hosted(
    mode: SyncMode,
    *,
    receivers: Mapping[int, int] | None = None,
    memory_bytes: int | None = None,
    tricky: Callable[[Transport, str], Transport] = lambda transport, name: transport,
    reports: list[Any] | None = None,
) -> AsyncIterator[dict[str, Any]]:
    """What the adapters of one sender and these receivers have in common; the coordinator runs meanwhile."""
    sync = SyncConfig(mode=mode, on_busy=OnBusy.QUEUE, memory_bytes=memory_bytes)
    coordinator = Coordinator(secret=SECRET, senders=1, receivers=receivers or {0: 1}, sync=sync, transport=TRANSPORT)
    hub = InprocHub()

    async def run(*, task_status: TaskStatus[str]) -> None:
        with suppress(RlbridgeError):  # the workers hear the same
            await coordinator.run(task_status=task_status)

    async def follow() -> None:
        async for event in coordinator.events():
            (reports if reports is not None else []).append(event)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        yield {
            "coordinator": await tasks.start(run),
            "secret": SECRET,
            "spec": SPEC,
            "sync": sync,
            "transport": TRANSPORT,
            "transport_factory": lambda config, name: tricky(hub.transport(name), name),
        }


def sender(common: dict[str, Any], trainer: Any) -> AsyncSenderAdapter:
    functions = {"load_weights": trainer.load_weights, "live_tensors": trainer.live_tensors}
    return AsyncSenderAdapter(rank=0, world=1, **functions, **common)


def receiver(common: dict[str, Any], engine: Any, replica: int = 0) -> AsyncReceiverAdapter:
    functions = {"load_weights": engine.load_weights, "live_tensors": engine.live_tensors}
    return AsyncReceiverAdapter(replica=replica, **functions, **common)


async def polled(bridge: AsyncReceiverAdapter) -> int:
    with anyio.fail_after(60):
        while (version := await bridge.poll_requests()) is None:
            await anyio.sleep(0.001)
        return version


async def together(*work: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as tasks:
        for each in work:
            tasks.start_soon(each)
