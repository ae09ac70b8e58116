"""The small messages by which two UCX workers agree on what moves, and which link it belongs to. Pure.

UCX cannot take a transfer back: a cancelled request goes on, and closing an endpoint under it leaks the worker or, over
TCP, crashes the process when the peer stirs again. So nothing is handed to UCX before both sides want it::

    sender                      receiver
      Offer(number, tag, n) ---->         kept until ``recv`` asks for the tag
                            <---- Accept(number)
      data under its number ---->         received straight into the caller's buffer

Until ``Accept`` a cancelled call leaves nothing behind; after it both sides take part and the transfer ends by itself.
Short messages travel inside their offer.

Each link has a number that grows with every link its worker opens. ``Hello`` announces it and ``Leave`` ends it, so
that what an ended link left on the way is told apart from what the next one sends.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_HEADER = struct.Struct("<BQQQQQ")

INLINE_BYTES = 4096
"""Longest message that travels inside its offer: one fragment of every UCX transport, so notes keep their order."""


class NoteKind(IntEnum):
    """What a note says."""

    HELLO = 0
    """The sender has opened this link."""
    OFFER = 1
    """The sender has ``nbytes`` under ``tag`` and would send them under ``number``."""
    INLINE = 2
    """The same, and here they are."""
    ACCEPT = 3
    """The sender of this note waits for the data under ``number``."""
    LEAVE = 4
    """The sender has ended this link."""


class Note(NamedTuple):
    """One note.

    Attributes:
        kind: what it says.
        sender: fingerprint of the sender's address.
        link: number of the sender's link.
        number: the transfer, unique among those of the worker that sends the data.
        tag: the caller's tag.
        nbytes: length of the message.
        payload: the message itself, if it is inline.
    """

    kind: NoteKind
    sender: int
    link: int
    number: int = 0
    tag: int = 0
    nbytes: int = 0
    payload: bytes = b""

    def encode(self) -> npt.NDArray[np.uint8]:
        """As bytes: ``uint8 [41 + inline bytes]``."""
        return np.frombuffer(bytearray(_HEADER.pack(*self[:6]) + self.payload), np.uint8)

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """From bytes that ``encode`` made."""
        kind, sender, link, number, tag, nbytes = _HEADER.unpack_from(data)
        return cls(NoteKind(kind), sender, link, number, tag, nbytes, data[_HEADER.size :])


def current_notes(notes: Iterable[Note], ended: int) -> tuple[list[Note], int]:
    """Of the notes that came from one worker while nobody here listened: those of its newest link, if it is open.

    Args:
        notes: in the order of arrival.
        ended: highest number of a link of that worker that is known to be over.

    Returns:
        The notes that still count, and the new ``ended``.
    """
    notes = [note for note in notes if note.link > ended]
    if not notes:
        return [], ended
    newest = max(note.link for note in notes)
    mine = [note for note in notes if note.link == newest]
    if any(note.kind is NoteKind.LEAVE for note in mine):
        return [], newest
    return mine, newest - 1


def fingerprint(*addresses: bytes) -> int:
    """64 bits that stand for a UCX address, or for a pair of them; two alike by chance only (2^-64)."""
    digest = hashlib.blake2b(digest_size=8)
    for address in addresses:
        digest.update(len(address).to_bytes(8, "little") + address)
    return int.from_bytes(digest.digest(), "little")
