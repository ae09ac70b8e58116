"""The link to one peer: a UCX endpoint, what is in flight on it, and how it ends.

A link is open until one of four things ends it: the peer dies (UCX's keepalive or the socket tells), the peer says
goodbye, an operation in flight is cancelled, or its owner closes it. However it ends, everything in flight on it ends
with it, and no caller gets its buffer back before UCX has let go of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError, TransportError
from rlbridge.transport.ucx_driver import UcxDriver, UcxOperation
from rlbridge.transport.ucx_library import Array, ucx

_RELEASE_DEADLINE_S = 30.0
"""After the endpoint is closed UCX lets go of buffers within a second; longer than this is a defect worth an error."""

_GOODBYE_DEADLINE_S = 0.2
"""Telling the peer is a courtesy: a peer that does not read finds out by its own deadline."""


def salt(sender: bytes, receiver: bytes, purpose: str) -> int:
    """64 bits that mark messages from one worker address to another.

    UCX matches receives by tag alone, whoever sent it. Tags XOR this salt are distinct for distinct tags of one pair of
    workers, and collide between pairs, also between incarnations of one worker, only by chance (2^-64 a pair).
    """
    digest = hashlib.blake2b(digest_size=8, person=purpose.encode())
    digest.update(len(sender).to_bytes(8, "little") + sender + receiver)
    return int.from_bytes(digest.digest(), "little")


class UcxLink:
    """One peer as seen from one worker.

    Args:
        driver: the worker that carries this link.
        peer: name of the other side, for errors.
        own: this worker's UCX address.
        other: the peer's UCX address.

    Raises:
        TransportError: UCX cannot reach that address with the transports it has.
    """

    def __init__(self, driver: UcxDriver, peer: str, own: bytes, other: bytes) -> None:
        self._driver = driver
        self._peer = peer
        self._send_salt, self._recv_salt = salt(own, other, "data"), salt(other, own, "data")
        self._send_goodbye, self._recv_goodbye = salt(own, other, "goodbye"), salt(other, own, "goodbye")
        self._operations: set[UcxOperation] = set()
        self._ended: Callable[[], TransportError] | None = None
        try:
            address = ucx.UCXAddress.create_from_buffer(other)
            self._endpoint: Any = ucx.UCXEndpoint.create_from_worker_address(driver.worker, address, True)
        except ucx.UCXError as error:
            raise TransportError(f"{peer}: UCX cannot reach its address: {error}") from error
        driver.take_unmatched(self._recv_goodbye)  # of links that ended before this one began
        scratch = np.zeros(1, np.uint8)
        self._post(self._endpoint.tag_recv(Array(scratch), ucx.UCXXTag(self._recv_goodbye)), scratch, self._peer_left)

    async def send(self, tag: int, array: npt.NDArray[np.uint8]) -> None:
        """Send ``array`` under ``tag``; see ``Transport.send``."""
        self._check_open()
        request = self._endpoint.tag_send(Array(array), ucx.UCXXTag(tag ^ self._send_salt))
        await self._finish(self._post(request, array))

    async def recv(self, tag: int, array: npt.NDArray[np.uint8]) -> None:
        """Receive into ``array`` what the peer sends under ``tag``; see ``Transport.recv``."""
        self._check_open()
        # Posted through the endpoint, so that it ends with it; the tag alone decides what it matches.
        request = self._endpoint.tag_recv(Array(array), ucx.UCXXTag(tag ^ self._recv_salt))
        await self._finish(self._post(request, array))

    async def close(self, ended: Callable[[], TransportError], *, goodbye: bool) -> None:
        """End the link and wait until UCX has let go of every buffer. Idempotent.

        Args:
            ended: makes the error that operations in flight, and later ones, raise.
            goodbye: tell the peer, so that it does not wait for us.

        Raises:
            DeadlineExceededError: UCX still holds a buffer; it must not be reused.
        """
        with anyio.CancelScope(shield=True):
            if self._ended is None:
                self._ended = ended
                if goodbye and self._endpoint.alive:
                    await self._say_goodbye()
                self._close_endpoint()
            with anyio.move_on_after(_RELEASE_DEADLINE_S):
                while self._operations:
                    await next(iter(self._operations)).wait()
            if self._operations:
                raise DeadlineExceededError(self._peer, "release of its buffers by UCX", _RELEASE_DEADLINE_S)
            self._endpoint = None  # it holds the worker, and with it the descriptors

    def _post(
        self,
        request: Any,
        array: npt.NDArray[np.uint8],
        on_success: Callable[[], None] | None = None,
    ) -> UcxOperation:
        def on_done(operation: UcxOperation) -> None:
            self._operations.discard(operation)
            if on_success is not None and operation.error is None:
                on_success()

        operation = self._driver.submit(request, array, on_done)
        self._operations.add(operation)
        return operation

    async def _finish(self, operation: UcxOperation) -> None:
        try:
            await operation.wait()
        except anyio.get_cancelled_exc_class():
            # Cancelling a request does not stop its transfer; closing the endpoint does.
            if not operation.done:
                await self.close(self._cancelled, goodbye=True)
            raise
        if operation.error is not None:
            raise self._explain(operation.error)

    async def _say_goodbye(self) -> None:
        scratch = np.zeros(1, np.uint8)
        request = self._endpoint.tag_send(Array(scratch), ucx.UCXXTag(self._send_goodbye))
        operation = self._post(request, scratch)
        with anyio.move_on_after(_GOODBYE_DEADLINE_S):
            await operation.wait()

    def _peer_left(self) -> None:
        if self._ended is None:
            self._ended = self._left
            self._close_endpoint()

    def _close_endpoint(self) -> None:
        self._endpoint.close_blocking()
        self._driver.wake()

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
        return TransportError(
            f"the link to {self._peer} was closed, because an operation in flight on it was cancelled: connect again"
        )
