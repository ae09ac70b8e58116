"""Trainer ranks as real processes, between a controller's job plane, a coordinator and a receiver in the test."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import msgspec
import pytest
import torch
from anyio.abc import Process, TaskStatus
from safetensors.torch import load_file

from rlbridge.model import ModelConfig, prepare_model
from rlbridge.sync.adapters import ReceiverAdapter
from rlbridge.sync.config import SyncConfig
from rlbridge.sync.coordinator import Coordinator
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.messages import FromTrainer, ToTrainer
from rlbridge.trainer.worker import TrainerSpec
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.channel import ControlChannel, serve
from rlbridge.transport.errors import RlbridgeError

logger = logging.getLogger(__name__)

SECRET = bytes(range(32))
PATIENCE_S = 120.0


@dataclass
class Ranks:
    """What a test sees: the ranks' processes and channels, and the rollout's end of the bridge."""

    processes: list[Process]
    channels: list[ControlChannel[ToTrainer, FromTrainer]]
    receiver: ReceiverAdapter
    weights: dict[str, torch.Tensor]

    async def ask(self, message: ToTrainer) -> Sequence[Any]:
        """Send ``message`` to all ranks; returns the answer of each."""
        for channel in self.channels:
            await channel.send(message)
        with anyio.fail_after(PATIENCE_S):
            return [await channel.receive() for channel in self.channels]

    async def received(self, version: int) -> None:
        """Take versions from the bridge up to ``version``."""
        with anyio.fail_after(PATIENCE_S):
            while self.receiver.version != version:
                await anyio.to_thread.run_sync(self.receiver.poll_requests)
                await anyio.sleep(0.01)

    async def exit_status(self) -> list[int]:
        with anyio.fail_after(PATIENCE_S):
            return [await process.wait() for process in self.processes]


StartRanks = Callable[..., AbstractAsyncContextManager[Ranks]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(
        ModelConfig(hidden=16, mlp=24, layers=1, heads=2, kv_heads=1), tmp_path_factory.mktemp("run"), 0
    )


@pytest.fixture
def start_ranks(tiny_model: Path, tmp_path: Path) -> StartRanks:
    """``async with start_ranks(world, algorithm) as ranks``: connected ranks that have published nothing yet."""

    @asynccontextmanager
    async def start(world: int, algorithm: AlgorithmConfig, sync: SyncConfig | None = None) -> AsyncIterator[Ranks]:
        sync = sync or SyncConfig()
        transport = TransportConfig(
            dead_after_s=5.0, heartbeat_s=0.5, update_timeout_s=60.0, connect_timeout_s=PATIENCE_S
        )
        coordinator = Coordinator(secret=SECRET, senders=world, receivers={0: 1}, sync=sync, transport=transport)
        channels: dict[str, ControlChannel[ToTrainer, FromTrainer]] = {}
        over = anyio.Event()

        async def hear(channel: ControlChannel[ToTrainer, FromTrainer]) -> None:
            channels[channel.peer] = channel
            await over.wait()

        async with anyio.create_task_group() as tasks:

            async def listen(*, task_status: Any) -> None:
                types = {"send": ToTrainer, "receive": FromTrainer}
                await serve(
                    "tcp://127.0.0.1:0", SECRET, hear, name="test", config=transport, task_status=task_status, **types
                )

            job_endpoint = await tasks.start(listen)
            sync_endpoint = await tasks.start(_run, coordinator)
            tasks.start_soon(_follow, coordinator)
            async with AsyncExitStack() as running:
                specs = [
                    TrainerSpec(
                        rank=rank,
                        world=world,
                        job_endpoint=job_endpoint,
                        sync_endpoint=sync_endpoint,
                        secret=SECRET,
                        model_dir=str(tiny_model),
                        run_dir=str(tmp_path),
                        algorithm=algorithm,
                        trainer=TrainerConfig(ranks=world, steps=4, warmup_steps_max=30),
                        sync=sync,
                        transport=transport,
                        temperature=1.0,
                        seed=0,
                    )
                    for rank in range(world)
                ]
                processes = [await running.enter_async_context(_process(spec)) for spec in specs]
                weights = {name: torch.zeros_like(w) for name, w in load_file(tiny_model / "model.safetensors").items()}
                receiver = ReceiverAdapter(
                    coordinator=sync_endpoint,
                    secret=SECRET,
                    replica=0,
                    spec=read_spec(tiny_model),
                    load_weights=lambda pairs: [weights[name].copy_(tensor) for name, tensor in pairs],
                    live_tensors=lambda: weights,
                    sync=sync,
                    transport=transport,
                )
                await anyio.to_thread.run_sync(receiver.connect)
                try:
                    yield Ranks(processes, [channels[f"trainer-{rank}"] for rank in range(world)], receiver, weights)
                finally:
                    with anyio.CancelScope(shield=True):
                        await anyio.to_thread.run_sync(hang_up, receiver)
            over.set()
            coordinator.stop()
            tasks.cancel_scope.cancel()

    return start


async def _run(coordinator: Coordinator, *, task_status: TaskStatus[str]) -> None:
    """A coordinator that loses its trainer ends with an error: here that is the test's wish."""
    try:
        await coordinator.run(task_status=task_status)
    except RlbridgeError as error:
        logger.info("the coordinator ended: %s", error)


async def _follow(coordinator: Coordinator) -> None:
    """A coordinator's events have one consumer; these tests look at the worker instead."""
    async for event in coordinator.events():
        logger.debug("coordinator: %s", event)


@asynccontextmanager
async def _process(spec: TrainerSpec) -> AsyncIterator[Process]:
    """A worker process, killed at the end if it is still there."""
    command = [sys.executable, "-P", "-m", "rlbridge.worker", f"trainer-{spec.rank}", str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    async with await anyio.open_process(command, stdout=None, stderr=None, env=environment) as process:
        try:
            assert process.stdin is not None
            await process.stdin.send(msgspec.json.encode(spec))
            await process.stdin.aclose()
            yield process
        finally:
            if process.returncode is None:
                process.kill()


def hang_up(receiver: ReceiverAdapter) -> None:
    """Close it. A bridge that lost its trainer says so; here that is the test's wish."""
    try:
        receiver.close()
    except RlbridgeError as error:
        logger.info("the bridge had ended: %s", error)
