"""How much memory this process could still get."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that the host, or the container's limit if that is less, could still give without swapping."""
    available: int = psutil.virtual_memory().available
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        if limit == "max":
            return available
        used = int((cgroup / "memory.current").read_text())
        stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        return max(0, min(available, int(limit) - used + int(stat["inactive_file"])))
    except (OSError, ValueError, KeyError):  # no cgroup v2, or not ours to read
        return available
