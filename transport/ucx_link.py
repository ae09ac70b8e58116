"""The link to one peer: who waits for what, what is moving, and how it ends.

A link is open until one of four things ends it: the peer dies, the peer leaves, a call on it is cancelled, or its owner
closes it. Calls that only wait end at once. What is moving is left to end by itself, since UCX cannot take it back: the
peer takes part to the end even if its own link is over, and if it dies UCX notices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError, TransportError
from rlbridge.transport.ucx_driver import UcxDriver, UcxEndpoint
from rlbridge.transport.ucx_notes import INLINE_BYTES, Note, NoteKind, current_notes, fingerprint

_Bytes = npt.NDArray[np.uint8]

RELEASE_DEADLINE_S = 30.0
"""Longest wait for a peer that stands still in the middle of a transfer, alive as far as UCX can tell."""


class _Transfer:
    """One ``send`` or ``recv`` of a caller."""

    def __init__(self, tag: int, array: _Bytes) -> None:
        self.tag, self.array = tag, array
        self.error: TransportError | None = None
        self.done = anyio.Event()

    def settle(self, error: TransportError | None) -> None:
        """Over: nobody touches the buffer from here on."""
        self.error = error
        self.done.set()


class UcxLink:
    """One peer as seen from one worker.

    Args:
        driver: the worker that carries this link.
        peer: name of the other side, for errors.
        address: the peer's UCX address.
        number: number of this link: greater than that of every earlier link of this worker.
        transfers: numbers for transfers, each used once by this worker.

    Raises:
        TransportError: UCX cannot reach that address with the transports it has.
    """

    def __init__(self, driver: UcxDriver, peer: str, address: bytes, number: int, transfers: Iterator[int]) -> None:
        self._driver, self._peer, self._number, self._transfers = driver, peer, number, transfers
        self._own = fingerprint(driver.address)
        self._note_tag = fingerprint(address)
        self._send_salt, self._recv_salt = fingerprint(driver.address, address), fingerprint(address, driver.address)
        self._offered: dict[int, _Transfer] = {}
        self._wanted: dict[int, deque[_Transfer]] = {}
        self._arrived: dict[int, deque[Note]] = {}
        self._accepted: dict[int, _Transfer] = {}
        self._moving: set[_Transfer] = set()
        self._ended: Callable[[], TransportError] | None = None
        self._theirs: int | None = None
        self._endpoint: UcxEndpoint = driver.endpoint(address)
        self._endpoint.on_death = lambda: self.end(self._died, leave=False)
        self._mailbox = driver.mailbox(self._endpoint.sender)
        self._catch_up()
        self._say(NoteKind.HELLO)

    async def send(self, tag: int, array: _Bytes) -> None:
        """Send ``array`` under ``tag``; see ``Transport.send``."""
        self._check_open()
        transfer, number = _Transfer(tag, array), next(self._transfers)
        if array.size <= INLINE_BYTES:
            self._moving.add(transfer)
            self._say(NoteKind.INLINE, number, tag, array.size, array.tobytes(), lambda e: self._moved(transfer, e))
        else:
            self._offered[number] = transfer
            self._say(NoteKind.OFFER, number, tag, array.size)
        await self._finish(transfer)

    async def recv(self, tag: int, array: _Bytes) -> None:
        """Receive into ``array`` what the peer sends under ``tag``; see ``Transport.recv``."""
        self._check_open()
        transfer = _Transfer(tag, array)
        self._wanted.setdefault(tag, deque()).append(transfer)
        self._match(tag)
        await self._finish(transfer)

    def end(self, ended: Callable[[], TransportError], *, leave: bool) -> None:
        """End the link; what only waits raises at once, what is moving goes on to its end. Idempotent.

        Args:
            ended: makes the error of this and all later calls.
            leave: tell the peer.
        """
        if self._ended is not None:
            return
        self._ended = ended
        self._mailbox.listener = None
        self._mailbox.ended = max(self._mailbox.ended, self._theirs or 0)
        self._endpoint.on_death = None
        if leave and self._endpoint.alive:
            self._say(NoteKind.LEAVE)
        for number in self._accepted:
            self._driver.expect_unwanted(number ^ self._recv_salt, self._endpoint.sender)
        wanted = [transfer for queue in self._wanted.values() for transfer in queue]
        for transfer in [*self._offered.values(), *wanted, *self._accepted.values()]:
            transfer.settle(ended())
        for waiting in (self._offered, self._wanted, self._accepted, self._arrived):
            waiting.clear()

    async def released(self) -> None:
        """Wait until UCX has let go of every caller's buffer, also when cancelled.

        Raises:
            DeadlineExceededError: the peer stands still in the middle of a transfer; its buffer must not be reused.
        """
        for transfer in list(self._moving):
            await self._let_go(transfer)

    async def _finish(self, transfer: _Transfer) -> None:
        try:
            await transfer.done.wait()
        except anyio.get_cancelled_exc_class():
            if not transfer.done.is_set():
                self.end(self._cancelled, leave=True)
                await self._let_go(transfer)
            raise
        if transfer.error is not None:
            raise transfer.error

    async def _let_go(self, transfer: _Transfer) -> None:
        with anyio.CancelScope(shield=True), anyio.move_on_after(RELEASE_DEADLINE_S):
            await transfer.done.wait()
        if not transfer.done.is_set():
            what = "end of a transfer, whose buffer must not be reused"
            raise DeadlineExceededError(self._peer, what, RELEASE_DEADLINE_S)

    # --- what the peer says -----------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """Take in what the peer has said before this link was open, as far as it still counts."""
        notes, self._mailbox.ended = current_notes(self._mailbox.notes, self._mailbox.ended)
        self._mailbox.notes.clear()
        self._mailbox.listener = self._hear
        for note in notes:
            self._hear(note)

    def _hear(self, note: Note) -> None:
        if note.link <= self._mailbox.ended:
            return  # of a link that is over
        if self._theirs is not None and note.link != self._theirs:
            self.end(self._left, leave=True)
            self._mailbox.put(note)  # for the link that replaces this one
            return
        self._theirs = note.link
        match note.kind:
            case NoteKind.HELLO:
                self._driver.expect_nothing_unwanted(self._endpoint.sender)
            case NoteKind.OFFER | NoteKind.INLINE:
                self._arrived.setdefault(note.tag, deque()).append(note)
                self._match(note.tag)
            case NoteKind.ACCEPT:
                self._transmit(note.number)
            case NoteKind.LEAVE:
                for number, transfer in self._accepted.items():  # what the peer sent before it left is here already
                    self._driver.expect_no_longer(number ^ self._recv_salt)
                    transfer.settle(self._left())
                self._accepted.clear()
                # Told in return, so that the peer's next link knows what of this one may still be on the way.
                self.end(self._left, leave=True)

    def _match(self, tag: int) -> None:
        """Bring the next offer under ``tag`` and the next receive for it together, if both are there."""
        if tag not in self._wanted or tag not in self._arrived:
            return
        note, transfer = _pop(self._arrived, tag), _pop(self._wanted, tag)
        if note.nbytes != transfer.array.size:
            problem = f"{self._peer} sends {note.nbytes} bytes under tag {tag}, into a buffer of {transfer.array.size}"
            transfer.settle(TransportError(problem))
            self.end(lambda: TransportError(f"{problem}: the link was closed"), leave=True)
        elif note.kind is NoteKind.INLINE:
            transfer.array[:] = np.frombuffer(note.payload, np.uint8)
            transfer.settle(None)
        else:
            self._accepted[note.number] = transfer
            self._driver.expect(
                note.number ^ self._recv_salt, self._endpoint.sender, lambda probe: self._take_in(note.number, probe)
            )
            self._say(NoteKind.ACCEPT, note.number)

    # --- what moves -------------------------------------------------------------------------------------------------

    def _transmit(self, number: int) -> None:
        transfer = self._offered.pop(number, None)
        if transfer is None:
            return  # offered by a link of this worker that is over
        self._moving.add(transfer)
        self._endpoint.send(transfer.array, number ^ self._send_salt, lambda error: self._moved(transfer, error))

    def _take_in(self, number: int, probe: Any) -> None:
        transfer = self._accepted.pop(number)
        self._moving.add(transfer)
        self._driver.receive(probe, transfer.array, lambda error: self._moved(transfer, error))

    def _moved(self, transfer: _Transfer, error: Exception | None) -> None:
        self._moving.discard(transfer)
        transfer.settle(None if error is None else self._explain(error))

    def _say(
        self,
        kind: NoteKind,
        number: int = 0,
        tag: int = 0,
        nbytes: int = 0,
        payload: bytes = b"",
        on_done: Callable[[Exception | None], None] = lambda error: None,  # a failed endpoint reports its death
    ) -> None:
        note = Note(kind, self._own, self._number, number, tag, nbytes, payload)
        self._endpoint.send(note.encode(), self._note_tag, on_done)

    # --- how it ends ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._ended is not None:
            raise self._ended()
        if not self._endpoint.alive:
            raise self._died()

    def _explain(self, error: Exception) -> TransportError:
        if self._ended is not None:
            return self._ended()
        if not self._endpoint.alive:
            return self._died()
        return TransportError(f"{self._peer}: the transfer failed: {error}")

    def _died(self) -> PeerDiedError:
        return PeerDiedError(f"{self._peer} is gone: the link to it broke")

    def _left(self) -> PeerDiedError:
        return PeerDiedError(f"{self._peer} closed its link to this worker")

    def _cancelled(self) -> TransportError:
        return TransportError(f"the link to {self._peer} was closed, because a call on it was cancelled: connect again")


def _pop(queues: dict[int, deque[Any]], tag: int) -> Any:
    item = queues[tag].popleft()
    if not queues[tag]:
        del queues[tag]
    return item
