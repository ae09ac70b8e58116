"""Reads a run's folder. A file that is missing, cut off or broken becomes a note; only what is no run is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlbridge.report.run import Lines, RunData, partial_summary
from rlbridge.sync.stall import Span
from rlbridge.tracking.summary import SUMMARY_KEYS
from rlbridge.transport.errors import ConfigError

_US_PER_S = 1e6
_MARKS = ("config.yaml", "metrics.jsonl", "summary.json")
_T = TypeVar("_T")


class _Event(msgspec.Struct):
    """What ``tracking.trace`` writes of an event, and nothing else that a trace may hold."""

    ph: str
    name: str
    pid: int
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}  # msgspec copies a default for each event


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the format's own name


def find_run(run: str) -> Path:
    """The folder of ``run``: a path, or the name of a folder in ``runs/``.

    Raises:
        ConfigError: there is no such folder, or it holds no run.
    """
    path = Path(run).expanduser()
    if not path.exists() and run == path.name:
        path = Path("runs") / run
    if not path.is_dir():
        raise ConfigError(f"no run {run!r}: {path} is no folder; give the folder of a run, e.g. runs/NAME")
    if not any((path / mark).is_file() for mark in _MARKS):
        raise ConfigError(f"{path} is no run: it has none of {', '.join(_MARKS)}; give the folder of one run")
    return path


def read_run(run: str) -> RunData:
    """Read all that a report shows of ``run`` (a path, or a name in ``runs/``).

    Raises:
        ConfigError: there is no such run, or its files may not be read.
    """
    path = find_run(run)
    notes: list[str] = []
    config = _read(path / "config.yaml", notes, "the configuration is not shown").decode(errors="replace")
    settings = _settings(config, notes)
    metrics = _metrics(_read(path / "metrics.jsonl", notes, "there are no curves"), notes)
    return RunData(
        name=path.resolve().name,
        path=str(path),
        summary=_summary(path / "summary.json", metrics, settings, notes),
        metrics=metrics,
        spans=_spans(path / "trace.json", notes),
        plan=_plan(path / "plan.json", notes),
        config=config,
        settings=settings,
        notes=notes,
    )


def _read(path: Path, notes: list[str], without: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        notes.append(f"{path.name} is missing: {without}.")
        return b""
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _decode(path: Path, kind: type[_T], notes: list[str], without: str) -> _T | None:
    """``path`` as JSON of ``kind``, or ``None`` and a note."""
    content = _read(path, notes, without)
    if not content:
        return None
    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} is broken ({error}): {without}.")
        return None


def _settings(config: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        settings = OmegaConf.to_container(OmegaConf.create(config))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        notes.append(f"config.yaml is broken ({type(error).__name__}).")
        return {}
    return {str(name): value for name, value in settings.items()} if isinstance(settings, dict) else {}


def _metrics(content: bytes, notes: list[str]) -> dict[str, Lines]:
    families: dict[str, list[Mapping[str, Any]]] = {}
    broken = 0
    for line in content.splitlines():
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            if not isinstance(values["step"], int):
                raise TypeError("a step is a whole number")  # noqa: TRY301 - one kind of broken line among three
            families.setdefault(str(values["family"]), []).append(values)
        except (msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
            broken += 1
    if broken:
        notes.append(f"metrics.jsonl has {broken} broken line{'s' if broken > 1 else ''} (cut off?), left out here.")
    return dict(families)


def _summary(
    path: Path, metrics: Mapping[str, Lines], settings: Mapping[str, Any], notes: list[str]
) -> Mapping[str, Any]:
    known = partial_summary(metrics, settings)
    found = _decode(path, dict[str, Any], notes, "the run was killed or is still running; figures are of its metrics")
    if found is None:
        return known
    missing = [key for key in SUMMARY_KEYS if key not in found]
    if missing:
        notes.append(f"summary.json lacks {', '.join(missing)}.")
    return dict.fromkeys(SUMMARY_KEYS) | found


def _spans(path: Path, notes: list[str]) -> dict[str, list[Span]]:
    trace = _decode(path, _Trace, notes, "there is no timeline, and stall is not split by cause")
    events = trace.traceEvents if trace is not None else []
    names = {event.pid: str(event.args.get("name")) for event in events if event.name == "process_name"}
    spans: dict[str, list[Span]] = {}
    for event in events:
        if event.ph == "X":
            version = event.args.get("version")
            span = Span(
                event.name, event.ts / _US_PER_S, event.dur / _US_PER_S, version if isinstance(version, int) else None
            )
            spans.setdefault(names.get(event.pid, f"process {event.pid}"), []).append(span)
    return spans


def _plan(path: Path, notes: list[str]) -> dict[str, Any]:
    return _decode(path, dict[str, Any], notes, "bytes are not split by stage") or {}
