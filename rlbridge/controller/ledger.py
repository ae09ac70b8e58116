"""Stall and idle time of the run, added up from the spans of all workers. Pure.

*AGST* (average GPU stall time per weight update) is the mean over updates of the mean over all workers, trainer and
rollout alike. Version 0 is the initial delivery, not an update: its waiting is start-up and is kept apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from rlbridge.sync.stall import Span

STALLS = ("stall/trainer", "stall/rollout")


@dataclass(slots=True)
class StallLedger:
    """Sums of spans by side, version and cause.

    Attributes:
        trainers, rollouts: workers that take part in an update, as long as ``took_part`` says nothing else of it.
    """

    trainers: int
    rollouts: int
    _stall_s: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    _idle_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _workers: dict[int, dict[str, int]] = field(default_factory=dict)

    def add(self, spans: Iterable[Span]) -> None:
        """Enter the spans of one worker."""
        for span in spans:
            if span.name in STALLS and span.version:
                self._stall_s[span.name.removeprefix("stall/"), span.version] += span.duration_s
            elif span.name.startswith("idle/"):
                self._idle_s[span.name] += span.duration_s

    def took_part(self, version: int, trainers: int, rollouts: int) -> None:
        """Say how many workers the update to ``version`` had: fewer after a loss."""
        self._workers[version] = {"trainer": trainers, "rollout": rollouts}

    def _taking_part(self, version: int) -> dict[str, int]:
        return self._workers.get(version, {"trainer": self.trainers, "rollout": self.rollouts})

    def stall_s(self, side: str, version: int) -> float:
        """Mean stall per worker of ``side`` (``trainer`` or ``rollout``) in the update to ``version``."""
        return self._stall_s.get((side, version), 0.0) / max(1, self._taking_part(version)[side])

    def stall_per_update_s(self, side: str, updates: int) -> float:
        """Mean over versions 1 to ``updates`` of the mean stall of one worker of ``side``."""
        return fmean(self.stall_s(side, version) for version in range(1, updates + 1)) if updates else 0.0

    def agst_s(self, updates: int) -> float:
        """Average stall per update, over versions 1 to ``updates`` and all workers of both sides."""
        return fmean(self._mean_stall_s(version) for version in range(1, updates + 1)) if updates else 0.0

    def _mean_stall_s(self, version: int) -> float:
        total = sum(self._stall_s.get((side, version), 0.0) for side in ("trainer", "rollout"))
        return total / max(1, sum(self._taking_part(version).values()))

    def idle_s(self) -> dict[str, float]:
        """Seconds idle by cause, summed over workers."""
        return dict(self._idle_s)
