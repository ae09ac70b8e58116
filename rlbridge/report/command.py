"""``rlbridge report RUN ...``: reads the runs, writes the page."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from rlbridge.report.page import page
from rlbridge.report.reading import find_run, read_run
from rlbridge.transport.errors import ConfigError


def write_report(runs: Sequence[str], output: str | None = None) -> Path:
    """Write one page of ``runs`` (paths, or names in ``runs/``) and return where it is.

    Args:
        output: the file; by default ``report.html`` in the run's folder, or in the folder above several runs.

    Raises:
        ConfigError: a run does not exist or cannot be read, or the page cannot be written.
    """
    target = Path(output).expanduser() if output is not None else _default_output([find_run(run) for run in runs])
    content = page([read_run(run) for run in runs], _asset("page.css"), _asset("page.js"))
    try:
        target.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output: {target} cannot be written: {error.strerror}") from error
    return target


def _default_output(folders: Sequence[Path]) -> Path:
    above = folders[0] if len(folders) == 1 else Path(os.path.commonpath([path.absolute().parent for path in folders]))
    return above / "report.html"


def _asset(name: str) -> str:
    return files("rlbridge.report").joinpath(name).read_text(encoding="utf-8")
