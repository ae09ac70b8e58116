"""A rollout rank. Staging on or off decides where payloads go and what the main thread is woken for; nothing else.

Staged: room for a version is the staging memory, free once the version before it was applied; the main thread is
woken when the version is committed, and applies it. Unstaged: room is the engine standing still; the main thread is
woken when a version is announced, and stays in ``poll_requests`` until one has landed whole.
"""

from __future__ import annotations

from rlbridge.sync import messages as m
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.worker import WorkerMachine
from rlbridge.transport.errors import ProtocolError


class ReceiverMachine(WorkerMachine):
    """Receives versions, reports what it verified, hands committed ones to the main thread.

    Args:
        staging: keep payloads and apply them later, instead of writing live weights as they come.

    Attributes:
        version: what the engine computes with; ``None`` until the first version is whole.
        verified: newest version of which every digest matched here.
        torn: live weights were or may have been written in part; no computing until a version is whole.
    """

    def __init__(self, *, staging: bool) -> None:
        super().__init__()
        self._staging = staging
        self._announced: int | None = None
        self._committed: int | None = None
        self._quiesced = False
        self._held: int | None = None
        self.version: int | None = None
        self.verified: int | None = None
        self.torn = False

    def _on_event(self, event: e.WorkerEvent) -> list[e.Instruction]:
        match event:
            case m.Announce(epoch, version):
                return self._on_announce(epoch, version)
            case e.Quiesced():
                self._quiesced = True
                return self._ready()
            case m.Start(epoch, version):
                return self._on_start(epoch, version)
            case e.Executed(epoch, version, stats):
                return self._on_executed(epoch, version, stats)
            case m.Commit(version):
                return self._on_commit(version)
            case e.Resumed(version, stall_s):
                return self._on_resumed(version, stall_s)
            case _:
                raise ProtocolError(f"a receiver got {type(event).__name__}")

    def _on_new_epoch(self, event: m.NewEpoch) -> list[e.Instruction]:
        self._announced = None
        return super()._on_new_epoch(event)

    def _on_announce(self, epoch: int, version: int) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self._announced = version
        if self._has(version) or self._staging or self._quiesced:
            return self._ready()
        return [e.Wake(version)]

    def _ready(self) -> list[e.Instruction]:
        version = self._announced
        if version is None:
            return []
        room = self._held is None if self._staging else self._quiesced
        if not (room or self._has(version)):
            return []
        self._announced = None
        return [e.Transmit(m.Ready(self.epoch, version))]

    def _has(self, version: int) -> bool:
        return self.verified is not None and version <= self.verified

    def _on_start(self, epoch: int, version: int) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self.running = version
        if self._has(version):
            treatment = e.Treatment.RELAY
        elif self._staging:
            treatment = e.Treatment.KEEP
        else:
            treatment, self.torn = e.Treatment.UNPACK, True
        return [e.Execute(epoch, version, treatment)]

    def _on_executed(self, epoch: int, version: int, stats: m.TransferStats) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self.running = None
        if not self._has(version):
            self.verified = version
            self._held = version if self._staging else None
        return [e.Transmit(m.Verified(epoch, version, stats))]

    def _on_commit(self, version: int) -> list[e.Instruction]:
        if not self._has(version):
            raise ProtocolError(f"commit of version {version}, verified {self.verified}")
        if self._committed is not None and version <= self._committed:
            return []
        self._committed = version
        if self._staging:
            return [e.Wake(version)]
        self.version, self.torn, self._quiesced = version, False, False
        return [e.Resume(version)]

    def _on_resumed(self, version: int, stall_s: float) -> list[e.Instruction]:
        self.version, self._held = version, None
        return [e.Transmit(m.Unblocked(version, stall_s)), *self._ready()]
