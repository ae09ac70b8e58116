"""Control channels: typed messages between two authenticated processes that notice each other's death.

``serve`` listens and runs a handler for each peer that knows the run's secret; ``connect`` dials. On both sides a
channel has two tasks: the reader takes in whatever comes, so that a slow consumer does not make its peer look dead, and
the writer sends what is queued, or a heartbeat when nothing is.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, NoReturn, TypeVar

import anyio
import msgspec
from anyio.abc import ByteStream, SocketStream, TaskStatus

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control.auth import check_secret
from rlbridge.transport.control.endpoint import dial, listen
from rlbridge.transport.control.framing import FrameDecoder, FrameKind, encode_frame
from rlbridge.transport.control.handshake import as_client, as_server
from rlbridge.transport.errors import PeerDiedError, ProtocolError, RlbridgeError, TransportError

logger = logging.getLogger(__name__)

Send = TypeVar("Send")
Receive = TypeVar("Receive")

_QUEUE_MESSAGES = 256
"""Messages that wait in each direction before the sender has to."""

_CLOSE_DEADLINE_S = 5.0
"""How long closing waits for the other side to read what was sent. A live peer does so at once."""


class ControlChannel(Generic[Send, Receive]):
    """A conversation with one authenticated peer. Made by ``connect`` and ``serve``.

    Args:
        stream: the authenticated connection; the channel owns it.
        decoder: what was read after the handshake.
        peer: the name that the other side proved.
        receive: type of incoming messages; others are a ``ProtocolError``.
        config: heartbeat interval and the silence that means death.
    """

    def __init__(
        self, stream: ByteStream, decoder: FrameDecoder, peer: str, receive: Any, config: TransportConfig
    ) -> None:
        self.peer = peer
        self._stream, self._frames, self._config = stream, decoder, config
        self._decode = msgspec.msgpack.Decoder(receive).decode
        self._incoming, self._inbox = anyio.create_memory_object_stream[Receive](_QUEUE_MESSAGES)
        self._outbox, self._outgoing = anyio.create_memory_object_stream[bytes](_QUEUE_MESSAGES)
        self._failure: TransportError | None = None
        self._tasks = anyio.CancelScope()
        self._stopped = anyio.Event()

    async def send(self, message: Send) -> None:
        """Queue a message; waits while the peer is too slow.

        Raises:
            PeerDiedError: the peer is gone, or the channel is closed. ProtocolError: the message is too large.
        """
        frame = encode_frame(FrameKind.MESSAGE, msgspec.msgpack.encode(message))
        try:
            await self._outbox.send(frame)
        except (anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._raise()

    async def receive(self) -> Receive:
        """The next message.

        Raises:
            PeerDiedError: the peer is gone, has been silent for ``dead_after_s``, or a side closed the channel.
            ProtocolError: the peer sent something else than a message of the agreed type.
        """
        try:
            return await self._inbox.receive()
        except (anyio.EndOfStream, anyio.ClosedResourceError):
            self._raise()

    async def aclose(self) -> None:
        """Send what is queued, wait for the peer to have read it, and close. Idempotent."""
        with anyio.CancelScope(shield=True):
            self._outbox.close()
            self._inbox.close()
            with anyio.move_on_after(_CLOSE_DEADLINE_S):
                await self._stopped.wait()
            if not self._stopped.is_set():
                logger.warning("%s does not read: closed the channel to it without it", self.peer)
                self._fail(PeerDiedError(f"{self.peer} did not read to the end of the channel"))
                await self._stopped.wait()

    async def run(self) -> None:
        """The channel's two tasks; ends when the connection does. Owned by ``connect`` and ``serve``."""
        try:
            with self._tasks:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read)
                    tasks.start_soon(self._write)
        finally:
            self._fail(PeerDiedError(f"the channel to {self.peer} was closed on this side"))
            self._stopped.set()
            await anyio.aclose_forcefully(self._stream)

    async def _read(self) -> None:
        try:
            while True:
                for kind, payload in self._frames.frames():
                    if kind is FrameKind.MESSAGE:
                        await self._take_in(payload)
                self._frames.feed(await self._next_chunk())
        except TransportError as error:
            self._fail(error)

    async def _take_in(self, payload: bytes) -> None:
        try:
            message = self._decode(payload)
        except msgspec.DecodeError as error:
            raise ProtocolError(f"{self.peer} sent a message that is not of the agreed type: {error}") from error
        try:
            await self._incoming.send(message)
        except anyio.BrokenResourceError:
            logger.debug("a message from %s came after this side had closed", self.peer)

    async def _next_chunk(self) -> bytes:
        try:
            # In two halves: if this process itself stood still, the second half finds what waits in the socket.
            for _ in range(2):
                with anyio.move_on_after(self._config.dead_after_s / 2):
                    return await self._stream.receive()
        except anyio.EndOfStream:
            raise PeerDiedError(f"{self.peer} closed its connection") from None
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise PeerDiedError(f"the connection to {self.peer} broke") from error
        raise PeerDiedError(f"{self.peer} has been silent for {self._config.dead_after_s:.1f} s")

    async def _write(self) -> None:
        try:
            await self._send_queued()
            # Not closed outright: unread bytes on this side would make the kernel drop what the peer has yet to read.
            await self._stream.send_eof()
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            self._fail(PeerDiedError(f"the connection to {self.peer} broke: {error}"))

    async def _send_queued(self) -> None:
        heartbeat = encode_frame(FrameKind.HEARTBEAT)
        while True:
            frame = heartbeat
            try:
                with anyio.move_on_after(self._config.heartbeat_s):
                    frame = await self._outgoing.receive()
            except anyio.EndOfStream:
                return
            await self._stream.send(frame)

    def _fail(self, failure: TransportError) -> None:
        """End both tasks; whoever sends or receives from now on is told why. What came before can still be received."""
        if self._failure is None:
            self._failure = failure
            self._incoming.close()
            self._outgoing.close()
            self._tasks.cancel()

    def _raise(self) -> NoReturn:
        if self._failure is None:
            raise PeerDiedError(f"the channel to {self.peer} was closed on this side")
        raise type(self._failure)(*self._failure.args) from self._failure


