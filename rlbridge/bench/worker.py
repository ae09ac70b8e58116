"""``python -m rlbridge.bench.worker NAME``: holds synthetic shards and runs programs on command.

Commands come down standard input, whose end is the end of the process, so that no worker outlives its benchmark.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from typing import Any

import msgspec
import torch

from rlbridge.bench import messages as m
from rlbridge.bench.bare import BareUcx
from rlbridge.bench.workload import empty_tensors, fill, wrong_elements
from rlbridge.sync.executor import BufferPool, Execution, Staging, message_tag
from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.messages import TransferStats
from rlbridge.sync.packing import PreparedBucket, prepare
from rlbridge.sync.plan.program import HEADER_BYTES, Program
from rlbridge.transport.errors import ProtocolError
from rlbridge.transport.ucxx_transport import UcxxTransport

_EPOCH = 1


class _Plan:
    """A program, bound to the worker's tensors. Each has a pool of its own, as if it were the only one."""

    def __init__(self, program: Program, tensors: dict[str, torch.Tensor], staging_bytes: int) -> None:
        self.program = program
        self.prepared: dict[int, PreparedBucket] = {
            bucket.bucket: prepare(bucket, tensors) for bucket in program.buckets if bucket.pieces
        }
        self.pool = BufferPool(staging_bytes)
        self._messages: list[torch.Tensor] | None = None

    @property
    def messages(self) -> list[torch.Tensor]:
        """A buffer for each bucket, for ways without packing; made once, and touched, so that no run pays for pages."""
        if self._messages is None:
            sizes = [HEADER_BYTES + bucket.payload_bytes for bucket in self.program.buckets]
            self._messages = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        return self._messages


class Worker:
    """One worker after its ``Setup``."""

    def __init__(self, name: str, setup: m.Setup) -> None:
        self._setup = setup
        self._tensors = empty_tensors(setup.layout)
        self._plans: dict[str, _Plan] = {}
        self.transport = UcxxTransport(setup.config, name)
        self._bare = BareUcx(setup.config) if setup.bare else None

    def ready(self) -> m.Ready:
        """Where it is reached."""
        return m.Ready(self.transport.address, self._bare.address if self._bare is not None else b"")

    async def handle(self, command: m.ToWorker) -> m.FromWorker:
        """Do it and say so."""
        match command:
            case m.Load():
                await self._load(command)
            case m.Fill(version):
                self._fill(version)
            case m.Run():
                return await self._run(command)
            case m.Check(version):
                wrong = 0 if self._setup.sends else wrong_elements(self._setup.layout, self._tensors, version)
                return m.Checked(wrong)
            case m.Setup():
                raise ProtocolError("a worker is set up once")
        return m.Done()

    async def _load(self, load: m.Load) -> None:
        staging_bytes = self._setup.config.staging_bytes
        self._plans = {kind: _Plan(program, self._tensors, staging_bytes) for kind, program in load.programs.items()}
        for peer, address in load.peers.items():
            await self.transport.connect(peer, address)
        if self._bare is not None:
            self._bare.connect(load.bare_peers)

    def _fill(self, version: int) -> None:
        if self._setup.sends:
            fill(self._setup.layout, self._tensors, version)
        else:
            for tensor in self._tensors.values():
                tensor.zero_()

    async def _run(self, run: m.Run) -> m.Ran:
        plan = self._plans[run.plan]
        if run.way is not m.Way.FULL:
            plan.messages  # noqa: B018  made before the clock runs
        begin_s = time.monotonic()
        stats, step_s = TransferStats(), dict[str, float]()
        if run.way is m.Way.FULL:
            stats, step_s = await self._execute(plan, run.version)
        elif run.way is m.Way.CARRY:
            await self._carry(plan, run.version)
        elif self._bare is not None:
            self._bare.run(plan.program, plan.messages)
        return m.Ran(begin_s, time.monotonic(), stats, step_s, plan.pool.peak_bytes)

    async def _execute(self, plan: _Plan, version: int) -> tuple[TransferStats, dict[str, float]]:
        execution = Execution(
            program=plan.program,
            transport=self.transport,
            epoch=_EPOCH,
            version=version,
            treatment=Treatment.SEND if self._setup.sends else Treatment.UNPACK,
            prepared=plan.prepared,
            pool=plan.pool,
            staging=Staging(),
        )
        stats = await execution.run()
        return stats, execution.step_s

    async def _carry(self, plan: _Plan, version: int) -> None:
        number = {worker: i for i, worker in enumerate(plan.program.workers)}
        async with asyncio.TaskGroup() as tasks:
            for bucket, buffer in zip(plan.program.buckets, plan.messages, strict=True):
                source = bucket.recv_from if bucket.recv_from is not None else plan.program.worker
                tag = message_tag(_EPOCH, version, number[source], bucket.bucket)
                if bucket.recv_from is not None:
                    tasks.create_task(self.transport.recv(source, tag, buffer))
                for peer in bucket.send_to:
                    tasks.create_task(self.transport.send(peer, tag, buffer))

    async def aclose(self) -> None:
        """Close its links."""
        await self.transport.aclose()
        if self._bare is not None:
            self._bare.close()


async def _serve(name: str, replies: int) -> None:
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader(limit=1 << 24)
    source, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin.buffer)
    worker: Worker | None = None
    try:
        while (command := await _next(commands)) is not None:
            if worker is None:
                worker = _set_up(name, command)
                reply: m.FromWorker = worker.ready()
            else:
                reply = await _while_parent_lives(commands, worker.handle(command))
            _write_all(replies, m.frame(reply))
    except Exception as error:
        _write_all(replies, m.frame(m.Failed(f"{type(error).__name__}: {error}")))
        raise
    finally:
        source.close()
        if worker is not None:
            await worker.aclose()


def _set_up(name: str, command: m.ToWorker) -> Worker:
    if not isinstance(command, m.Setup):
        raise ProtocolError(f"a worker is set up first, not told to {type(command).__name__}")
    return Worker(name, command)


async def _while_parent_lives(commands: asyncio.StreamReader, work: Any) -> m.FromWorker:
    """``work``, unless the input ends first: then the whole process ends, whatever its transfers are at."""
    task = asyncio.ensure_future(work)
    while not task.done():
        await asyncio.wait([task], timeout=0.5)
        if commands.at_eof():
            os._exit(1)
    reply: m.FromWorker = task.result()
    return reply


async def _next(commands: asyncio.StreamReader) -> m.ToWorker | None:
    try:
        (length,) = m.LENGTH.unpack(await commands.readexactly(m.LENGTH.size))
        body = await commands.readexactly(length)
    except asyncio.IncompleteReadError:
        return None
    command: m.ToWorker = msgspec.msgpack.decode(body, type=m.ToWorker)
    return command


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> None:
    """Entry of a worker process."""
    torch.set_num_threads(1)
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not get between the messages
    asyncio.run(_serve(sys.argv[1], replies))


if __name__ == "__main__":
    main()
