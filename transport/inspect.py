"""What this machine's UCX can do, and in plain words what it cannot and why. For ``rlbridge doctor``."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rlbridge.transport.errors import TransportError
from rlbridge.transport.node import node_identity
from rlbridge.transport.ucx_library import ucx

_RESOURCE = re.compile(r"resource\s+\d+\s*:.*--\s*(?P<transport>[^/\s]+)/(?P<device>\S+)")
_RDMA = ("rc", "ud", "dc", "ib", "gga", "srd")
_SHARED_MEMORY = ("posix", "sysv", "xpmem")
_SMALL_SHM_BYTES = 256 * 1024 * 1024
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class UcxReport:
    """What was found.

    Attributes:
        version: version of the UCX library that is loaded, e.g. ``1.21.0``.
        library: path of the ``libucp`` that is loaded.
        from_wheel: whether that is the one that PyPI's ``libucx`` wheel brings.
        transports: transport -> its devices, as UCX lists them.
        shared_memory: whether processes of this node can share memory.
        cma: whether large messages inside this node are copied once (cross-memory attach).
        tcp_devices: network devices for TCP.
        rdma_devices: network devices for RDMA.
        cuda: whether this UCX can move GPU memory.
        shm_total_bytes: size of ``/dev/shm``; 0 if there is none.
        shm_free_bytes: what is free of it.
        node: identity of this node, see ``node_identity``.
        remarks: in plain words, what is missing, why, and how to mend it.
    """

    version: str
    library: str
    from_wheel: bool
    transports: dict[str, tuple[str, ...]]
    shared_memory: bool
    cma: bool
    tcp_devices: tuple[str, ...]
    rdma_devices: tuple[str, ...]
    cuda: bool
    shm_total_bytes: int
    shm_free_bytes: int
    node: str
    remarks: tuple[str, ...]


def inspect_ucx() -> UcxReport:
    """Load UCX and look.

    Raises:
        TransportError: UCX is loaded, but does not start.
    """
    try:
        info = str(ucx.UCXContext({}, (ucx.Feature.TAG, ucx.Feature.WAKEUP)).info)
    except ucx.UCXError as error:
        raise TransportError(f"UCX does not start: {error}; look for UCX_* variables in the environment") from error
    transports = parse_resources(info)
    library = _loaded_library()
    shm_total_bytes, shm_free_bytes = _shm_bytes()
    found = UcxReport(
        version=".".join(map(str, ucx.get_ucx_version())),
        library=library,
        from_wheel="site-packages" in library,
        transports=transports,
        shared_memory=any(name in transports for name in _SHARED_MEMORY),
        cma="cma" in transports,
        tcp_devices=transports.get("tcp", ()),
        rdma_devices=tuple(sorted({device for name in transports if _is_rdma(name) for device in transports[name]})),
        cuda=any(name.startswith("cuda") for name in transports),
        shm_total_bytes=shm_total_bytes,
        shm_free_bytes=shm_free_bytes,
        node=node_identity(),
        remarks=(),
    )
    return replace(found, remarks=explain(found, rdma_hardware=_rdma_hardware(), ptrace_scope=_ptrace_scope()))


def parse_resources(info: str) -> dict[str, tuple[str, ...]]:
    """Transports and their devices from UCX's description of a context. Pure."""
    devices: dict[str, list[str]] = {}
    for match in _RESOURCE.finditer(info):
        devices.setdefault(match["transport"], []).append(match["device"])
    return {name: tuple(devices[name]) for name in sorted(devices)}


def explain(report: UcxReport, *, rdma_hardware: Sequence[str], ptrace_scope: int) -> tuple[str, ...]:
    """What is missing, why, and how to mend it. Pure.

    Args:
        report: what was found.
        rdma_hardware: RDMA devices of this machine, whether UCX can use them or not.
        ptrace_scope: the kernel's ``yama.ptrace_scope``; above 0 it forbids cross-memory attach between siblings.
    """
    remarks = []
    if not report.rdma_devices:
        remarks.append(_why_no_rdma(report.from_wheel, rdma_hardware))
    if not report.cuda:
        remarks.append("no GPU memory: UCX found no CUDA driver; weights are staged in host memory")
    if not report.shared_memory:
        remarks.append("no shared memory: processes of this node talk TCP, five times slower; is /dev/shm mounted?")
    elif not report.cma:
        remarks.append("no CMA: large messages inside this node go through /dev/shm piece by piece, ten times slower")
    elif ptrace_scope > 0:
        remarks.append(
            f"CMA may be refused: kernel.yama.ptrace_scope is {ptrace_scope}; set it to 0, or run the workers as root"
        )
    if report.shared_memory and report.shm_total_bytes < _SMALL_SHM_BYTES:
        size_mib = report.shm_total_bytes // 2**20
        remarks.append(f"/dev/shm has only {size_mib} MiB: start the container with --shm-size=1g or --ipc=host")
    if not report.tcp_devices:
        remarks.append("no TCP: UCX found no network device that is up, not even lo; nodes cannot reach each other")
    return tuple(remarks)


def _why_no_rdma(from_wheel: bool, rdma_hardware: Sequence[str]) -> str:
    reason = "PyPI's libucx is built without verbs" if from_wheel else "this libucx has no verbs, or may not use them"
    if not rdma_hardware:
        return f"no RDMA: this machine has no RDMA device (and {reason}); nodes talk TCP"
    mend = (
        "install UCX from conda-forge, or build it with --enable-mt --with-verbs --with-rdmacm, then set "
        "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true and LD_LIBRARY_PATH to it"
        if from_wheel
        else "build UCX with --with-verbs, and look at ulimit -l and the permissions of /dev/infiniband"
    )
    return f"no RDMA although this machine has {', '.join(rdma_hardware)}: {reason}; {mend}"


def _is_rdma(transport: str) -> bool:
    return transport.split("_")[0] in _RDMA


def _loaded_library() -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split(maxsplit=5)[-1]
        if "/libucp" in path:
            return path
    raise TransportError("UCX answers, but no libucp is mapped into this process")


def _shm_bytes() -> tuple[int, int]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return 0, 0
    usage = shutil.disk_usage(shm)
    return usage.total, usage.free


def _rdma_hardware() -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in _INFINIBAND.iterdir())) if _INFINIBAND.is_dir() else ()


def _ptrace_scope() -> int:
    return int(_PTRACE_SCOPE.read_text()) if _PTRACE_SCOPE.exists() else 0
