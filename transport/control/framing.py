"""Frames: what a byte stream is cut into. ``[length: u32 little-endian][kind: u8][payload: length bytes]``. Pure."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

from rlbridge.transport.errors import ProtocolError

_HEADER = struct.Struct("<IB")

MAX_FRAME_BYTES = 256 * 1024 * 1024
"""Largest payload of an authenticated peer: control messages are small, a batch of trajectories may be megabytes."""


class FrameKind(IntEnum):
    """What a frame carries."""

    MESSAGE = 0
    """One encoded message."""
    HEARTBEAT = 1
    """Nothing: the sender is alive."""


def encode_frame(kind: FrameKind, payload: bytes = b"") -> bytes:
    """One frame as bytes.

    Raises:
        ProtocolError: the payload is larger than any peer accepts.
    """
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {len(payload)} bytes is over the limit of {MAX_FRAME_BYTES}: send it in parts"
        )
    return _HEADER.pack(len(payload), kind) + payload


class FrameDecoder:
    """Cuts received bytes into frames, however they were split on the way.

    Args:
        limit_bytes: largest payload that is accepted; checked before anything is buffered for it.
    """

    def __init__(self, limit_bytes: int = MAX_FRAME_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take bytes in."""
        self._buffer += chunk

    def frames(self) -> Iterator[tuple[FrameKind, bytes]]:
        """The frames that are complete by now, each once.

        Raises:
            ProtocolError: a frame is over the limit or of an unknown kind; the stream is unusable from there.
        """
        while len(self._buffer) >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer)
            if length > self.limit_bytes:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self.limit_bytes}")
            if kind not in FrameKind.__members__.values():
                raise ProtocolError(f"a frame of the unknown kind {kind}")
            end = _HEADER.size + length
            if len(self._buffer) < end:
                return
            payload = bytes(memoryview(self._buffer)[_HEADER.size : end])
            del self._buffer[:end]
            yield FrameKind(kind), payload
