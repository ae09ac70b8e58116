"""The adapters in an event loop: the same versions, and cancelling leaves no mess."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
import torch
from computing_engines import SPEC, Rows, checkpoint_of, wrong_at
from one_process_bridge import KIB, SECRET

from rlbridge.sync import (
    AsyncReceiverAdapter,
    AsyncSenderAdapter,
    Coordinator,
    OnBusy,
    SyncConfig,
    SyncMode,
)
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import RlbridgeError, WorkerError
from rlbridge.transport.inproc import InprocHub

pytestmark = pytest.mark.anyio
TRANSPORT = TransportConfig(bucket_bytes=16 * KIB, staging_bytes=128 * KIB, connect_timeout_s=30.0)


@asynccontextmanager
async def hosted(mode: SyncMode) -> AsyncIterator[dict[str, Any]]:
    """What the adapters of one sender and one receiver have in common; the coordinator runs meanwhile."""
    sync = SyncConfig(mode=mode, on_busy=OnBusy.QUEUE)
    coordinator = Coordinator(secret=SECRET, senders=1, receivers={0: 1}, sync=sync, transport=TRANSPORT)
    hub = InprocHub()

    async def run(*, task_status: anyio.abc.TaskStatus[str]) -> None:
        with suppress(RlbridgeError):  # the workers hear the same
            await coordinator.run(task_status=task_status)

    async def follow() -> None:
        async for _ in coordinator.events():
            pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(follow)
        yield {
            "coordinator": await tasks.start(run),
            "secret": SECRET,
            "spec": SPEC,
            "sync": sync,
            "transport": TRANSPORT,
            "transport_factory": lambda config, name: hub.transport(name),
        }


def sender(common: dict[str, Any], trainer: Rows) -> AsyncSenderAdapter:
    functions = {"load_weights": trainer.load_weights, "live_tensors": trainer.live_tensors}
    return AsyncSenderAdapter(rank=0, world=1, **functions, **common)


def receiver(common: dict[str, Any], engine: Rows) -> AsyncReceiverAdapter:
    functions = {"load_weights": engine.load_weights, "live_tensors": engine.live_tensors}
    return AsyncReceiverAdapter(replica=0, **functions, **common)


async def polled(bridge: AsyncReceiverAdapter) -> int:
    with anyio.fail_after(60):
        while (version := await bridge.poll_requests()) is None:
            await anyio.sleep(0.001)
        return version


async def together(*work: Callable[[], Any]) -> None:
    async with anyio.create_task_group() as tasks:
        for each in work:
            tasks.start_soon(each)


@pytest.mark.parametrize("mode", SyncMode)
async def test_both_ends_share_one_loop_and_every_version_arrives(mode: SyncMode) -> None:
    trainer, engine, wrong = Rows(), Rows(), []

    async def train(common: dict[str, Any]) -> None:
        async with sender(common, trainer) as bridge:
            await bridge.connect()
            for version in range(3):
                trainer.train(version)
                handle = await bridge.send_weights(version)
            assert await handle.wait(60.0)
            assert handle.done

    async def serve(common: dict[str, Any]) -> None:
        async with receiver(common, engine) as bridge:
            await bridge.connect()
            for version in range(3):
                assert await polled(bridge) == version == bridge.version
                wrong.extend(wrong_at(engine, Rows(dtype=engine.weights["embed"].dtype), checkpoint_of(version)))

    async with hosted(mode) as common:
        await together(lambda: train(common), lambda: serve(common))
    assert wrong == []


async def test_a_cancelled_poll_never_lets_an_engine_compute_with_torn_weights() -> None:
    trainer, engine = Rows(), Rows()

    async def train(common: dict[str, Any]) -> None:
        async with sender(common, trainer) as bridge:
            await bridge.connect()
            trainer.train(0)
            with pytest.raises(WorkerError, match="rollout-0: Cancelled"):
                await bridge.send_weights(0)
            await bridge.abort(WorkerError("nobody is left"))

    async def serve(common: dict[str, Any]) -> None:
        bridge = receiver(common, engine)
        await bridge.connect()
        while not bridge.has_news:
            await anyio.sleep(0.001)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await bridge._take()
        with pytest.raises(WorkerError, match="rollout-0: Cancelled"):
            await bridge.poll_requests()
        await bridge.abort(WorkerError("cancelled"))

    async with hosted(SyncMode.FULLY_SYNC) as common:
        await together(lambda: train(common), lambda: serve(common))


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    """The receiver never comes; the leak checks look for threads and sockets."""
    async with hosted(SyncMode.FULLY_ASYNC) as common:
        with anyio.move_on_after(1.0) as scope:
            async with sender(common, Rows()) as bridge:
                await bridge.connect()
        assert scope.cancelled_caught
        with torch.no_grad(), pytest.raises(RlbridgeError):
            async with receiver(common, Rows()) as other:
                await other.connect()
