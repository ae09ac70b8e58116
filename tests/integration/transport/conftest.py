"""The worlds in which the conformance suite runs: inside one process, over shared memory, over TCP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch

from rlbridge.transport import errors
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.protocol import Transport, TransportAddress
from rlbridge.transport.ucxx_transport import UcxxTransport

_SCRIPT = Path(__file__).with_name("peer_process.py")


def pattern(seed: int, nbytes: int) -> torch.Tensor:
    """The same as ``peer_process.pattern``."""
    period = torch.tensor([i * (31 * seed + 7) % 251 + 1 for i in range(251)], dtype=torch.uint8)
    return period.repeat(nbytes // 251 + 1)[:nbytes]


class Distant(ABC):
    """A worker that shares nothing with the test but a transport. Its calls raise what its transport raised."""

    @abstractmethod
    async def call(self, do: str, **arguments: Any) -> Any:
        """Let it do something and wait for the outcome."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill it and reap it."""

    async def address(self) -> TransportAddress:
        return msgspec.json.decode(await self.call("address"), type=TransportAddress)

    async def connect(self, peer: str, address: TransportAddress) -> None:
        await self.call("connect", peer=peer, address=msgspec.json.encode(address).decode())

    async def send(self, peer: str, tag: int, seed: int, nbytes: int) -> None:
        await self.call("send", peer=peer, tag=tag, seed=seed, nbytes=nbytes)

    async def recv(self, peer: str, tag: int, nbytes: int) -> list[int]:
        """The seeds of the patterns that arrived: one, or none if the bytes are mixed."""
        return await self.call("recv", peer=peer, tag=tag, nbytes=nbytes)

    async def disconnect(self, peer: str) -> None:
        await self.call("disconnect", peer=peer)


class InprocDistant(Distant):
    """The same in this process: only the hub knows that it is dead."""

    def __init__(self, hub: InprocHub, name: str) -> None:
        self._hub, self._name = hub, name
        self._transport = hub.transport(name)

    async def call(self, do: str, **arguments: Any) -> Any:
        match do:
            case "address":
                return msgspec.json.encode(self._transport.address)
            case "connect":
                address = msgspec.json.decode(arguments["address"], type=TransportAddress)
                return await self._transport.connect(arguments["peer"], address)
            case "disconnect":
                return await self._transport.disconnect(arguments["peer"])
            case "send":
                data = pattern(arguments["seed"], arguments["nbytes"])
                return await self._transport.send(arguments["peer"], arguments["tag"], data)
        buffer = torch.zeros(arguments["nbytes"], dtype=torch.uint8)
        await self._transport.recv(arguments["peer"], arguments["tag"], buffer)
        return [seed for seed in range(8) if torch.equal(buffer, pattern(seed, arguments["nbytes"]))]

    async def kill(self) -> None:
        self._hub.kill(self._name)


class ProcessDistant(Distant):
    """A process that runs ``peer_process.py``."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self._numbers = count()
        self._replies: dict[int, dict[str, Any]] = {}
        self._waiting: dict[int, anyio.Event] = {}
        self._ended = anyio.Event()

    async def listen(self) -> None:
        """Take in its replies until it is gone."""
        assert self.process.stdout is not None
        rest = b""
        async for chunk in self.process.stdout:
            *lines, rest = (rest + chunk).split(b"\n")
            for reply in map(json.loads, lines):
                self._replies[reply["number"]] = reply
                self._waiting[reply["number"]].set()
        self._ended.set()

    async def call(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None
        number = next(self._numbers)
        self._waiting[number] = anyio.Event()
        await self.process.stdin.send(json.dumps({"number": number, "do": do, **arguments}).encode() + b"\n")
        with anyio.fail_after(30):
            await self._waiting[number].wait()
        reply = self._replies.pop(number)
        if "error" in reply:
            raise getattr(errors, reply["error"])(reply["text"])
        return reply["result"]

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()  # a zombie counts as alive to whoever shares memory with it
        await self._ended.wait()

    def stand_still(self) -> None:
        """Stop it: alive, and deaf."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        os.kill(self.process.pid, signal.SIGCONT)


class World(ABC):
    """Makes transports that can reach each other."""

    writes_gradually = True
    """Whether a transfer can be caught half done."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self.tasks = tasks
        self.stack = AsyncExitStack()

    @abstractmethod
    async def transport(self, name: str) -> Transport: ...

    @abstractmethod
    async def distant(self, name: str) -> Distant: ...

    async def pair(self) -> tuple[Transport, Transport]:
        """Transports ``a`` and ``b``, linked: each has heard from the other."""
        a, b = await self.transport("a"), await self.transport("b")
        await a.connect("b", b.address)
        await b.connect("a", a.address)
        async with anyio.create_task_group() as tasks:
            for transport, peer in ((a, "b"), (b, "a")):
                tasks.start_soon(transport.send, peer, 0, torch.zeros(1, dtype=torch.uint8))
                tasks.start_soon(transport.recv, peer, 0, torch.zeros(1, dtype=torch.uint8))
        return a, b

    async def pair_apart(self) -> tuple[Transport, Distant]:
        """A transport ``a`` here and a worker ``b`` elsewhere, linked."""
        a, b = await self.transport("a"), await self.distant("b")
        await a.connect("b", await b.address())
        await b.connect("a", a.address)
        return a, b


class InprocWorld(World):
    writes_gradually = False

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(tasks)
        self._hub = InprocHub()

    async def transport(self, name: str) -> Transport:
        transport = self._hub.transport(name)
        self.stack.push_async_callback(transport.aclose)
        return transport

    async def distant(self, name: str) -> Distant:
        return InprocDistant(self._hub, name)


class UcxxWorld(World):
    def __init__(self, tasks: anyio.abc.TaskGroup, shared_memory: bool) -> None:
        super().__init__(tasks)
        self._shared_memory = shared_memory

    async def transport(self, name: str) -> Transport:
        config = TransportConfig(shared_memory=self._shared_memory)
        return await self.stack.enter_async_context(UcxxTransport.open(config, name))

    async def distant(self, name: str) -> Distant:
        link = "shared_memory" if self._shared_memory else "tcp"
        command = [sys.executable, str(_SCRIPT), name, link]
        process = await self.stack.enter_async_context(
            await anyio.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None)
        )
        distant = ProcessDistant(process)
        self.stack.push_async_callback(distant.kill)
        self.tasks.start_soon(distant.listen)
        return distant


@asynccontextmanager
async def make_world(kind: str) -> AsyncIterator[World]:
    async with anyio.create_task_group() as tasks:
        world: World = InprocWorld(tasks) if kind == "inproc" else UcxxWorld(tasks, kind == "ucxx-shared_memory")
        async with world.stack:
            yield world
        tasks.cancel_scope.cancel()


@pytest.fixture(params=["inproc", "ucxx-shared_memory", "ucxx-tcp"])
async def world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each kind of transport in turn."""
    async with make_world(request.param) as made:
        yield made


@pytest.fixture(params=["ucxx-shared_memory", "ucxx-tcp"])
async def ucxx_world(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    """Each kind of UCX link in turn."""
    async with make_world(request.param) as made:
        yield made
