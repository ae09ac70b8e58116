"""The ``Transport`` over UCX: shared memory inside a node, TCP or RDMA between nodes.

There is no listener (UCX's would bind every address of the host): worker addresses travel over the authenticated
control plane, and whoever holds one can open a link.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import Self

import anyio
import torch

from rlbridge.transport.buffers import as_bytes, check_tag
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import TransportError
from rlbridge.transport.node import node_identity
from rlbridge.transport.protocol import TransportAddress
from rlbridge.transport.ucx_driver import LOCAL_SETTINGS, UcxDriver, remote_settings
from rlbridge.transport.ucx_library import ucx
from rlbridge.transport.ucx_link import UcxLink

_KIND = "ucxx"
_CHECKSUM_BYTES = 8

_CLOSE_DEADLINE_S = 2.0
"""How long closing waits for transfers under way, and for peers to be told."""


def _seal(address: bytes) -> bytes:
    """UCX ends the process when it unpacks a damaged address, so addresses travel with a checksum."""
    return hashlib.blake2b(address, digest_size=_CHECKSUM_BYTES).digest() + address


def _unseal(peer: str, blob: bytes) -> bytes:
    checksum, address = blob[:_CHECKSUM_BYTES], blob[_CHECKSUM_BYTES:]
    if hashlib.blake2b(address, digest_size=_CHECKSUM_BYTES).digest() != checksum:
        raise TransportError(f"{peer}: its UCX address is damaged ({len(blob)} bytes)")
    return address


def _closed_here(peer: str) -> TransportError:
    return TransportError(f"the link to {peer} was closed on this side")


class UcxxTransport:
    """Two UCX workers on one event loop: one for peers of this node, one for all others.

    A cancelled call closes the link to its peer, who is told; then both sides ``connect`` again. A message that does
    not fit its buffer exactly is an error of the receiver, and closes the link too.
    """

    def __init__(self, config: TransportConfig, name: str) -> None:
        """On the running asyncio loop. Close it with ``aclose``; ``open`` does both."""
        self._name = name
        self._links: dict[str, UcxLink] = {}
        self._closed = False
        try:
            self._remote = UcxDriver(remote_settings(config.net_devices))
            self._local = UcxDriver(LOCAL_SETTINGS) if config.shared_memory else None
        except ucx.UCXError as error:
            raise TransportError(
                f"{name}: UCX did not start with net_devices={config.net_devices!r}: {error}; "
                "`rlbridge doctor` lists the devices it has"
            ) from error
        self._blobs = (self._local.address if self._local is not None else b"", self._remote.address)
        self._link_numbers, self._transfer_numbers = count(1), count(1)

    @classmethod
    @asynccontextmanager
    async def open(cls, config: TransportConfig, name: str) -> AsyncIterator[Self]:
        """A transport for the worker ``name`` on the running asyncio loop, closed at the end of the block.

        Raises:
            TransportError: UCX does not start, e.g. because it lacks the configured devices.
        """
        transport = cls(config, name)
        try:
            yield transport
        finally:
            await transport.aclose()

    @property
    def address(self) -> TransportAddress:
        """Where others reach this worker; the local part is empty if it does not share memory."""
        return TransportAddress(_KIND, node_identity(), tuple(_seal(blob) for blob in self._blobs))

    async def connect(self, peer: str, address: TransportAddress) -> None:
        """Open the link to ``peer``, over shared memory if both sides can; see ``Transport.connect``."""
        if self._closed:
            raise TransportError(f"{self._name}: its transport is closed")
        if address.kind != _KIND or len(address.blobs) != 2:
            raise TransportError(f"{peer}: a {address.kind!r} address with {len(address.blobs)} parts is not UCX's")
        local, remote = (_unseal(peer, blob) for blob in address.blobs)
        await self.disconnect(peer)
        if self._local is not None and local and address.node == node_identity():
            driver, blob = self._local, local
        else:
            driver, blob = self._remote, remote
        try:
            self._links[peer] = UcxLink(driver, peer, blob, next(self._link_numbers), self._transfer_numbers)
        except TransportError as error:
            raise TransportError(f"{peer}: {error}") from error

    async def send(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Send ``buffer`` (``uint8 [n]``) under ``tag``; see ``Transport.send``."""
        check_tag(tag)
        await self._link(peer).send(tag, as_bytes(buffer))

    async def recv(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Receive into ``buffer`` (``uint8 [n]``) what ``peer`` sends under ``tag``; see ``Transport.recv``."""
        check_tag(tag)
        await self._link(peer).recv(tag, as_bytes(buffer))

    async def disconnect(self, peer: str) -> None:
        """Close the link to ``peer`` and tell it; see ``Transport.disconnect``."""
        if (link := self._links.pop(peer, None)) is not None:
            link.end(partial(_closed_here, peer), leave=True)
            await link.released()

    async def aclose(self) -> None:
        """Close every link, telling the peers, and free both workers. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with anyio.CancelScope(shield=True):
            for peer, link in self._links.items():
                link.end(partial(_closed_here, peer), leave=True)
            for driver in (self._local, self._remote):
                if driver is not None:
                    await driver.aclose(_CLOSE_DEADLINE_S)

    def _link(self, peer: str) -> UcxLink:
        try:
            return self._links[peer]
        except KeyError:
            raise TransportError(f"{self._name} has no link to {peer}: connect first") from None
