"""The handshake of ``auth`` over a stream, under a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import msgspec
from anyio.abc import ByteStream

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.control import auth
from rlbridge.transport.control.framing import MAX_FRAME_BYTES, FrameDecoder, FrameKind, encode_frame
from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError, ProtocolError

_DEADLINE_S = 10.0


async def as_client(
    stream: ByteStream, secret: bytes, name: str, endpoint: str, config: TransportConfig
) -> tuple[FrameDecoder, str]:
    """Prove ``name`` to the server at ``endpoint``; returns the decoder that goes on reading, and the server's name.

    Raises:
        AuthenticationError: the server does not know the secret. ProtocolError: something else answers.
        PeerDiedError: it hung up. DeadlineExceededError: it does not answer.
    """
    decoder = FrameDecoder(auth.MAX_HANDSHAKE_BYTES)
    with _deadline(endpoint, config):
        hello = auth.Hello(name, auth.fresh_nonce())
        await _send(stream, hello, endpoint)
        challenge = auth.decode_step(await _receive(stream, decoder, endpoint), auth.Challenge)
        auth.verify(challenge.proof, secret, "server", hello, challenge.name, challenge.nonce)
        proof = auth.prove(secret, "client", hello, challenge.name, challenge.nonce)
        await _send(stream, auth.Proof(proof), endpoint)
    decoder.limit_bytes = MAX_FRAME_BYTES
    return decoder, challenge.name


async def as_server(stream: ByteStream, secret: bytes, name: str, config: TransportConfig) -> tuple[FrameDecoder, str]:
    """Let a client prove who it is; returns the decoder that goes on reading, and the client's name.

    Raises:
        AuthenticationError: the client does not know the secret. ProtocolError: it does not speak this protocol.
        PeerDiedError: it hung up. DeadlineExceededError: it does not answer.
    """
    decoder, who, nonce = FrameDecoder(auth.MAX_HANDSHAKE_BYTES), "a client", auth.fresh_nonce()
    with _deadline(who, config):
        hello = auth.decode_step(await _receive(stream, decoder, who), auth.Hello)
        await _send(stream, auth.Challenge(name, nonce, auth.prove(secret, "server", hello, name, nonce)), who)
        proof = auth.decode_step(await _receive(stream, decoder, hello.name), auth.Proof)
        auth.verify(proof.proof, secret, "client", hello, name, nonce)
    decoder.limit_bytes = MAX_FRAME_BYTES
    return decoder, hello.name


@contextmanager
def _deadline(who: str, config: TransportConfig) -> Iterator[None]:
    seconds = min(_DEADLINE_S, config.connect_timeout_s)
    try:
        with anyio.fail_after(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineExceededError(who, "end of the handshake", seconds) from error


async def _send(stream: ByteStream, step: msgspec.Struct, who: str) -> None:
    try:
        await stream.send(encode_frame(FrameKind.MESSAGE, msgspec.msgpack.encode(step)))
    except anyio.BrokenResourceError as error:
        raise PeerDiedError(f"{who} hung up during the handshake") from error


async def _receive(stream: ByteStream, decoder: FrameDecoder, who: str) -> bytes:
    while (frame := next(decoder.frames(), None)) is None:
        try:
            decoder.feed(await stream.receive())
        except (anyio.EndOfStream, anyio.BrokenResourceError) as error:
            raise PeerDiedError(f"{who} hung up during the handshake") from error
    kind, payload = frame
    if kind is not FrameKind.MESSAGE:
        raise ProtocolError(f"{who} sent a frame of kind {kind.name} during the handshake")
    return payload
