"""Fixtures of every test: the event loop's kind, and proof that a test left nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hypothesis
import psutil
import pytest

SHARED_MEMORY = Path("/dev/shm")  # where UCX, torch and gloo keep segments
LEAVING_S = 5.0

# Properties are checked by count of examples, not by a stopwatch: machines are shared, and first calls load libraries.
hypothesis.settings.register_profile("rlbridge", deadline=None)
hypothesis.settings.load_profile("rlbridge")


@pytest.fixture
def anyio_backend() -> str:
    """The bridge runs on asyncio: UCX's descriptor is watched with ``loop.add_reader``."""
    return "asyncio"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests carry the mark of their folder."""
    for item in items:
        for level in ("integration", "system", "acceptance"):
            if level in item.path.parts:
                item.add_marker(level)


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test of real processes that leaves a child, a socket or a shared memory segment behind."""
    if "unit" in request.node.path.parts:
        yield
        return
    before = _Holdings.now()
    yield
    left = before.what_is_new()
    deadline_s = time.monotonic() + LEAVING_S
    while left and time.monotonic() < deadline_s:
        time.sleep(0.05)
        left = before.what_is_new()
    if left:
        pytest.fail(f"left behind: {', '.join(left)}", pytrace=False)


@dataclass(frozen=True)
class _Holdings:
    """What this process and its children hold."""

    children: frozenset[str]
    sockets: frozenset[str]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> _Holdings:
        return cls(_children(), _open_sockets(), frozenset(entry.name for entry in SHARED_MEMORY.iterdir()))

    def what_is_new(self) -> list[str]:
        after = _Holdings.now()
        return [
            *(f"process {name}" for name in sorted(after.children - self.children)),
            *(f"socket {name}" for name in sorted(after.sockets - self.sockets)),
            *(f"shared memory {name}" for name in _ours(after.segments - self.segments)),
        ]


def _children() -> frozenset[str]:
    return frozenset(f"{child.pid}" for child in psutil.Process().children(recursive=True))


def _open_sockets() -> frozenset[str]:
    targets = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            targets.add(str(descriptor.readlink()))
        except FileNotFoundError:
            continue  # the descriptor of this very listing
    return frozenset(target for target in targets if target.startswith("socket:"))


def _ours(segments: frozenset[str]) -> list[str]:
    """Those that no other living process has mapped: neighbours on this machine make and unmake segments too."""
    if not segments:
        return []
    mapped_elsewhere: set[str] = set()
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid():
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                mapped_elsewhere |= {name for name in segments if f"{SHARED_MEMORY}/{name}" in maps}
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue  # it ended, or belongs to somebody else
    return sorted(segments - mapped_elsewhere)
