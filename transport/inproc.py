"""The reference ``Transport`` inside one process: it copies bytes, and needs neither UCX nor sockets.

It is strict where UCX is lenient: even a short send ends only when it is received. What ends a link there ends it here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import count

import anyio
import numpy as np
import numpy.typing as npt
import torch

from rlbridge.transport.buffers import as_bytes, check_tag
from rlbridge.transport.errors import PeerDiedError, TransportError
from rlbridge.transport.protocol import TransportAddress

_KIND = "inproc"

_Key = tuple[bytes, int]
"""Who sent a message, and its tag."""


class _Operation:
    """A send or a receive that waits for its counterpart."""

    def __init__(
        self,
        owner: InprocTransport,
        link: _Link,
        array: npt.NDArray[np.uint8],
        queue: dict[_Key, deque[_Operation]],
        key: _Key,
    ) -> None:
        self.owner, self.link, self.array = owner, link, array
        self.error: TransportError | None = None
        self.done = anyio.Event()
        self._queue, self.key = queue, key

    def enqueue(self) -> None:
        self._queue.setdefault(self.key, deque()).append(self)

    def end(self, error: TransportError | None) -> None:
        """Over: nobody touches the buffer from here on."""
        waiting = self._queue.get(self.key, deque())
        if self in waiting:
            waiting.remove(self)
        if not waiting:
            self._queue.pop(self.key, None)
        self.error = error
        self.done.set()


class _Link:
    """One peer as seen from one transport."""

    def __init__(self, other: InprocTransport) -> None:
        self.other = other
        self.operations: set[_Operation] = set()
        self.ended: Callable[[], TransportError] | None = None

    def end(self, ended: Callable[[], TransportError]) -> None:
        if self.ended is None:
            self.ended = ended
            for operation in list(self.operations):
                operation.end(ended())


class InprocHub:
    """The transports that can reach each other. One hub is one small world: nothing is global."""

    def __init__(self) -> None:
        self._members: dict[bytes, InprocTransport] = {}
        self._numbers = count()

    def transport(self, name: str, node: str = "node0") -> InprocTransport:
        """A transport for the worker ``name`` on ``node``; a name may come back after it was closed or killed."""
        transport = InprocTransport(self, name, node, f"{name}#{next(self._numbers)}".encode())
        self._members[transport.identity] = transport
        return transport

    def kill(self, name: str) -> None:
        """Let the worker ``name`` die: its peers see a dead peer, and its own calls raise.

        Raises:
            TransportError: nobody alive has that name.
        """
        victims = [member for member in self._members.values() if member.name == name]
        if not victims:
            raise TransportError(f"{name}: no such transport in this hub")
        for victim in victims:
            self.remove(victim, lambda: PeerDiedError(f"{name} is gone: the link to it broke"))
            victim.end_all(lambda: TransportError(f"{name} was killed"))

    def find(self, peer: str, identity: bytes) -> InprocTransport:
        """The living transport behind an address.

        Raises:
            TransportError: there is none.
        """
        try:
            return self._members[identity]
        except KeyError:
            raise TransportError(f"{peer}: nobody lives at the address {identity!r}") from None

    def remove(self, leaver: InprocTransport, ended: Callable[[], TransportError]) -> None:
        """Take a transport out of the hub and end the links of all others to it."""
        self._members.pop(leaver.identity, None)
        for member in self._members.values():
            member.peer_ended(leaver, ended)


class InprocTransport:
    """See ``Transport``. Made by ``InprocHub.transport``."""

    def __init__(self, hub: InprocHub, name: str, node: str, identity: bytes) -> None:
        self.name, self.identity = name, identity
        self._hub, self._node = hub, node
        self._links: dict[str, _Link] = {}
        self._arrived: dict[_Key, deque[_Operation]] = {}
        self._wanted: dict[_Key, deque[_Operation]] = {}
        self._closed: Callable[[], TransportError] | None = None

    @property
    def address(self) -> TransportAddress:
        """Where others reach this worker."""
        return TransportAddress(_KIND, self._node, (self.identity,))

    async def connect(self, peer: str, address: TransportAddress) -> None:
        """Open the link to ``peer``; see ``Transport.connect``."""
        if self._closed is not None:
            raise self._closed()
        if address.kind != _KIND or len(address.blobs) != 1:
            raise TransportError(f"{peer}: a {address.kind!r} address does not lead into this process")
        other = self._hub.find(peer, address.blobs[0])
        await self.disconnect(peer)
        self._links[peer] = _Link(other)

    async def send(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Send ``buffer`` (``uint8 [n]``) under ``tag``; see ``Transport.send``."""
        check_tag(tag)
        array, link, key = as_bytes(buffer), self._link(peer), (self.identity, tag)
        operation = _Operation(self, link, array, link.other._arrived, key)
        if key in link.other._wanted:
            _copy(operation, link.other._wanted[key][0])
        else:
            operation.enqueue()
        await self._finish(peer, link, operation)

    async def recv(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        """Receive into ``buffer`` (``uint8 [n]``) what ``peer`` sends under ``tag``; see ``Transport.recv``."""
        check_tag(tag)
        array, link = as_bytes(buffer), self._link(peer)
        key = (link.other.identity, tag)
        operation = _Operation(self, link, array, self._wanted, key)
        if key in self._arrived:
            _copy(self._arrived[key][0], operation)
        else:
            operation.enqueue()
        await self._finish(peer, link, operation)

    async def disconnect(self, peer: str) -> None:
        """Close the link to ``peer`` and tell it; see ``Transport.disconnect``."""
        await anyio.lowlevel.checkpoint()
        if (link := self._links.pop(peer, None)) is not None:
            self.leave(link, lambda: TransportError(f"the link to {peer} was closed on this side"))

    async def aclose(self) -> None:
        """Close every link and leave the hub. Idempotent."""
        if self._closed is None:
            self._hub.remove(self, self.left)
            self.end_all(lambda: TransportError(f"{self.name}: its transport is closed"))

    def end_all(self, ended: Callable[[], TransportError]) -> None:
        """End every link of this transport, and refuse new ones."""
        if self._closed is None:
            self._closed = ended
            for link in self._links.values():
                link.end(ended)

    def peer_ended(self, other: InprocTransport, ended: Callable[[], TransportError]) -> None:
        """The other side of our links to ``other`` is gone."""
        for link in self._links.values():
            if link.other is other:
                link.end(ended)

    async def _finish(self, peer: str, link: _Link, operation: _Operation) -> None:
        link.operations.add(operation)
        try:
            await operation.done.wait()
        except anyio.get_cancelled_exc_class():
            if not operation.done.is_set():
                self.leave(link, lambda: _cancelled(peer))
            raise
        finally:
            link.operations.discard(operation)
        if operation.error is not None:
            raise operation.error

    def leave(self, link: _Link, ended: Callable[[], TransportError]) -> None:
        """End one of this transport's links, and tell the other side."""
        if link.ended is None:
            link.end(ended)
            link.other.peer_ended(self, self.left)

    def left(self) -> PeerDiedError:
        """What the other side of an ended link is told."""
        return PeerDiedError(f"{self.name} closed its link to this worker")

    def _link(self, peer: str) -> _Link:
        if self._closed is not None:
            raise self._closed()
        if peer not in self._links:
            raise TransportError(f"{self.name} has no link to {peer}: connect first")
        link = self._links[peer]
        if link.ended is not None:
            raise link.ended()
        return link


def _copy(sender: _Operation, receiver: _Operation) -> None:
    if sender.array.size == receiver.array.size:
        receiver.array[:] = sender.array
        sender.end(None)
        receiver.end(None)
        return
    problem = (
        f"{sender.owner.name} sends {sender.array.size} bytes under tag {sender.key[1]}, "
        f"into a buffer of {receiver.array.size}"
    )
    sender.end(receiver.owner.left())
    receiver.end(TransportError(problem))
    receiver.owner.leave(receiver.link, lambda: TransportError(f"{problem}: the link was closed"))


def _cancelled(peer: str) -> TransportError:
    return TransportError(f"the link to {peer} was closed, because a call on it was cancelled: connect again")
