"""When the coordinator stops waiting. Pure: it is told the time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlbridge.sync.machines.phases import Stage

Blocked = tuple[float, str, int]
"""Since when, who, and by which version."""


class Deadlines:
    """The ends of everything that the coordinator waits for.

    Args:
        connect_timeout_s: for joining, parting and linking, and for the ranks of a replica to come and leave together.
        update_timeout_s: for each phase of an update.
    """

    def __init__(self, connect_timeout_s: float, update_timeout_s: float) -> None:
        self._connect_s, self._update_s = connect_timeout_s, update_timeout_s
        self._half_since_s: dict[int, float] = {}

    def see_halves(self, replicas: Iterable[int], now_s: float) -> None:
        """Replicas of which some ranks are here and others are not, at this moment."""
        self._half_since_s = {replica: self._half_since_s.get(replica, now_s) for replica in replicas}

    def next_s(self, stage: Stage, blocked: Blocked | None, *, offered: bool) -> float | None:
        """When the first of them ends."""
        ends = [since_s + self._connect_s for since_s in self._half_since_s.values()]
        ends += [blocked[0] + self._update_s] if blocked is not None else []
        ends += [end for end in (self.phase_end_s(stage, offered=offered), stage.verdict_s) if end is not None]
        return min(ends, default=None)

    def phase_end_s(self, stage: Stage, *, offered: bool) -> float | None:
        """When the stage is too long."""
        return stage.end_s(self._connect_s, self._update_s, offered=offered)

    def unused(self, blocked: Blocked | None, now_s: float) -> bool:
        """Whether a committed version should be in use by now."""
        return blocked is not None and now_s >= blocked[0] + self._update_s

    def late_halves(self, now_s: float) -> Mapping[int, float]:
        """Replicas that should be whole or gone by now, and since when they are neither."""
        return {r: since_s for r, since_s in self._half_since_s.items() if now_s >= since_s + self._connect_s}
