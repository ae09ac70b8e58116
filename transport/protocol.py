"""The one contract for moving bytes between workers.

Everything above (``sync``) speaks only this protocol; ``transport.ucxx_transport`` implements it over UCX and
``transport.inproc`` inside one process. Both pass the same conformance suite (``tests/integration/transport``).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import msgspec
import torch


class TransportAddress(msgspec.Struct, frozen=True):
    """How to reach one worker. Travels over the authenticated control plane, never over a listener of its own.

    Attributes:
        kind: the transport that can read ``blobs``: ``"ucxx"`` or ``"inproc"``.
        node: identity of the host; equal strings share memory.
        blobs: opaque addresses, one per context of the transport (``ucxx``: local, remote).
    """

    kind: str
    node: str
    blobs: tuple[bytes, ...]


@runtime_checkable
class Transport(Protocol):
    """Tagged messages of raw bytes between workers. All methods run on the event loop that made the transport.

    Buffers are one-dimensional contiguous ``torch.uint8`` tensors. A buffer belongs to the transport from the call
    until the call returns or raises: **also when the caller is cancelled or times out**, the call ends only once the
    transport has let go of the memory (it closes the link to that peer if it must), so that a caller may reuse a
    buffer as soon as its call is over.

    A link ends for both sides: when one disconnects, cancels a call, meets a message that does not fit its buffer, or
    dies, the other's calls raise ``PeerDiedError`` until both have connected again. Callers agree on that moment among
    themselves: a link that one side opens while the other still closes its old one may end with it.
    """

    @property
    def address(self) -> TransportAddress:
        """Where others reach this worker."""
        ...

    async def connect(self, peer: str, address: TransportAddress) -> None:
        """Open the link to ``peer``; a link that exists already is replaced.

        Raises:
            TransportError: the address cannot be read or reached.
        """
        ...

    async def send(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Send ``buffer`` (``uint8 [n]``) under a 64-bit ``tag`` that is unique among what is in flight to ``peer``.

        Raises:
            PeerDiedError: the peer is gone. TransportError: the link broke or was never opened.
        """
        ...

    async def recv(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Receive exactly ``buffer.numel()`` bytes sent by ``peer`` under ``tag``.

        Raises:
            PeerDiedError: the peer is gone. TransportError: the link broke, or was never opened.
        """
        ...

    async def disconnect(self, peer: str) -> None:
        """Close the link to ``peer``; pending operations on it raise. No error if there is none."""
        ...

    async def aclose(self) -> None:
        """Close every link and free the transport. Idempotent."""
        ...
