"""Starting whole jobs for the system tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import SMALL, Job, Start


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``rlbridge run RECIPE SMALL... OVERRIDES...``; whatever is still running at the end is killed."""
    jobs: list[Job] = []

    def start_job(recipe: str, *overrides: str, small: bool = True, env: dict[str, str] | None = None) -> Job:
        name = f"run{len(jobs)}"
        fixed = [f"tracking.runs_dir={tmp_path}", f"name={name}", "tracking.progress=plain"]
        command = [sys.executable, "-m", "rlbridge", "run", recipe, *fixed, *(SMALL if small else []), *overrides]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, **(env or {})},
            cwd=tmp_path,
        )
        jobs.append(Job(process, tmp_path / name))
        return jobs[-1]

    yield start_job
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()
            job.process.communicate()
