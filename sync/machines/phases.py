"""What the coordinator waits for, for whom, and until when."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from rlbridge.transport.errors import RlbridgeError

MAX_BREAKS = 2
"""Unexplained breaks of one update that are answered by trying again; the next one costs a replica."""
VERDICT_S = 1.0
"""After a link broke: seconds in which a death may explain it, before the same members try again."""


class Phase(Enum):
    """What the coordinator waits for; the value is how a deadline error puts it."""

    GATHERING = "join"
    PLANNING = "plan"
    PARTING = "end of the old links"
    LINKING = "start of the new links"
    IDLE = "send_weights of this version, which other ranks called"
    READYING = "room for the version (is poll_requests called between inference steps?)"
    MOVING = "end of the transfer"
    ENDED = "more"


@dataclass(frozen=True, slots=True)
class Break:
    """``worker`` saw its link to ``peer`` break."""

    worker: str
    peer: str
    error: RlbridgeError


@dataclass(slots=True)
class Stage:
    """One stay in a phase.

    Attributes:
        waiting: workers that have not answered yet.
        since_s: when it began.
        breaks: broken links that nothing explains so far.
        verdict_s: when these are judged.
    """

    phase: Phase
    since_s: float
    waiting: set[str] = field(default_factory=set)
    breaks: list[Break] = field(default_factory=list)
    verdict_s: float | None = None

    def end_s(self, connect_timeout_s: float, update_timeout_s: float, *, offered: bool) -> float | None:
        """The deadline of this stay. Idling has one only if some ranks have ``offered`` what others have not."""
        match self.phase:
            case Phase.GATHERING | Phase.PARTING | Phase.LINKING:
                return self.since_s + connect_timeout_s
            case Phase.READYING | Phase.MOVING:
                return self.since_s + update_timeout_s
            case Phase.IDLE if offered:
                return self.since_s + update_timeout_s
            case _:
                return None

    def broke(self, found: Break, now_s: float) -> None:
        """Note a broken link."""
        self.breaks.append(found)
        if self.verdict_s is None:
            self.verdict_s = now_s + VERDICT_S


def stage(phase: Phase, now_s: float, waiting: Iterable[str] = ()) -> Stage:
    """Enter ``phase``, waiting for these workers."""
    return Stage(phase, now_s, set(waiting))
