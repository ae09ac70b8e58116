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


class _Line(msgspec.Struct):
    """What every line of metrics has."""

    family: str
    step: int


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815 - the format's own name


class _Summary(msgspec.Struct):
    """What the page takes for granted of ``summary.json``: kinds of values. Which keys there are is checked apart."""

    recipe: str | None = None
    sync_mode: str | None = None
    seed: int | None = None
    exit_reason: str | None = None
    updates: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    eval_accuracy_before: float | None = None
    eval_accuracy: float | None = None
    agst_s: float | None = None
    trainer_stall_s_per_update: float | None = None
    rollout_stall_s_per_update: float | None = None
    idle_s: dict[str, float] | None = None
    transfer_s_per_update: float | None = None
    lower_bound_s: float | None = None
    bytes_per_update: int | None = None
    max_staleness: int | None = None
    max_staleness_seen: int | None = None
    staleness_seen: dict[int, int] | None = None
    generated: int | None = None
    trained: int | None = None
    dropped: int | None = None
    queued: int | None = None
    lost_replicas: list[str] | None = None
    wall_s: float | None = None
    tokens_per_s: float | None = None


class _Plan(msgspec.Struct):
    """Likewise of ``plan.json``."""

    bytes_total: int | None = None
    trainer_egress_bytes: int | None = None
    bytes_by_stage: dict[str, int] | None = None
    lower_bound_terms_s: dict[str, float] | None = None


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


def _decode(path: Path, shape: type[_T], notes: list[str], without: str) -> tuple[_T, bytes] | None:
    """``path`` as JSON of this shape, with its bytes; or ``None`` and a note."""
    content = _read(path, notes, without)
    if not content and not path.exists():
        return None
    try:
        return msgspec.json.decode(content, type=shape), content
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        notes.append(f"{path.name} is broken ({error}): {without}.")
        return None


def _decode_mapping(path: Path, shape: type[Any], notes: list[str], without: str) -> dict[str, Any] | None:
    """All of ``path``, once its known values are of the kinds that ``shape`` says."""
    found = _decode(path, shape, notes, without)
    return msgspec.json.decode(found[1], type=dict[str, Any]) if found is not None else None


def _settings(config: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        settings = OmegaConf.to_container(OmegaConf.create(config))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        notes.append(f"config.yaml is broken ({type(error).__name__}).")
        return {}
    if not isinstance(settings, dict):
        notes.append("config.yaml is broken (no mapping).")
        return {}
    return {str(name): value for name, value in settings.items()}


def _metrics(content: bytes, notes: list[str]) -> dict[str, Lines]:
    families: dict[str, list[Mapping[str, Any]]] = {}
    broken = 0
    for line in content.splitlines():
        try:
            values = msgspec.json.decode(line, type=dict[str, Any])
            line_of = msgspec.convert(values, _Line)
            families.setdefault(line_of.family, []).append({name: v for name, v in values.items() if _is_number(v)})
        except (msgspec.MsgspecError, UnicodeDecodeError):
            broken += 1
    if broken:
        notes.append(f"metrics.jsonl has {broken} broken line{'s' if broken > 1 else ''} (cut off?), left out here.")
    return dict(families)


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float)) and abs(value) < 1e100
    )  # what is beyond, or no number, has no place on an axis


def _summary(
    path: Path, metrics: Mapping[str, Lines], settings: Mapping[str, Any], notes: list[str]
) -> Mapping[str, Any]:
    known = partial_summary(metrics, settings)
    found = _decode_mapping(path, _Summary, notes, "the run was killed or is still running; figures are of its metrics")
    if found is None:
        return known
    missing = [key for key in SUMMARY_KEYS if key not in found]
    if missing:
        notes.append(f"summary.json lacks {', '.join(missing)}.")
    return dict.fromkeys(SUMMARY_KEYS) | found


def _spans(path: Path, notes: list[str]) -> dict[str, list[Span]]:
    trace = _decode(path, _Trace, notes, "there is no timeline, and stall is not split by cause")
    events = trace[0].traceEvents if trace is not None else []
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
    return _decode_mapping(path, _Plan, notes, "bytes are not split by stage") or {}