async def _converse(
    channel: ControlChannel[Send, Receive], body: Callable[[ControlChannel[Send, Receive]], Awaitable[None]]
) -> None:
    """Run ``body`` beside the channel's tasks; its exception leaves as it is, not in a group."""
    async with _running(channel):
        await body(channel)


@asynccontextmanager
async def _running(channel: ControlChannel[Send, Receive]) -> AsyncIterator[ControlChannel[Send, Receive]]:
    failure: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.run)
        try:
            yield channel
        except Exception as error:
            failure = error
        finally:
            await channel.aclose()
    if failure is not None:
        raise failure


@asynccontextmanager
async def connect(
    endpoint: str,
    secret: bytes,
    *,
    name: str,
    send: type[Send] | Any,
    receive: type[Receive] | Any,
    config: TransportConfig,
) -> AsyncIterator[ControlChannel[Send, Receive]]:
    """Dial ``endpoint`` and prove ``name``; the channel is flushed and closed at the end of the block.

    Waits up to ``config.connect_timeout_s`` for somebody to listen. Death of the peer never cancels the block: it
    surfaces as ``PeerDiedError`` from ``send`` and ``receive``.

    Args:
        endpoint: ``tcp://host:port``, ``tcp://[ipv6]:port`` or ``unix:///path``.
        secret: the run's secret.
        name: who this side is.
        send: type of outgoing messages, for the type checker only.
        receive: type of incoming messages, e.g. a union of tagged structs.
        config: timeouts.

    Raises:
        DeadlineExceededError: nobody answered in time. AuthenticationError: the server does not know the secret.
        ProtocolError: something else answers there. PeerDiedError: the server hung up.
    """
    check_secret(secret)
    stream = await dial(endpoint, config.connect_timeout_s)
    async with _closing(stream):
        decoder, peer = await as_client(stream, secret, name, endpoint, config)
        channel: ControlChannel[Send, Receive] = ControlChannel(stream, decoder, peer, receive, config)
        async with _running(channel):
            yield channel


async def serve(
    endpoint: str,
    secret: bytes,
    handler: Callable[[ControlChannel[Send, Receive]], Awaitable[None]],
    *,
    name: str,
    send: type[Send] | Any,
    receive: type[Receive] | Any,
    config: TransportConfig,
    task_status: TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Listen for ever; run ``handler`` beside the others for each peer that authenticates.

    Use ``bound = await tasks.start(serve, ...)``: it hands back the endpoint with its port. A stranger is logged and
    dropped, and harms nobody. What ``handler`` raises ends the server and propagates, as from any task.

    Args:
        endpoint: where to listen; TCP only on ``config.bind_host``, port 0 takes a free one.
        secret: the run's secret.
        handler: the conversation with one peer; its channel is flushed and closed when it returns.
        name: who this side is.
        send: type of outgoing messages, for the type checker only.
        receive: type of incoming messages.
        config: address to bind, timeouts.
        task_status: given by ``TaskGroup.start``.

    Raises:
        ConfigError: the endpoint or the secret is unusable. TransportError: the socket cannot be bound.
    """
    check_secret(secret)

    async def converse(stream: SocketStream) -> None:
        async with _closing(stream):
            try:
                decoder, peer = await as_server(stream, secret, name, config)
            except RlbridgeError as error:
                logger.warning("dropped a stranger at %s: %s", bound, error)
                return
            await _converse(ControlChannel(stream, decoder, peer, receive, config), handler)

    async with listen(endpoint, config) as (listener, bound):
        task_status.started(bound)
        await listener.serve(converse)


@asynccontextmanager
async def _closing(stream: SocketStream) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await anyio.aclose_forcefully(stream)
