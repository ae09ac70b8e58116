"""Whole recipes in processes of their own, as a user starts them: what system and acceptance tests share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALL = [
    "trainer.steps=5",
    "algorithm.prompts_per_step=8",
    "algorithm.group_size=4",
    "task.eval_prompts=16",
    "task.warmup_until=0",
    "rollout.replicas=1",
    "tracking.wandb=disabled",
]
"""A whole job in a few steps: what is tested is that everything is in place, not that it learns. A process costs
seconds of imports, so a test asks for a second replica only where it matters."""


@dataclass(frozen=True)
class Run:
    """A finished job: exit status, what it printed, and its folder."""

    status: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """``summary.json``."""
        return dict(json.loads((self.folder / "summary.json").read_text()))

    def metrics(self, family: str) -> list[dict[str, Any]]:
        """The lines of one family in ``metrics.jsonl``."""
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["family"] == family]


@dataclass
class Job:
    """A job that is running."""

    process: subprocess.Popen[str]
    folder: Path

    def finish(self, timeout_s: float = 150.0) -> Run:
        """Wait for its end; kill it and fail if it does not come."""
        try:
            output, _ = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            output, _ = self.process.communicate()
            pytest.fail(f"the job did not end within {timeout_s} s; it printed:\n{output}")
        return Run(self.process.returncode, output, self.folder)

    def wait_for_log(self, worker: str, text: str = "", timeout_s: float = 60.0) -> None:
        """Wait until a worker's log exists and contains ``text``."""
        path = self.folder / "logs" / f"{worker}.log"
        self._wait(lambda: path.exists() and text in path.read_text(), f"{text!r} in {path.name}", timeout_s)

    def wait_for_metric(self, family: str, step: int, timeout_s: float = 90.0) -> None:
        """Wait until ``metrics.jsonl`` has the family's line of a step."""
        path = self.folder / "metrics.jsonl"

        def there() -> bool:
            if not path.exists():
                return False
            lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            return any(line["family"] == family and line["step"] >= step for line in lines)

        self._wait(there, f"{family} at step {step}", timeout_s)

    def _wait(self, ready: Callable[[], bool], what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                output, _ = self.process.communicate()
                pytest.fail(f"waited in vain for {what}; the job printed:\n{output}")
            time.sleep(0.05)

    def worker_pid(self, worker: str) -> int:
        """Process id of a worker, from the controller's children."""
        listing = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines()[1:]:
            pid, parent, args = line.split(None, 2)
            if int(parent) == self.process.pid and worker in args:
                return int(pid)
        pytest.fail(f"{worker} is not running")

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to the foreground process group of the controller."""
        os.killpg(self.process.pid, signal.SIGINT)


Start = Callable[..., Job]


def started_jobs(folder: Path) -> Iterator[Start]:
    """Yield a function that starts ``rlbridge run RECIPE ...`` under ``folder``; kill what still runs at the end."""
    jobs: list[Job] = []

    def start_job(recipe: str, *overrides: str, small: bool = True, env: dict[str, str] | None = None) -> Job:
        name = f"run{len(jobs)}"
        fixed = [f"tracking.runs_dir={folder}", f"name={name}", "tracking.progress=plain"]
        command = [sys.executable, "-m", "rlbridge", "run", recipe, *fixed, *(SMALL if small else []), *overrides]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
            cwd=folder,
        )
        jobs.append(Job(process, folder / name))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()
