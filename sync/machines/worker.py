"""The part that senders and receivers share: entering an epoch, running its program, failing."""

from __future__ import annotations

from abc import ABC, abstractmethod

from rlbridge.sync import messages as m
from rlbridge.sync.machines import events as e
from rlbridge.transport.errors import ProtocolError


class WorkerMachine(ABC):
    """One worker's view of the protocol. ``handle`` takes one event and returns what to do, in order.

    Attributes:
        epoch: the membership this worker was told of last; 0 before the first.
        linked: the links of ``epoch`` are open.
        running: version whose program runs now.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.linked = False
        self.running: int | None = None
        self._plan_hash = ""
        self._abandoned = False

    def handle(self, event: e.WorkerEvent) -> list[e.Instruction]:
        """Take one event.

        Raises:
            ProtocolError: the event cannot occur here.
        """
        if self._abandoned:
            return []
        match event:
            case m.NewEpoch():
                return self._on_new_epoch(event)
            case e.LinksClosed(epoch):
                return self._on_links_closed(epoch)
            case m.OpenLinks(epoch):
                return [e.ConnectPeers(epoch)] if epoch == self.epoch else []
            case e.LinksOpened(epoch):
                return self._on_links_opened(epoch)
            case e.LinkFailed(epoch, peer, error):
                return self._on_link_failed(epoch, peer, error)
            case m.Stop(error):
                return self._abandon(error.rebuild())
            case e.Trouble(error):
                return [e.Transmit(m.Failed(m.ErrorReport.of(error))), *self._abandon(error)]
            case _:
                return self._on_event(event)

    @abstractmethod
    def _on_event(self, event: e.WorkerEvent) -> list[e.Instruction]:
        """What only this kind of worker knows."""

    def _on_new_epoch(self, event: m.NewEpoch) -> list[e.Instruction]:
        if event.epoch <= self.epoch:
            raise ProtocolError(f"epoch {event.epoch} after epoch {self.epoch}")
        self.epoch, self._plan_hash = event.epoch, event.program.plan_hash
        self.linked, self.running = False, None
        return [e.CloseLinks(event)]

    def _on_links_closed(self, epoch: int) -> list[e.Instruction]:
        return [e.Transmit(m.Parted(epoch))] if epoch == self.epoch else []

    def _on_links_opened(self, epoch: int) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self.linked = True
        return [e.Transmit(m.Linked(epoch, self._plan_hash))]

    def _on_link_failed(self, epoch: int, peer: str, error: Exception) -> list[e.Instruction]:
        if epoch != self.epoch:
            return []
        self.running = None
        return [e.Transmit(m.LinkBroken(epoch, peer, m.ErrorReport.of(error)))]

    def _abandon(self, error: Exception) -> list[e.Instruction]:
        self._abandoned, self.running = True, None
        return [e.Abandon(error)]
