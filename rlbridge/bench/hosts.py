"""Simulated hosts on one machine: network namespaces on a switch, each behind a link of limited rate.

Shared memory would go past the network, so every host also has its own IPC and process space. A *keeper* process holds
these open; it is the host's process 1, so that the kernel ends whatever runs on the host when it goes, and it goes when
its input ends, also if the benchmark was killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from anyio.abc import Process

from rlbridge.transport.errors import ConfigError, DeadlineExceededError

DEVICE = "eth0"
"""A host's network device."""

_DEVICES = (DEVICE, "lo")

_PREFIX = "rlbridge-"
_SWITCH = f"{_PREFIX}switch"
_BRIDGE = "switch0"
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_LOCK = Path("/run/rlbridge-bench.lock")
_BURST, _QUEUE = "256k", "50ms"
_MTU = "9000"
"""As on a cluster's network: of the common 1500 a twentieth is headers."""

_LOCK_DEADLINE_S = 120.0
_KEEPER_DEADLINE_S = 30.0
_KEEP = "echo ready; exec cat"
_HOSTS_MAX = 200


def check_able(hosts: int) -> None:
    """Refuse what this machine or this user cannot do.

    Raises:
        ConfigError: saying what is missing.
    """
    if not 2 <= hosts <= _HOSTS_MAX:
        raise ConfigError(f"--hosts must be from 2 to {_HOSTS_MAX}, not {hosts}")
    missing = {package: tool for tool, package in _TOOLS.items() if shutil.which(tool) is None}
    if missing:
        lines = [f"{tool!r} of the package {package} (apt-get install {package})" for package, tool in missing.items()]
        raise ConfigError(f"--hosts makes network namespaces, which needs {' and '.join(lines)}")
    if os.geteuid() != 0:
        raise ConfigError("--hosts makes network namespaces, which only root may: run it under sudo, or leave it out")


def host_name(number: int) -> str:
    """The network namespace of a host."""
    return f"{_PREFIX}host{number}"


def network_commands(hosts: int, link_mbps: float) -> list[list[str]]:
    """What builds the network: all links end in a namespace that is only a switch, so that nothing else sees them."""
    commands = [["ip", "netns", "add", _SWITCH]]
    commands += _in(_SWITCH, [["link", "add", _BRIDGE, "type", "bridge"], ["link", "set", _BRIDGE, "up"]])
    for number in range(hosts):
        host, port = host_name(number), f"port{number}"
        commands.append(["ip", "netns", "add", host])
        commands += _in(
            _SWITCH,
            [
                ["link", "add", port, "mtu", _MTU, "type", "veth", "peer", "name", DEVICE, "mtu", _MTU, "netns", host],
                ["link", "set", port, "master", _BRIDGE],
                ["link", "set", port, "up"],
            ],
        )
        address = f"10.77.0.{number + 1}/24"
        commands += _in(host, [["addr", "add", address, "dev", DEVICE], *(["link", "set", d, "up"] for d in _DEVICES)])
        # A queue shapes what leaves a device: at the port what the host receives, at its own device what it sends.
        commands += [_limited(_SWITCH, port, link_mbps), _limited(host, DEVICE, link_mbps)]
    return commands


def _in(namespace: str, commands: Iterable[Sequence[str]]) -> list[list[str]]:
    return [["ip", "-n", namespace, *command] for command in commands]


def _limited(namespace: str, device: str, mbps: float) -> list[str]:
    rate = f"{round(mbps * 1e6)}bit"
    shape = ["tbf", "rate", rate, "burst", _BURST, "latency", _QUEUE]
    return ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *shape]


def leftovers(listing: str) -> list[str]:
    """Namespaces of a benchmark in what ``ip netns list`` printed."""
    names = (line.split()[0] for line in listing.splitlines() if line.strip())
    return [name for name in names if name.startswith(_PREFIX)]


class Hosts:
    """Hosts that are up."""

    def __init__(self) -> None:
        self._inside: list[list[str]] = []

    def inside(self, host: int) -> list[str]:
        """The command that runs its arguments on ``host``."""
        return self._inside[host]

    async def keep(self, number: int, stack: AsyncExitStack) -> None:
        """Start the keeper of the next host."""
        command = ["ip", "netns", "exec", host_name(number)]
        apart = ["unshare", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _KEEP]
        process = await anyio.open_process(
            [*command, *apart], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None, start_new_session=True
        )
        stack.push_async_callback(_end_keeper, process)
        first = await _first_process(process, host_name(number))
        self._inside.append([*command, "nsenter", "-t", str(first), "--ipc", "--pid", "--mount", "--"])


@asynccontextmanager
async def simulated_hosts(count: int, link_mbps: float) -> AsyncIterator[Hosts]:
    """``count`` hosts whose links carry ``link_mbps`` in each direction. One benchmark at a time has such hosts.

    Whatever happens inside the block, also an interrupt, nothing is left of them; what a killed benchmark left is
    removed first.

    Raises:
        ConfigError: the machine refuses. DeadlineExceededError: another benchmark goes on and on.
    """
    check_able(count)
    async with AsyncExitStack() as stack:
        stack.callback(os.close, await _locked())
        await _remove_all()
        stack.push_async_callback(_remove_all)
        for command in network_commands(count, link_mbps):
            await _do(command)
        hosts = Hosts()
        for number in range(count):
            await hosts.keep(number, stack)
        yield hosts


async def _locked() -> int:
    descriptor = os.open(_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with anyio.fail_after(_LOCK_DEADLINE_S):
            while not _try_lock(descriptor):  # noqa: ASYNC110  a file lock has no event
                await anyio.sleep(0.1)
    except TimeoutError:
        os.close(descriptor)
        what = f"end of it ({_LOCK} is locked)"
        raise DeadlineExceededError("another benchmark with --hosts", what, _LOCK_DEADLINE_S) from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


async def _remove_all() -> None:
    with anyio.CancelScope(shield=True):
        listing = await anyio.run_process(["ip", "netns", "list"])
        for name in leftovers(listing.stdout.decode()):
            await anyio.run_process(["ip", "netns", "delete", name], check=False)


async def _do(command: list[str]) -> None:
    done = await anyio.run_process(command, check=False)
    if done.returncode != 0:
        said = done.stderr.decode(errors="replace").strip()
        raise ConfigError(f"--hosts: this machine refuses `{' '.join(command)}`: {said}")


async def _first_process(unshare: Process, host: str) -> int:
    """The keeper's process id, once its spaces are ready."""
    said = b""
    with anyio.move_on_after(_KEEPER_DEADLINE_S) as scope:
        try:
            while b"ready\n" not in said and unshare.stdout is not None:
                said += await unshare.stdout.receive()
        except anyio.EndOfStream:
            raise ConfigError(f"--hosts: this machine refuses {host} a process space of its own (unshare)") from None
    if scope.cancelled_caught:
        raise DeadlineExceededError(f"the keeper of {host}", "sign of life", _KEEPER_DEADLINE_S)
    return _children(unshare.pid)[0]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def _end_keeper(process: Process) -> None:
    with anyio.CancelScope(shield=True):
        if process.stdin is not None:
            await process.stdin.aclose()
        with anyio.move_on_after(_KEEPER_DEADLINE_S):
            await process.wait()
        if process.returncode is None:
            process.kill()  # which kills the keeper, and with it everything on its host
        await process.aclose()
