"""Stall and idle time of the run, added up from the spans of all workers. Pure.

*AGST* (average GPU stall time per weight update) is the mean over updates of the mean over all workers, trainer and
rollout alike. Version 0 is the initial delivery, not an update: its waiting is start-up and is kept apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from rlbridge.sync.stall import Span

STALLS = ("stall/trainer", "stall/rollout")


@dataclass(slots=True)
class StallLedger:
    """Sums of spans by worker side and cause.

    Attributes:
        trainers, rollouts: number of workers that take part in an update.
    """

    trainers: int
    rollouts: int
    _stall_s: dict[tuple[str, int], float] = field(default_factory=lambda: defaultdict(float))
    _idle_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, spans: Iterable[Span]) -> None:
        """Enter the spans of one worker."""
        for span in spans:
            if span.name in STALLS and span.version:
                self._stall_s[span.name, span.version] += span.duration_s
            elif span.name.startswith("idle/"):
                self._idle_s[span.name] += span.duration_s

    def stall_s(self, side: str, version: int) -> float:
        """Mean stall per worker of ``side`` (``trainer`` or ``rollout``) in the update to ``version``."""
        workers = self.trainers if side == "trainer" else self.rollouts
        return self._stall_s.get((f"stall/{side}", version), 0.0) / workers

    def stall_per_update_s(self, side: str, updates: int) -> float:
        """Mean over ``updates`` of the mean stall of one worker of ``side``."""
        total = sum(seconds for (name, _), seconds in self._stall_s.items() if name == f"stall/{side}")
        workers = self.trainers if side == "trainer" else self.rollouts
        return total / (workers * updates) if updates else 0.0

    def agst_s(self, updates: int) -> float:
        """Average stall per update over all workers of both sides."""
        return sum(self._stall_s.values()) / ((self.trainers + self.rollouts) * updates) if updates else 0.0

    def idle_s(self) -> dict[str, float]:
        """Seconds idle by cause, summed over workers."""
        return dict(self._idle_s)
