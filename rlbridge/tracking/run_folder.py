"""A run's folder: one directory that holds all there is to know of a run."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from rlbridge.config import JobConfig, to_yaml
from rlbridge.transport.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """``runs/<name>/``: ``config.yaml``, metrics, summary, trace, plan, ``checkpoints/``, ``wandb/``, ``logs/``.

    Attributes:
        path: absolute.
    """

    path: Path

    @classmethod
    def create(cls, job: JobConfig) -> RunFolder:
        """Make the folder of ``job`` and write ``config.yaml`` into it. Never reuses one that exists.

        Raises:
            ConfigError: the name is taken or no file name, or the place cannot be written.
        """
        runs = Path(job.tracking.runs_dir).expanduser().absolute()
        path = _make_new(runs, _automatic_name(job)) if job.name is None else _make_named(runs, job.name)
        folder = cls(path)
        folder.logs.mkdir()
        (path / "checkpoints").mkdir()
        (path / "config.yaml").write_text(to_yaml(job))
        return folder

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def logs(self) -> Path:
        """Where each process's log is."""
        return self.path / "logs"

    def checkpoint_dir(self, version: int) -> Path:
        """Where the checkpoint of a policy version goes."""
        return self.path / "checkpoints" / f"version-{version}"

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write ``content`` as readable JSON; a reader sees the old file or the new one, never half of one."""
        write_json(self.path / name, content)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``content`` to ``path`` atomically. Infinities and NaN become ``null``."""
    encoded = msgspec.json.format(msgspec.json.encode(content), indent=2)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(encoded + b"\n")
    os.replace(partial, path)  # noqa: PTH105 - replaces an existing file, which Path.rename does not promise


def _automatic_name(job: JobConfig) -> str:
    return f"{job.recipe}-{job.sync.mode.value}-s{job.seed}-{time.strftime('%Y%m%d-%H%M%S')}"


def _make_named(runs: Path, name: str) -> Path:
    if not name or name != Path(name).name or name.startswith("."):
        raise ConfigError(f"name={name}: expected the plain name of a folder; tracking.runs_dir says where it goes")
    try:
        return _make(runs / name)
    except FileExistsError:
        raise ConfigError(f"name={name}: {runs / name} exists already; choose another name or remove it") from None


def _make_new(runs: Path, name: str) -> Path:
    number = 1
    while True:
        try:
            return _make(runs / (name if number == 1 else f"{name}-{number}"))
        except FileExistsError:
            number += 1  # two runs that began in the same second


def _make(path: Path) -> Path:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        if not path.is_dir():
            raise ConfigError(f"tracking.runs_dir: {path} is in the way and no folder") from None
        raise
    except OSError as error:
        raise ConfigError(f"tracking.runs_dir={path.parent}: cannot be written: {error}") from error
    return path
