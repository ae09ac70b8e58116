"""Frames survive any splitting of the stream, and nothing else is taken for one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.transport.control import framing
from rlbridge.transport.control.framing import FrameDecoder, FrameKind, encode_frame
from rlbridge.transport.errors import ProtocolError

FRAMES = st.lists(st.tuples(st.sampled_from(FrameKind), st.binary(max_size=200)), max_size=8)


@given(FRAMES, st.data())
def test_frames_survive_any_splitting(frames, data):
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    decoder, got = FrameDecoder(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        decoder.feed(stream[start:end])
        got.extend(decoder.frames())
    assert got == frames


@given(FRAMES, st.integers(1, 50))
def test_an_unfinished_frame_is_not_handed_out(frames, missing):
    stream = b"".join(encode_frame(kind, payload) for kind, payload in frames)
    last = encode_frame(FrameKind.MESSAGE, b"x" * 50)
    decoder = FrameDecoder()
    decoder.feed(stream + last[: len(last) - missing])
    assert list(decoder.frames()) == frames


@given(st.binary(min_size=5, max_size=100))
def test_garbage_ends_in_an_error_or_in_waiting_but_never_in_a_crash(garbage):
    decoder = FrameDecoder(limit_bytes=64)
    decoder.feed(garbage)
    try:
        got = list(decoder.frames())
    except ProtocolError:
        return
    assert sum(len(payload) + 5 for _, payload in got) <= len(garbage)


def test_a_frame_over_the_limit_is_refused_from_its_header_alone():
    decoder = FrameDecoder(limit_bytes=10)
    decoder.feed(encode_frame(FrameKind.MESSAGE, b"x" * 11)[:5])
    with pytest.raises(ProtocolError, match="11 bytes is over the limit of 10"):
        list(decoder.frames())


def test_a_message_over_the_limit_is_refused_where_it_is_sent(monkeypatch):
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 10)
    with pytest.raises(ProtocolError, match="over the limit"):
        encode_frame(FrameKind.MESSAGE, b"x" * 11)


def test_an_unknown_kind_is_refused():
    decoder = FrameDecoder()
    decoder.feed(b"\0\0\0\0\x63")
    with pytest.raises(ProtocolError, match="unknown kind 99"):
        list(decoder.frames())
