"""One worker of a simulated job: its machine, its queues, and what its shell and main thread are at."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rlbridge.sync import messages as m
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.receiver import ReceiverMachine
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.sync.plan.program import BucketProgram

TORN = -1
"""What live weights are while, or after, a part of another version was written."""
Key = tuple[int, int]


@dataclass
class Worker:
    """A machine, its queues, and what its shell and main thread are at.

    Attributes:
        activities: what the shell is to do; the first is under way.
        dying: a program that was cancelled and may still read and write, or even come to its end.
        stage: of the main thread: idle, wanting, waiting (sender), quiesced, applying (receiver), left.
        slots: what the sender's memory holds, by slot; without staging slot 0 is the live weights.
        live: what the engine's weights hold; history: what it was told to compute with.
        slow_from: from this epoch and version on its programs take for ever, although it lives.
        frozen: its main thread does not come to its next step.
    """

    join: m.Join
    machine: SenderMachine | ReceiverMachine
    inbox: deque[m.ToWorker] = field(default_factory=deque)
    outbox: deque[m.FromWorker | c.Gone] = field(default_factory=deque)
    activities: deque[e.CloseLinks | e.ConnectPeers | e.Execute] = field(default_factory=deque)
    dying: e.Execute | None = None
    executed: set[Key] = field(default_factory=set)
    links: list[Worker] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    alive: bool = True
    error: Exception | None = None
    stage: str = "idle"
    next_version: int = 0
    grant: tuple[int, int] | None = None
    fates: dict[int, bool] = field(default_factory=dict)
    slots: dict[int, int | None] = field(default_factory=dict)
    woken: bool = False
    resume: int | None = None
    live: int | None = None
    held: int | None = None
    history: list[int] = field(default_factory=list)
    joined_late: bool = False
    leaves_early: bool = False
    slow_from: Key | None = None
    frozen: bool = False

    @property
    def name(self) -> str:
        return self.join.worker

    @property
    def sends(self) -> bool:
        return self.join.role == "sender"

    @property
    def up(self) -> bool:
        """Whether its process lives and its bridge works."""
        return self.alive and self.error is None

    def running(self) -> e.Execute | None:
        first = self.activities[0] if self.activities else None
        return first if isinstance(first, e.Execute) else None

    def reads(self, slot: int) -> bool:
        """Whether a transfer may read this slot now."""
        return any(x is not None and x.treatment is e.Treatment.SEND and x.slot == slot for x in self._programs())

    def writes(self) -> bool:
        """Whether a transfer may write live weights now."""
        return any(x is not None and x.treatment is e.Treatment.UNPACK for x in self._programs())

    def _programs(self) -> tuple[e.Execute | None, e.Execute | None]:
        return self.running(), self.dying


def chain(senders: tuple[str, ...], receivers: tuple[str, ...]) -> dict[str, tuple[BucketProgram, ...]]:
    """Each bucket goes from its sender to the first receiver, from there to the second, and so on."""
    hops = {name: receivers[i + 1 : i + 2] for i, name in enumerate(receivers)}
    before = {peer: name for name, peers in hops.items() for peer in peers}
    return {s: (BucketProgram(i, 8, None, receivers[:1], ()),) for i, s in enumerate(senders)} | {
        name: tuple(BucketProgram(i, 8, before.get(name, s), hops[name], ()) for i, s in enumerate(senders))
        for name in receivers
    }
