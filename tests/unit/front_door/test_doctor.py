"""``rlbridge doctor``: true on this machine, and clear about machines that lack something."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console

from rlbridge import doctor as doctors
from rlbridge.doctor import Finding, Level, doctor, shared_memory, ucx_resources, ucx_transports

INFO = """
#            md 1  :  component 1  tcp
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 2  dev 0  flags -- sysv/memory
#      resource 4  :  md 3  dev 0  flags -- posix/memory
#      resource 5  :  md 4  dev 0  flags -- cma/memory
"""


def run_doctor() -> tuple[int, str]:
    out = io.StringIO()
    status = doctor(Console(file=out, width=200, soft_wrap=True))
    return status, out.getvalue()


def levels(resources: dict[str, set[str]]) -> dict[str, Level]:
    return {finding.text.split(":")[0]: finding.level for finding in ucx_transports(resources)}


def test_it_finds_what_the_tests_themselves_run_on() -> None:
    status, text = run_doctor()
    assert status == 0
    assert f"torch {torch.__version__}" in text
    assert "UCX 1." in text
    assert "libucp" in text
    assert "rlbridge run grpo" in text


def test_something_missing_is_status_1_with_the_mend_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding(Level.MISSING, "UCX cannot be loaded", "pip install ucxx-cu12")

    monkeypatch.setattr(doctors, "_SECTIONS", (("Transport", broken),))
    status, text = run_doctor()
    assert status == 1
    assert text.rstrip().endswith("UCX cannot be loaded: pip install ucxx-cu12")


def test_a_library_that_is_not_installed_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctors, "package_version", lambda name: None if name == "transformers" else "1.0")
    found = {finding.text: finding for finding in doctors.python()}
    assert found["transformers is not installed"].level is Level.MISSING
    assert found["transformers is not installed"].mend == "pip install transformers"


def test_a_contexts_own_words_become_transports_and_devices() -> None:
    assert ucx_resources(INFO) == {
        "self": {"memory"},
        "tcp": {"eth0", "lo"},
        "sysv": {"memory"},
        "posix": {"memory"},
        "cma": {"memory"},
    }


def test_transports_are_judged_by_what_a_job_needs() -> None:
    full = ucx_resources(INFO)
    assert levels(full) == {
        "shared memory between processes": Level.OK,
        "TCP": Level.OK,
        "no RDMA transport": Level.NOTE,
    }
    assert levels(full | {"rc_mlx5": {"mlx5_0:1"}})["RDMA"] is Level.OK
    no_cma = {name: devices for name, devices in full.items() if name != "cma"}
    assert levels(no_cma)["shared memory between processes"] is Level.NOTE
    assert levels({"tcp": {"lo"}})["no shared memory between processes"] is Level.NOTE
    assert levels(full | {"tcp": {"eth0"}})["TCP"] is Level.MISSING


def test_shared_memory_may_be_small_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage(NamedTuple):
        free: int

    assert shared_memory(tmp_path / "nowhere").level is Level.NOTE
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**20))
    assert "--shm-size" in shared_memory(tmp_path).mend
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(2**30))
    assert shared_memory(tmp_path).level is Level.OK
