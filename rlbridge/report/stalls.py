"""Stall of a run by side, version and cause, from its spans. Pure.

A worker's stall is one span; what it was blocked *by* is read off the ``weights/...`` spans of the same worker and
version that lie within it: the copy (snapshot, apply, load) first, then the transfer; what remains is waiting: for
peers, for a free slot, for the bridge's thread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from rlbridge.sync.stall import Span

SIDES = ("trainer", "rollout")
COPY, TRANSFER, WAITING = "copy", "transfer", "waiting"
CAUSES = (COPY, TRANSFER, WAITING)

_COPIES = frozenset({"weights/snapshot", "weights/apply", "weights/load"})
_Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Stalls:
    """Mean seconds of stall of one worker of a side.

    Attributes:
        by_version: side to version to seconds; the initial delivery (version 0) is start-up and not among them.
        by_cause: side to cause to seconds per update.
    """

    by_version: Mapping[str, Mapping[int, float]]
    by_cause: Mapping[str, Mapping[str, float]]

    def per_update_s(self, side: str) -> float:
        """All causes together."""
        return sum(self.by_cause[side].values())


def stalls_of(spans: Mapping[str, Sequence[Span]], updates: int) -> Stalls:
    """Stall of versions 1 to ``updates``. A worker takes part in a version if it has a stall span of it."""
    by_version: dict[str, dict[int, float]] = {}
    by_cause: dict[str, dict[str, float]] = {}
    for side in SIDES:
        means = _means_by_version(spans, side, updates)
        by_version[side] = {version: sum(causes.values()) for version, causes in sorted(means.items())}
        by_cause[side] = {cause: sum(causes[cause] for causes in means.values()) / max(1, updates) for cause in CAUSES}
    return Stalls(by_version, by_cause)


def _means_by_version(spans: Mapping[str, Sequence[Span]], side: str, updates: int) -> dict[int, Mapping[str, float]]:
    """Version to cause to mean seconds over the workers that took part."""
    each: dict[int, list[Mapping[str, float]]] = defaultdict(list)
    for worker in spans.values():
        for version, (stalls, weights) in _of_versions(worker, f"stall/{side}").items():
            if 0 < version <= updates:
                each[version].append(split_by_cause(stalls, weights))
    return {
        version: {cause: fmean(causes[cause] for causes in workers) for cause in CAUSES}
        for version, workers in each.items()
    }


def _of_versions(worker: Sequence[Span], stall: str) -> dict[int, tuple[list[Span], list[Span]]]:
    """Version to the worker's stalls and its ``weights/...`` spans."""
    weights: dict[int, list[Span]] = defaultdict(list)
    stalls: dict[int, list[Span]] = defaultdict(list)
    for span in worker:
        if span.version is not None and span.name == stall:
            stalls[span.version].append(span)
        elif span.version is not None and span.name.startswith("weights/"):
            weights[span.version].append(span)
    return {version: (found, weights[version]) for version, found in stalls.items()}


def split_by_cause(stalls: Iterable[Span], weights: Iterable[Span]) -> dict[str, float]:
    """Seconds of ``stalls`` by cause, where ``weights`` are spans of the same worker and version."""
    stalled, moving = [_interval(span) for span in stalls], list(weights)
    copies = [_interval(span) for span in moving if span.name in _COPIES]
    transfers = [_interval(span) for span in moving if span.name == "weights/transfer"]
    copied = _covered(stalled, copies)
    moved = _covered(stalled, copies + transfers) - copied
    return {COPY: copied, TRANSFER: moved, WAITING: max(0.0, _covered(stalled, stalled) - copied - moved)}


def _interval(span: Span) -> _Interval:
    return span.start_s, span.start_s + span.duration_s


def _covered(windows: Iterable[_Interval], by: Iterable[_Interval]) -> float:
    """Seconds of disjoint ``windows`` that lie in the union of ``by``."""
    parts = sorted(by)
    total = 0.0
    for start, end in windows:
        reached = start
        for low, high in parts:
            low, high = max(low, reached), min(high, end)
            if high > low:
                total += high - low
                reached = high
    return total
