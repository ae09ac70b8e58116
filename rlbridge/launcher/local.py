"""Workers as processes of this host: fresh interpreters, never forks (UCX does not survive one).

A worker's specification, which holds the run's secret, goes down its standard input: never through its arguments or its
environment, which every user of the host can read. What it prints goes to ``logs/<name>.log`` of the run's folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import Process

from rlbridge.launcher.config import LauncherConfig
from rlbridge.transport.errors import WorkerError


class WorkerHandle:
    """One started worker.

    Attributes:
        name: the worker's name, unique in the run.
        log: file that holds what it prints.
    """

    def __init__(self, name: str, process: Process, log: Path) -> None:
        self.name, self.log = name, log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id; also its process group's."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, minus the signal's number if one ended it, ``None`` while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Wait until the process is gone and reaped; returns its ``returncode``. Any number of tasks may wait."""
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask the worker to leave."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the worker, and whatever it started, now."""
        self._signal(signal.SIGKILL)

    def tail_of_log(self, lines: int = 20) -> str:
        """The last lines that the worker printed."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    async def aclose(self) -> None:
        """Kill the process if it still runs, reap it and close its pipes."""
        if self.returncode is None:
            self.kill()
        await self._process.aclose()

    def _signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:
                return  # it ended between the check and the signal


class LocalLauncher:
    """Starts workers and answers for them: on leaving the ``async with`` block none is left, whatever happened inside.

    Args:
        config: deadlines.
        run_dir: the run's folder; logs go to ``logs/`` in it.
        module: what a worker runs.
    """

    def __init__(self, config: LauncherConfig, run_dir: Path, module: str = "rlbridge.worker") -> None:
        self._config = config
        self._module = module
        self._logs = run_dir / "logs"
        self._workers: dict[str, WorkerHandle] = {}

    async def __aenter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self, name: str, spec: bytes, *, threads: int = 1) -> WorkerHandle:
        """Start a worker and hand it ``spec`` (JSON of one of ``rlbridge.worker``'s specifications).

        Returns once the specification is delivered; joining the run is the worker's own affair.

        Raises:
            WorkerError: the name is taken, or the process died before it had read its specification.
        """
        if name in self._workers and self._workers[name].returncode is None:
            raise WorkerError(f"worker {name!r} is running already")
        log = self._logs / f"{name}.log"
        with log.open("ab") as output:
            process = await anyio.open_process(
                # -P: modules of the current directory must not shadow installed ones.
                [sys.executable, "-P", "-m", self._module, name, str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=worker_environment(threads),
                start_new_session=True,  # Ctrl-C reaches the controller only, which ends its workers in order
            )
        handle = self._workers[name] = WorkerHandle(name, process, log)
        await self._deliver(handle, process, spec)
        return handle

    async def stop(self) -> None:
        """Ask every worker to leave, kill what is left after ``stop_timeout_s``, reap all. Cannot be cancelled."""
        with anyio.CancelScope(shield=True):
            for worker in self._workers.values():
                worker.terminate()
            with anyio.move_on_after(self._config.stop_timeout_s):
                for worker in self._workers.values():
                    await worker.wait()
            for worker in self._workers.values():
                await worker.aclose()

    @staticmethod
    async def _deliver(handle: WorkerHandle, process: Process, spec: bytes) -> None:
        if process.stdin is None:
            raise WorkerError(f"worker {handle.name!r} was started without a pipe")
        try:
            await process.stdin.send(spec)
            await process.stdin.aclose()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, ConnectionError) as error:
            await handle.aclose()
            raise WorkerError(
                f"worker {handle.name!r} died while starting (exit {handle.returncode}); {handle.log} ends with:\n"
                f"{handle.tail_of_log()}"
            ) from error


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of a worker with ``threads`` compute threads: this process's, with libraries kept quiet."""
    return os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
        "UCX_LOG_LEVEL": os.environ.get("UCX_LOG_LEVEL", "error"),
        "UCX_WARN_UNUSED_ENV_VARS": "n",
    }
