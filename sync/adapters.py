"""The front of the weight path for a trainer's and an engine's own code; the work is on the bridge thread.

::

    trainer                                          rollout
    with SenderAdapter(...) as bridge:               with ReceiverAdapter(...) as bridge:
        bridge.connect()                                 bridge.connect()
        for version in range(steps):                     while running:
            bridge.send_weights(version)                     bridge.poll_requests()
            train()                                          decode_one_token()

``AsyncSenderAdapter`` and ``AsyncReceiverAdapter`` are the same for code that runs in an event loop of its own: ``async
with``, and ``await`` before each method.
"""

from __future__ import annotations

import anyio.lowlevel

from rlbridge.sync.bridge import finished
from rlbridge.sync.front import Awaited, Blocking
from rlbridge.sync.member import Promise
from rlbridge.sync.receiver import Receiver
from rlbridge.sync.receiver_front import ReceiverFront
from rlbridge.sync.sender import Sender
from rlbridge.sync.sender_front import SenderFront


class _Handle:
    def __init__(self, version: int, fate: Promise[bool], sender: SenderFront) -> None:
        self.version = version
        self._fate, self._sender = fate, sender

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._fate.event.is_set()


class SendHandle(_Handle):
    """One version on its way."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every replica holds the version and all its digests matched.

        Args:
            timeout_s: seconds; ``None`` takes the transport's own deadlines.

        Returns:
            ``True`` if it was delivered, ``False`` if a newer version took its place.

        Raises:
            DeadlineExceededError: it takes longer.
            SyncError, PeerDiedError: it cannot be delivered any more.
        """
        return finished(self._sender.settled(self.version, self._fate, timeout_s))


class AsyncSendHandle(_Handle):
    """One version on its way."""

    async def wait(self, timeout_s: float | None = None) -> bool:
        """As ``SendHandle.wait``."""
        return await self._sender.settled(self.version, self._fate, timeout_s)


class SenderAdapter(SenderFront, Blocking[Sender]):
    """A trainer rank's end of the weight path; ``SenderFront`` describes the arguments."""

    def send_weights(self, version: int) -> SendHandle:
        """Publish the live weights as ``version``. Blocks for the snapshot (sender staging) or the whole transfer.

        With staging and a version still under way, ``sync.on_busy`` says what happens.

        Raises:
            SyncError: ``version`` does not grow, or the update failed; with the receiver's text if it was the last.
            PeerDiedError: nobody is left to receive it. DeadlineExceededError: somebody is late.
        """
        return SendHandle(version, finished(self._send(version)), self)


class AsyncSenderAdapter(SenderFront, Awaited[Sender]):
    """``SenderAdapter`` for code in an event loop; a portal that is given must be that of another thread."""

    async def send_weights(self, version: int) -> AsyncSendHandle:
        """As ``SenderAdapter.send_weights``; the snapshot is taken on this thread, the rest is awaited.

        If it is cancelled, the bridge has failed: the other ranks were about to wait for this one.
        """
        return AsyncSendHandle(version, await self._send(version), self)


class ReceiverAdapter(ReceiverFront, Blocking[Receiver]):
    """A rollout rank's end of the weight path; ``ReceiverFront`` describes the arguments."""

    def poll_requests(self) -> int | None:
        """Take a version if one is there. Call it between inference steps; costs a flag check otherwise.

        Returns:
            The version that the live weights hold from now on, or ``None`` if nothing changed.

        Raises:
            RlbridgeError: the bridge failed. If weights were being written, they are torn: do not compute with them.
            WorkerError: the backend's own ``load_weights`` or ``after_load`` raised; likewise.
        """
        return None if self._has_nothing_to_do else finished(self._take())


class AsyncReceiverAdapter(ReceiverFront, Awaited[Receiver]):
    """``ReceiverAdapter`` for code in an event loop; a portal that is given must be that of another thread."""

    async def poll_requests(self) -> int | None:
        """As ``ReceiverAdapter.poll_requests``; applying happens on this thread, the rest is awaited.

        If it is cancelled while it stands still, the weights may be torn and the bridge has failed.
        """
        await anyio.lowlevel.checkpoint()
        return None if self._has_nothing_to_do else await self._take()


__all__ = [
    "AsyncReceiverAdapter",
    "AsyncSendHandle",
    "AsyncSenderAdapter",
    "ReceiverAdapter",
    "SendHandle",
    "SenderAdapter",
]
