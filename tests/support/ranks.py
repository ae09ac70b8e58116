"""Ranks of one torch.distributed job as processes: started together, ended together, never waited for without end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent


def run_ranks(program: Path, world: int, *arguments: str, folder: Path, deadline_s: float) -> None:
    """Run ``program RANK WORLD ARGUMENTS...`` once per rank and wait; logs go to ``folder/rank-N.log``.

    Fails the test with the log of the first rank that failed, or with all logs after ``deadline_s`` seconds.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(world)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-P", str(program), str(rank), str(world), *arguments]
            with log.open("w") as output:
                processes.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
        _wait(processes, logs, time.monotonic() + deadline_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path], deadline: float) -> None:
    """Return when all ranks have ended well; one that failed leaves the others waiting, so it ends the wait."""
    while True:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed:
            pytest.fail(f"rank {failed[0]} ended with status {statuses[failed[0]]}:\n{logs[failed[0]].read_text()}")
        if None not in statuses:
            return
        if time.monotonic() > deadline:
            late = [rank for rank, status in enumerate(statuses) if status is None]
            texts = "".join(f"\nrank {rank}:\n{logs[rank].read_text()}" for rank in late)
            pytest.fail(f"ranks {late} did not end in time{texts}")
        time.sleep(0.05)
