"""What a UCX transport costs: nothing while idle, and nothing is left when it is closed."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import anyio
import pytest
import torch

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import TransportError
from rlbridge.transport.ucxx_transport import UcxxTransport

pytestmark = pytest.mark.anyio


def holdings() -> dict[str, object]:
    """Descriptors, threads and shared memory of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "python threads": threading.active_count(),
        "shared memory": sum("/dev/shm/" in line or "SYSV" in line for line in maps),
    }


async def use_once(shared_memory: bool) -> None:
    config = TransportConfig(shared_memory=shared_memory)
    async with UcxxTransport.open(config, "a") as a, UcxxTransport.open(config, "b") as b:
        await a.connect("b", b.address)
        await b.connect("a", a.address)
        got = torch.zeros(1 << 20, dtype=torch.uint8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(a.send, "b", 1, torch.ones(1 << 20, dtype=torch.uint8))
            tasks.start_soon(b.recv, "a", 1, got)
        with anyio.move_on_after(0.01):
            await b.recv("a", 2, got)


@pytest.mark.parametrize("shared_memory", [True, False])
async def test_nothing_is_left_after_closing(shared_memory):
    await use_once(shared_memory)  # UCX keeps its own threads and files from the first use on
    before = holdings()
    for _ in range(3):
        await use_once(shared_memory)
    assert holdings() == before


async def test_an_idle_transport_uses_no_processor_time(ucxx_world):
    a, _ = await ucxx_world.pair()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.recv, "b", 1, torch.zeros(8, dtype=torch.uint8))
        await anyio.sleep(0.2)
        spent = time.process_time()
        await anyio.sleep(1)
        spent = time.process_time() - spent
        tasks.cancel_scope.cancel()
    assert spent < 0.1


async def test_a_device_that_does_not_exist_is_named():
    with pytest.raises(TransportError, match="nosuchdevice0"):
        async with UcxxTransport.open(TransportConfig(net_devices="nosuchdevice0"), "a"):
            pass
