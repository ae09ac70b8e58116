"""One rollout replica as a real process, between a controller's job plane and a coordinator that run in the test."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import torch
from anyio.abc import Process, TaskStatus
from anyio.streams.memory import MemoryObjectReceiveStream
from safetensors.torch import load_file

from rlbridge.model import ModelConfig, prepare_model
from rlbridge.rollout.config import RolloutConfig
from rlbridge.rollout.messages import Finished, FromRollout, RolloutReport, ToRollout
from rlbridge.rollout.trajectory import Trajectory
from rlbridge.rollout.worker import RolloutSpec
from rlbridge.sync.adapters import SenderAdapter
from rlbridge.sync.config import SyncConfig
from rlbridge.sync.coordinator import Coordinator
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, serve
from rlbridge.transport.errors import PeerDiedError, RlbridgeError

logger = logging.getLogger(__name__)

SECRET = bytes(range(32))
PATIENCE_S = 120.0
"""For whatever has no deadline of its own to show: other tests may keep the machine busy."""
NEVER = 999
"""A stop token outside of the vocabulary: sequences end only where they are cut."""


@dataclass
class Replica:
    """What a test sees: the worker's process and channel, and the trainer's end of the bridge."""

    process: Process
    channel: ControlChannel[ToRollout, FromRollout]
    inbox: MemoryObjectReceiveStream[FromRollout]
    weights: dict[str, torch.Tensor]
    sender: SenderAdapter
    heard: list[FromRollout] = field(default_factory=list)

    async def publish(self, version: int, factor: float = 1.0) -> None:
        """Deliver the weights, those of matrices scaled by ``factor``, as ``version``."""
        for tensor in self.weights.values():
            if tensor.ndim == 2:
                tensor.mul_(factor)
        handle = await anyio.to_thread.run_sync(self.sender.send_weights, version)
        await anyio.to_thread.run_sync(handle.wait, PATIENCE_S)

    async def next(self) -> FromRollout:
        with anyio.fail_after(PATIENCE_S):
            self.heard.append(await self.inbox.receive())
        return self.heard[-1]

    async def until(self, wanted: Callable[[FromRollout], bool]) -> None:
        """Hear messages up to the first wanted one."""
        while not wanted(await self.next()):
            pass

    async def version_reported(self, version: int) -> None:
        await self.until(lambda m: isinstance(m, RolloutReport) and m.version == version)

    async def trajectories(self, count: int) -> list[Trajectory]:
        found: list[Trajectory] = []
        while len(found) < count:
            message = await self.next()
            if isinstance(message, Finished):
                found += message.trajectories
        return found

    async def exit_status(self) -> int:
        """Hear what the worker still says, to its end."""
        with anyio.fail_after(PATIENCE_S):
            self.heard += [message async for message in self.inbox]
            return await self.process.wait()

    @property
    def reports(self) -> list[RolloutReport]:
        return [message for message in self.heard if isinstance(message, RolloutReport)]


StartReplica = Callable[..., AbstractAsyncContextManager[Replica]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = prepare_model(ModelConfig(), tmp_path_factory.mktemp("run"), seed=0)
    path = directory / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": NEVER}))
    return directory


@pytest.fixture
def start_replica(tiny_model: Path) -> StartReplica:
    """``async with start_replica(sync=..., rollout=...) as replica``: a connected worker that holds no version yet."""

    @asynccontextmanager
    async def start(sync: SyncConfig | None = None, **rollout: Any) -> AsyncIterator[Replica]:
        sync = sync or SyncConfig()
        transport = TransportConfig(
            dead_after_s=3.0, heartbeat_s=0.5, update_timeout_s=60.0, connect_timeout_s=PATIENCE_S
        )
        settings = RolloutConfig(**{"replicas": 1, "max_rows": 8, "max_length": 512, **rollout})
        coordinator = Coordinator(secret=SECRET, senders=1, receivers={0: 1}, sync=sync, transport=transport)
        tell, inbox = anyio.create_memory_object_stream[FromRollout](10_000)
        arrived, channels = anyio.Event(), list[ControlChannel[ToRollout, FromRollout]]()

        async def hear(channel: ControlChannel[ToRollout, FromRollout]) -> None:
            assert channel.peer == "rollout-0"
            channels.append(channel)
            arrived.set()
            with tell:
                try:
                    while True:
                        await tell.send(await channel.receive())
                except PeerDiedError:
                    return

        async with anyio.create_task_group() as tasks:

            async def listen(*, task_status: Any) -> None:
                address = "tcp://127.0.0.1:0"
                types = {"send": ToRollout, "receive": FromRollout}
                await serve(
                    address, SECRET, hear, name="controller", config=transport, task_status=task_status, **types
                )

            job_endpoint = await tasks.start(listen)
            sync_endpoint = await tasks.start(_run, coordinator)
            tasks.start_soon(_follow, coordinator)
            spec = RolloutSpec(
                replica=0,
                job_endpoint=job_endpoint,
                sync_endpoint=sync_endpoint,
                secret=SECRET,
                model_dir=str(tiny_model),
                rollout=settings,
                sync=sync,
                transport=transport,
                seed=0,
            )
            async with _process(msgspec.json.encode(spec)) as process:
                weights = load_file(tiny_model / "model.safetensors")
                sender = SenderAdapter(
                    coordinator=sync_endpoint,
                    secret=SECRET,
                    rank=0,
                    world=1,
                    spec=read_spec(tiny_model),
                    load_weights=lambda pairs: [weights[name].copy_(tensor) for name, tensor in pairs],
                    live_tensors=lambda: weights,
                    sync=sync,
                    transport=transport,
                )
                await anyio.to_thread.run_sync(sender.connect)
                with anyio.fail_after(PATIENCE_S):
                    await arrived.wait()
                with inbox:
                    try:
                        yield Replica(process, channels[0], inbox, weights, sender)
                    finally:
                        with anyio.CancelScope(shield=True):
                            await anyio.to_thread.run_sync(hang_up, sender)
            coordinator.stop()
            tasks.cancel_scope.cancel()

    return start


async def _run(coordinator: Coordinator, *, task_status: TaskStatus[str]) -> None:
    """A coordinator that loses its only replica ends with an error: here that is the test's wish."""
    try:
        await coordinator.run(task_status=task_status)
    except RlbridgeError as error:
        logger.info("the coordinator ended: %s", error)


async def _follow(coordinator: Coordinator) -> None:
    """A coordinator's events have one consumer; these tests look at the worker instead."""
    async for event in coordinator.events():
        logger.debug("coordinator: %s", event)


@asynccontextmanager
async def _process(spec: bytes) -> AsyncIterator[Process]:
    """A worker process, killed at the end if it is still there."""
    command = [sys.executable, "-m", "rlbridge.worker", "rollout-0", str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    async with await anyio.open_process(command, stdout=None, stderr=None, env=environment) as process:
        try:
            assert process.stdin is not None
            await process.stdin.send(spec)
            await process.stdin.aclose()
            yield process
        finally:
            if process.returncode is None:
                process.kill()


def hang_up(sender: SenderAdapter) -> None:
    """Close it. A bridge that lost its replica says so; here that is the test's wish."""
    try:
        sender.close()
    except RlbridgeError as error:
        logger.info("the bridge had ended: %s", error)
