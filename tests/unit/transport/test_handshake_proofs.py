"""A proof of the run's secret holds for one role in one handshake, and nowhere else."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.transport.control import auth
from rlbridge.transport.errors import AuthenticationError, ConfigError, ProtocolError

SECRET = b"0123456789abcdef"
NONCES = st.binary(min_size=auth.NONCE_BYTES, max_size=auth.NONCE_BYTES)
HANDSHAKES = st.tuples(
    st.sampled_from(["client", "server"]),
    st.text(min_size=1),
    st.text(min_size=1),
    NONCES,
    NONCES,
    st.binary(min_size=16),
)


def prove(handshake) -> bytes:
    role, client, server, client_nonce, server_nonce, secret = handshake
    return auth.prove(secret, role, auth.Hello(client, client_nonce), server, server_nonce)


@given(HANDSHAKES)
def test_the_right_proof_is_accepted(handshake):
    role, client, server, client_nonce, server_nonce, secret = handshake
    auth.verify(prove(handshake), secret, role, auth.Hello(client, client_nonce), server, server_nonce)


@given(HANDSHAKES, HANDSHAKES, st.sets(st.integers(0, 5), min_size=1))
def test_a_proof_of_anything_else_is_refused(handshake, other, changed):
    mixed = tuple(other[i] if i in changed else handshake[i] for i in range(6))
    if mixed == handshake:
        return
    role, client, server, client_nonce, server_nonce, secret = handshake
    with pytest.raises(AuthenticationError, match="could not prove"):
        auth.verify(prove(mixed), secret, role, auth.Hello(client, client_nonce), server, server_nonce)


def test_names_cannot_be_shifted_into_each_other():
    hello, shifted = auth.Hello("ab", b"\0" * 32), auth.Hello("a", b"\0" * 32)
    assert auth.prove(SECRET, "client", hello, "c", b"\0" * 32) != auth.prove(
        SECRET, "client", shifted, "bc", b"\0" * 32
    )


@pytest.mark.parametrize("proof", [b"", b"\0" * 32, b"\0" * 31])
def test_a_made_up_proof_is_refused(proof):
    with pytest.raises(AuthenticationError, match="w0"):
        auth.verify(proof, SECRET, "client", auth.Hello("w0", b"\0" * 32), "controller", b"\1" * 32)


@pytest.mark.parametrize(
    "step",
    [
        auth.Hello("w0", b"short"),
        auth.Hello("", b"\0" * 32),
        auth.Hello("x" * 257, b"\0" * 32),
        auth.Proof(b""),
        auth.Challenge("w0", b"\0" * 32, b""),
    ],
)
def test_a_malformed_or_unexpected_step_is_refused(step):
    with pytest.raises(ProtocolError):
        auth.decode_step(msgspec.msgpack.encode(step), auth.Hello)


@given(st.binary(max_size=64))
def test_garbage_instead_of_a_step_is_refused(garbage):
    with pytest.raises(ProtocolError):
        auth.decode_step(garbage, auth.Hello)


def test_a_secret_that_could_be_guessed_is_refused():
    with pytest.raises(ConfigError, match="15 bytes"):
        auth.check_secret(SECRET[:15])


def test_nonces_are_fresh():
    assert len({auth.fresh_nonce() for _ in range(100)}) == 100
