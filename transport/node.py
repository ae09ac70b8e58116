"""Which processes can share memory: the identity of a node."""

from __future__ import annotations

import hashlib
import socket
from functools import cache
from pathlib import Path

_NAMESPACES = ("ipc", "pid", "net")
"""Shared memory needs a common IPC space, CMA a common PID space; a network space of its own marks a simulated host."""


@cache
def node_identity() -> str:
    """Name of this node, e.g. ``trainhost-3f9a01c2b4d6``: equal in two processes exactly if they can share memory.

    The boot id tells machines apart, the namespaces tell containers of one machine apart, and the device behind
    ``/dev/shm`` tells containers apart that share namespaces but mount a memory of their own.
    """
    parts = [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    parts += [f"{kind}:{Path('/proc/self/ns', kind).stat().st_ino}" for kind in _NAMESPACES]
    shm = Path("/dev/shm")
    parts.append(f"shm:{shm.stat().st_dev if shm.exists() else 'none'}")
    digest = hashlib.blake2b("/".join(parts).encode(), digest_size=6).hexdigest()
    return f"{socket.gethostname()}-{digest}"


def host_of(node: str) -> str:
    """The host name in a node's identity."""
    return node.rpartition("-")[0]
