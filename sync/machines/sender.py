"""A trainer rank. Staging on or off is the number of slots; nothing else differs.

A *slot* is memory that holds one version until it is delivered: a snapshot, or, without staging, the live weights
themselves. ``send_weights`` asks for a slot (``Want``), fills it (``Filled``), and, without staging, stays until the
version is settled, since the trainer may not touch its weights before.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.worker import WorkerMachine
from rlbridge.transport.errors import ProtocolError, SyncError


@dataclass(slots=True)
class Held:
    """A version in a slot. ``started`` once its program ran; ``settled`` once nobody will ask for it again."""

    slot: int
    offered: bool = False
    started: bool = False
    settled: bool = False


class SenderMachine(WorkerMachine):
    """Offers versions, runs the program when told, frees slots.

    Args:
        staging: two snapshot slots instead of the live weights.
        on_busy: what ``Want`` does while an older version is under way; only with staging.
    """

    def __init__(self, *, staging: bool, on_busy: OnBusy) -> None:
        super().__init__()
        self._supersedes = staging and on_busy is OnBusy.SUPERSEDE
        self._free = [1, 0] if staging and on_busy is not OnBusy.BLOCK else [0]
        self._wanted: int | None = None
        self._newest: int | None = None
        self._withdrawn: set[int] = set()
        self._reading: int | None = None  # of this version a program may read the slot, also one that is cancelled
        self.held: dict[int, Held] = {}

    def _on_event(self, event: e.WorkerEvent) -> list[e.Instruction]:
        match event:
            case e.Want(version):
                return self._on_want(version)
            case e.Filled(version):
                return self._on_filled(version)
            case e.Resumed(version, stall_s):
                return [e.Transmit(m.Unblocked(version, stall_s))]
            case m.Start(epoch, version):
                return self._on_start(epoch, version)
            case e.Executed(epoch, version, stats):
                return self._on_executed(epoch, version, stats)
            case m.Release(version):
                return self._on_release(version)
            case m.Withdrawn(version):
                return self._on_withdrawn(version)
            case m.Kept():
                return []  # its slot comes free with its release
            case _:
                raise ProtocolError(f"a sender got {type(event).__name__}")

    def check(self, version: int) -> None:
        """Refuse a version that does not grow.

        Raises:
            SyncError: it does not.
        """
        if self._newest is not None and version <= self._newest:
            raise SyncError(f"send_weights({version}) after version {self._newest}: versions only grow")

    def _on_want(self, version: int) -> list[e.Instruction]:
        self.check(version)
        self._newest = version
        if version in self._withdrawn:
            self._withdrawn.discard(version)
            return [e.Settle(version, delivered=False)]
        self._wanted = version
        if self._free:
            return self._grant()
        waiting = [old for old, held in self.held.items() if held.offered and not held.started]
        if self._supersedes and waiting:
            return [e.Transmit(m.Supersede(old=max(waiting), new=version))]
        return []

    def _grant(self) -> list[e.Instruction]:
        if self._wanted is None or not self._free:
            return []
        version, self._wanted = self._wanted, None
        self.held[version] = Held(self._free.pop())
        return [e.Grant(version, self.held[version].slot)]

    def _on_filled(self, version: int) -> list[e.Instruction]:
        if version in self._withdrawn:  # the other ranks gave it up while this one took its snapshot
            self._withdrawn.discard(version)
            return self._settle(version, delivered=False)
        self.held[version].offered = True
        return [e.Transmit(m.Offer(version))]

    def _on_start(self, epoch: int, version: int) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        if version not in self.held:
            raise ProtocolError(f"told to send version {version}, holds {sorted(self.held)}")
        self.held[version].started = True
        self.running = self._reading = version
        return [e.Execute(epoch, version, e.Treatment.SEND, self.held[version].slot)]

    def _on_executed(self, epoch: int, version: int, stats: m.TransferStats) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self.running = None
        return [e.Transmit(m.Sent(epoch, version, stats)), *self._let_go()]

    def _on_links_closed(self, epoch: int) -> list[e.Instruction]:
        # Not before: a program that is cancelled for a new epoch may still pack from its slot.
        return [*super()._on_links_closed(epoch), *self._let_go()]

    def _on_link_failed(self, epoch: int, peer: str, error: Exception) -> list[e.Instruction]:
        todo = super()._on_link_failed(epoch, peer, error)
        return todo + self._let_go() if epoch == self.epoch else todo

    def _let_go(self) -> list[e.Instruction]:
        """No program reads a slot any more: free it if its version was released meanwhile."""
        version, self._reading = self._reading, None
        held = self.held.get(version) if version is not None else None
        return self._settle(version, delivered=True) if version is not None and held and held.settled else []

    def _on_release(self, version: int) -> list[e.Instruction]:
        if version not in self.held:
            raise ProtocolError(f"release of version {version}, holds {sorted(self.held)}")
        if version == self._reading:  # the receivers are through; the last sends are about to return
            self.held[version].settled = True
            return []
        return self._settle(version, delivered=True)

    def _on_withdrawn(self, version: int) -> list[e.Instruction]:
        if version == self._wanted:
            self._wanted = None
            return [e.Settle(version, delivered=False)]
        held = self.held.get(version)
        if held is not None and held.offered:
            return self._settle(version, delivered=False)
        self._withdrawn.add(version)  # its snapshot is being taken, or this rank has not come to it yet
        return []

    def _settle(self, version: int, *, delivered: bool) -> list[e.Instruction]:
        self._free.append(self.held.pop(version).slot)
        return [e.Settle(version, delivered), *self._grant()]
