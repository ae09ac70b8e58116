"""A whole bridge of real processes: the coordinator in the test, every worker a process of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import msgspec
import pytest

from rlbridge.sync import Coordinator, OnBusy, SyncConfig, SyncMode
from rlbridge.sync.messages import receiver_name, sender_name
from rlbridge.sync.reports import CoordinatorEvent
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import RlbridgeError

SCRIPT = Path(__file__).with_name("bridge_worker.py")
SUPPORT = Path(__file__).parents[2] / "support"
SECRET = b"a secret of thirty-two bytes....."


def _worker_module() -> ModuleType:
    found = importlib.util.spec_from_file_location("bridge_worker", SCRIPT)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["bridge_worker"] = module
    found.loader.exec_module(module)
    return module


worker_module = _worker_module()


@dataclass
class Bridge:
    """A running bridge. ``reports`` fills as workers end; ``error`` is what ``Coordinator.run`` raised."""

    coordinator: Coordinator
    folder: Path
    specs: dict[str, Any] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    events: list[CoordinatorEvent] = field(default_factory=list)
    error: RlbridgeError | None = None

    def of_kind(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def signalled(self, name: str) -> None:
        """Wait until the worker ``name`` says that its trick is played."""
        with anyio.fail_after(120.0):
            while not (self.folder / name).exists():
                await anyio.sleep(0.02)

    def launch(self, name: str) -> None:
        self.processes[name] = _spawn(self.specs[name])

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)

    def replace(self, name: str) -> None:
        """Bury a killed worker and start another one, without its trick, in its place."""
        self.processes[name].communicate()
        self.specs[name] = msgspec.structs.replace(self.specs[name], trick="")
        self.launch(name)

    async def report(self, name: str) -> Any:
        """Wait for a worker's end and read its report."""
        with anyio.fail_after(120.0):
            out, _ = await anyio.to_thread.run_sync(self.processes[name].communicate, abandon_on_cancel=True)
        return msgspec.json.decode(out, type=worker_module.WorkerReport)


@pytest.fixture
def open_bridge(tmp_path: Path) -> Callable[..., AbstractAsyncContextManager[Bridge]]:
    """``open_bridge(mode, senders=2, receivers=("float32", "fused x2"), tricks={"rollout-1": "hang"}, ...)``."""

    @asynccontextmanager
    async def opened(
        mode: SyncMode,
        *,
        senders: int = 2,
        trainer: str = "float32",
        receivers: tuple[str, ...] = ("float32", "bfloat16"),
        versions: int = 4,
        tricks: dict[str, str] | None = None,
        pauses_s: dict[str, float] | None = None,
        on_busy: OnBusy = OnBusy.QUEUE,
        update_timeout_s: float = 20.0,
        staging_bytes: int = 128 * 1024,
    ) -> AsyncIterator[Bridge]:
        sync = SyncConfig(mode=mode, on_busy=on_busy)
        transport = TransportConfig(
            bucket_bytes=32 * 1024,
            staging_bytes=staging_bytes,
            heartbeat_s=0.5,
            dead_after_s=5.0,
            connect_timeout_s=120.0,
            update_timeout_s=update_timeout_s,
        )
        coordinator = Coordinator(
            secret=SECRET,
            senders=senders,
            receivers={i: _ranks(engine) for i, engine in enumerate(receivers)},
            sync=sync,
            transport=transport,
        )
        bridge = Bridge(coordinator, tmp_path)
        places = [(sender_name(rank), "sender", 0, rank, senders, trainer) for rank in range(senders)]
        places += [
            (receiver_name(i, rank), "receiver", i, rank, _ranks(engine), engine.partition(" ")[0])
            for i, engine in enumerate(receivers)
            for rank in range(_ranks(engine))
        ]
        try:
            async with anyio.create_task_group() as tasks:
                endpoint = await tasks.start(_host, bridge)
                tasks.start_soon(_collect, bridge)
                for name, role, index, rank, world, engine in places:
                    bridge.specs[name] = worker_module.WorkerSpec(
                        role=role,
                        index=index,
                        rank=rank,
                        world=world,
                        endpoint=endpoint,
                        secret=SECRET,
                        sync=sync,
                        transport=transport,
                        versions=versions,
                        engine=engine,
                        pause_s=(pauses_s or {}).get(name, 0.0),
                        trick=(tricks or {}).get(name, ""),
                        signal=str(tmp_path / name),
                    )
                    bridge.launch(name)
                yield bridge
                with anyio.fail_after(120.0):
                    await _all_ended(bridge)
                bridge.coordinator.stop()
        finally:
            for process in bridge.processes.values():
                process.kill()
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()

    return opened


def _ranks(engine: str) -> int:
    """``"fused x2"`` is an engine of two ranks."""
    return int(engine.partition(" x")[2] or 1)


def _spawn(spec: Any) -> subprocess.Popen[bytes]:
    paths = [str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "error",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), msgspec.json.encode(spec).decode()], stdout=subprocess.PIPE, env=environment
    )


async def _host(bridge: Bridge, *, task_status: anyio.abc.TaskStatus[str]) -> None:
    try:
        await bridge.coordinator.run(task_status=task_status)
    except RlbridgeError as error:
        bridge.error = error


async def _collect(bridge: Bridge) -> None:
    async for event in bridge.coordinator.events():
        bridge.events.append(event)


async def _all_ended(bridge: Bridge) -> None:
    while any(process.poll() is None for process in bridge.processes.values()):
        await anyio.sleep(0.05)
