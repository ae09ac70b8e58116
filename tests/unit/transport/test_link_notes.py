"""Notes of the UCX link: their encoding, and which of them still count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rlbridge.transport.ucx_notes import Note, NoteKind, current_notes, fingerprint

U64 = st.integers(0, 2**64 - 1)
NOTES = st.builds(Note, st.sampled_from(NoteKind), U64, U64, U64, U64, U64, st.binary(max_size=64))
LINK_NOTES = st.lists(st.builds(Note, st.sampled_from(NoteKind), st.just(7), st.integers(1, 5)), max_size=20)


@given(NOTES)
def test_a_note_comes_back_as_it_was(note):
    assert Note.decode(note.encode().tobytes()) == note


@given(LINK_NOTES, st.integers(0, 5))
def test_only_the_newest_link_counts_and_only_if_it_is_open(notes, ended):
    current, now_ended = current_notes(notes, ended)
    assert now_ended >= ended
    assert all(note.link > now_ended for note in current)
    newest = max((note.link for note in notes if note.link > ended), default=ended)
    left = any(note.kind is NoteKind.LEAVE and note.link == newest for note in notes)
    assert current == ([] if left else [note for note in notes if note.link == newest and newest > ended])
    if left and newest > ended:
        assert now_ended == newest


def test_fingerprints_know_which_way_a_pair_is_told():
    assert fingerprint(b"a", b"b") != fingerprint(b"b", b"a")
    assert fingerprint(b"ab", b"") != fingerprint(b"a", b"b")
