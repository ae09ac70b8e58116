"""Mutual authentication: both sides prove that they know the run's secret, and neither ever sends it. Pure.

    client -> server   Hello(client name, client nonce)
    server -> client   Challenge(server name, server nonce, server proof)
    client -> server   Proof(client proof)

A proof is HMAC-SHA256 over the prover's role, both names and both nonces. The role makes a reflected proof worthless,
the nonces a recorded one, the names a proof that was meant for somebody else.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from typing import Literal, TypeVar

import msgspec

from rlbridge.transport.errors import AuthenticationError, ConfigError, ProtocolError

NONCE_BYTES = 32
MAX_HANDSHAKE_BYTES = 1024
"""Largest frame that a stranger may send."""

_MIN_SECRET_BYTES = 16
_MAX_NAME_CHARS = 256
_CONTEXT = "rlbridge control plane, version 1"

Role = Literal["client", "server"]
_Struct = TypeVar("_Struct", bound=msgspec.Struct)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Client to server: who wants to talk."""

    name: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """Server to client: who answers, and the proof that it knows the secret."""

    name: str
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag=True):
    """Client to server: the proof that the client knows the secret."""

    proof: bytes


def fresh_nonce() -> bytes:
    """Random bytes that were never used before."""
    return secrets.token_bytes(NONCE_BYTES)


def decode_step(payload: bytes, expected: type[_Struct]) -> _Struct:
    """One step of the handshake.

    Raises:
        ProtocolError: it is not ``expected``, or a name or nonce in it is malformed.
    """
    try:
        step = msgspec.msgpack.decode(payload, type=expected)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"instead of {expected.__name__} came something else: {error}") from error
    if isinstance(step, Hello | Challenge):
        if len(step.nonce) != NONCE_BYTES:
            raise ProtocolError(f"a nonce of {len(step.nonce)} bytes instead of {NONCE_BYTES}")
        if not 0 < len(step.name) <= _MAX_NAME_CHARS:
            raise ProtocolError(f"a name of {len(step.name)} characters")
    return step


def check_secret(secret: bytes) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ConfigError: it is too short.
    """
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"the run's secret has {len(secret)} bytes: use at least {_MIN_SECRET_BYTES} random ones")


def prove(secret: bytes, role: Role, hello: Hello, server_name: str, server_nonce: bytes) -> bytes:
    """The proof of ``role`` in the handshake that ``hello`` began."""
    transcript = msgspec.msgpack.encode((_CONTEXT, role, hello.name, server_name, hello.nonce, server_nonce))
    return hmac.digest(secret, transcript, hashlib.sha256)


def verify(proof: bytes, secret: bytes, role: Role, hello: Hello, server_name: str, server_nonce: bytes) -> None:
    """Check the other side's proof in constant time.

    Raises:
        AuthenticationError: it is not the proof of ``role`` in this handshake.
    """
    if not hmac.compare_digest(proof, prove(secret, role, hello, server_name, server_nonce)):
        prover = hello.name if role == "client" else server_name
        raise AuthenticationError(f"{prover} could not prove that it knows this run's secret")
