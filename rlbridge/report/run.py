"""What a report knows of one run, and what follows from it. Pure: ``reading`` fills it from the run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rlbridge.sync.stall import Span
from rlbridge.tracking.summary import SUMMARY_KEYS

Lines = Sequence[Mapping[str, Any]]
"""Lines of ``metrics.jsonl`` of one family, in the order of writing."""


@dataclass(frozen=True, slots=True)
class RunData:
    """A run as its folder tells it.

    Attributes:
        name: the folder's name.
        path: where it was read from.
        summary: ``summary.json``; for a run without one, what its metrics say (``partial_summary``). Has at least
            ``SUMMARY_KEYS``; ``None`` where nothing is known.
        metrics: lines of ``metrics.jsonl`` by family.
        spans: spans of each worker; times count from the first span of the run.
        plan: ``plan.json``, empty if there is none.
        config: ``config.yaml`` as it is written, empty if there is none.
        settings: the same, parsed.
        notes: what is missing or broken in the folder, in words.
    """

    name: str
    path: str
    summary: Mapping[str, Any]
    metrics: Mapping[str, Lines] = field(default_factory=dict)
    spans: Mapping[str, Sequence[Span]] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    config: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def series(self, family: str, value: str) -> list[tuple[float, float]]:
        """(step, value) of one metric, where it is a number."""
        lines = self.metrics.get(family, ())
        return [(line["step"], line[value]) for line in lines if isinstance(line.get(value), (int, float))]

    def workers(self, side: str) -> list[str]:
        """Workers of ``side`` (``trainer`` or ``rollout``) that recorded spans."""
        return sorted(name for name in self.spans if name.startswith(f"{side}-"))

    @property
    def sync_mode(self) -> str:
        """How the run staged weights, or an empty string."""
        return str(self.summary["sync_mode"] or "")


def partial_summary(metrics: Mapping[str, Lines], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What can be said of a run that left no summary: it was killed, or it is still going on."""
    rollout, weights = metrics.get("rollout", ()), metrics.get("weights", ())
    bound = _setting(settings, "sync", "max_staleness")
    delivered = [line for line in weights if line["step"] > 0 and "transfer_s" in line]
    known: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS)
    known |= {
        "exit_reason": "no summary: killed, or still running",
        "recipe": settings.get("recipe"),
        "sync_mode": _setting(settings, "sync", "mode"),
        "seed": settings.get("seed"),
        "max_staleness": bound if isinstance(bound, int) else None,
        "updates": _last(metrics.get("train", ()), "step") or 0,
        "policy_version": _last(metrics.get("train", ()), "step") or 0,
        "reward_first": rollout[0].get("reward") if rollout else None,
        "reward_last": _last(rollout, "reward"),
        "max_staleness_seen": max((line.get("max", 0) for line in metrics.get("staleness", ())), default=None),
        **{
            f"{side}_stall_s_per_update": _mean(metrics.get("stall", ()), f"{side}_s")
            for side in ("trainer", "rollout")
        },
        "transfer_s_per_update": median(line["transfer_s"] for line in delivered) if delivered else None,
        "lower_bound_s": _last(delivered, "lower_bound_s"),
        "bytes_per_update": _last(delivered, "bytes"),
        "generated": _last(rollout, "generated"),
        "dropped": _last(rollout, "dropped"),
        "queued": _last(rollout, "queued"),
        "idle_s": _idle(metrics.get("idle", ())),
    }
    return known


def _idle(lines: Lines) -> dict[str, float]:
    last = lines[-1] if lines else {}
    return {f"idle/{name}": value for name, value in last.items() if "/" in name and isinstance(value, (int, float))}


def _mean(lines: Lines, name: str) -> float | None:
    values = [line[name] for line in lines if isinstance(line.get(name), (int, float))]
    return fmean(values) if values else None


def _last(lines: Lines, name: str) -> Any:
    return lines[-1].get(name) if lines else None


def _setting(settings: Mapping[str, Any], group: str, name: str) -> Any:
    inside = settings.get(group)
    return inside.get(name) if isinstance(inside, Mapping) else None
