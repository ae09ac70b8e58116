"""The table at the end of a run: did it learn, who stood still for how long, do the books balance, where is what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from rlbridge.tracking.run_folder import RunFolder

LEARNED_BY = 0.05
"""Least rise that is called learning: of held-out accuracy, or of the sampled reward while accuracy did not fall."""


def final_table(summary: Mapping[str, Any], folder: RunFolder) -> Table:
    """The end of a run from its summary; what was never measured shows as ``-``."""
    table = Table(title=f"{folder.name}: {summary['exit_reason']}", show_header=False, title_justify="left")
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(summary):
        table.add_row(name, Text(value))
    table.add_row("files", Text(str(folder.path)))
    return table


def verdict(summary: Mapping[str, Any]) -> str:
    """Whether the run learned, in one word and the numbers behind it."""
    reward = _gain(summary["reward_first"], summary["reward_last"])
    before, after = summary.get("eval_accuracy_before"), summary["eval_accuracy"]
    accuracy = _gain(before, after)
    if accuracy is not None:
        learned = accuracy >= LEARNED_BY or (accuracy >= 0 and (reward or 0.0) >= LEARNED_BY)
        return f"{'yes' if learned else 'no'}: held-out accuracy {before:.3f} → {after:.3f}"
    if reward is not None:
        first, last = summary["reward_first"], summary["reward_last"]
        return f"{'yes' if reward >= LEARNED_BY else 'no'}: reward {first:.3f} → {last:.3f}"
    return "unknown: the run ended too early"


def _gain(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _rows(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "learned", verdict(summary)
    yield "reward", f"{_number(summary['reward_first'])} → {_number(summary['reward_last'])}"
    yield "stall per update", _stalls(summary)
    yield "weights", _weights(summary)
    yield "staleness", f"at most {summary['max_staleness_seen']} (bound {summary.get('max_staleness', '-')})"
    yield "trajectories", _books(summary)
    yield "speed", f"{_number(summary['tokens_per_s'], ',.0f')} tokens/s, {_number(summary['wall_s'], '.1f')} s in all"


def _stalls(summary: Mapping[str, Any]) -> str:
    trainer, rollout = summary["trainer_stall_s_per_update"], summary["rollout_stall_s_per_update"]
    return f"trainer {_ms(trainer)}, rollout {_ms(rollout)}; AGST {_ms(summary['agst_s'])} (mean over all workers)"


def _weights(summary: Mapping[str, Any]) -> str:
    took, bound = summary["transfer_s_per_update"], summary["lower_bound_s"]
    size = _bytes(summary["bytes_per_update"])
    return f"{summary['updates']} updates, {size} each, transfer {_ms(took)} (lower bound {_ms(bound)})"


def _books(summary: Mapping[str, Any]) -> str:
    generated, parts = summary["generated"], [summary[key] for key in ("trained", "dropped", "queued")]
    sign = "=" if generated == sum(parts) else "≠"
    return f"{generated} generated {sign} {parts[0]} trained + {parts[1]} dropped + {parts[2]} queued"


def _number(value: float | None, form: str = ".3f") -> str:
    return "-" if value is None else format(value, form)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f} ms"


def _bytes(count: int | None) -> str:
    if count is None:
        return "-"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
