"""The benchmark's worker processes: started, spoken to, and gone at the end, whatever happened."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import anyio
import msgspec
from anyio.abc import Process

from rlbridge.bench import messages as m
from rlbridge.launcher.local import worker_environment
from rlbridge.transport.errors import DeadlineExceededError, WorkerError

R = TypeVar("R", bound=m.FromWorker)

_LEAVE_S = 5.0
_LOG_LINES = 15


class _Hand:
    """One worker process."""

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self.process = name, process
        self._log = log
        self._unread = bytearray()

    async def send(self, message: m.ToWorker) -> None:
        try:
            if self.process.stdin is not None:
                await self.process.stdin.send(m.frame(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError):
            raise self._died() from None

    async def receive(self) -> m.FromWorker:
        (length,) = m.LENGTH.unpack(await self._read(m.LENGTH.size))
        reply: m.FromWorker = msgspec.msgpack.decode(await self._read(length), type=m.FromWorker)
        return reply

    async def _read(self, size: int) -> bytes:
        while len(self._unread) < size:
            try:
                if self.process.stdout is not None:
                    self._unread += await self.process.stdout.receive()
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                raise self._died() from None
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    def _died(self) -> WorkerError:
        lines = self._log.read_text(errors="replace").splitlines()[-_LOG_LINES:]
        return WorkerError("\n".join([f"benchmark worker {self.name} died; it printed:", *lines]))

    async def leave(self) -> None:
        """End its input, which ends the process; kill it if it does not take notice."""
        if self.process.stdin is not None:
            await self.process.stdin.aclose()
        with anyio.move_on_after(_LEAVE_S):
            await self.process.wait()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.aclose()


class Crew:
    """Workers by name. On leaving the ``async with`` block no process is left.

    Args:
        logs: folder for what they print.
        deadline_s: for every answer.
    """

    def __init__(self, logs: Path, deadline_s: float) -> None:
        self._logs, self._deadline_s = logs, deadline_s
        self._hands: dict[str, _Hand] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as tasks:
                for hand in self._hands.values():
                    tasks.start_soon(hand.leave)

    async def start(self, name: str, inside: Sequence[str] = ()) -> None:
        """Start the worker ``name``; ``inside`` is a command that runs its arguments somewhere else."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = await anyio.open_process(
                [*inside, sys.executable, "-P", "-m", "rlbridge.bench.worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                env=worker_environment(1),
                start_new_session=True,  # Ctrl-C reaches the benchmark only, which ends its workers
            )
        self._hands[name] = _Hand(name, process, log)

    async def ask(self, messages: Mapping[str, m.ToWorker], reply: type[R], what: str) -> dict[str, R]:
        """Send each worker its message, all at once, and wait for all answers.

        Args:
            messages: worker to message.
            reply: type of the answers.
            what: what is awaited, for errors.

        Raises:
            WorkerError: a worker failed or died. DeadlineExceededError: one did not answer.
        """
        replies: dict[str, R] = {}

        async def one(name: str) -> None:
            answer = await self._hands[name].receive()
            if isinstance(answer, m.Failed):
                raise WorkerError(f"benchmark worker {name} failed: {answer.text}")
            if not isinstance(answer, reply):
                raise WorkerError(f"benchmark worker {name} answered {type(answer).__name__}")
            replies[name] = answer

        with anyio.move_on_after(self._deadline_s) as scope:
            async with anyio.create_task_group() as tasks:
                for name in messages:
                    tasks.start_soon(one, name)
                for name, message in messages.items():
                    await self._hands[name].send(message)
        if scope.cancelled_caught:
            late = sorted(set(messages) - set(replies))
            raise DeadlineExceededError(", ".join(late), what, self._deadline_s)
        return replies
