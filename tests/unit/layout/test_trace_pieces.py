"""The algebra of strided pieces against brute force: every address, for random strided views of random shapes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.sync.layout.elements import row_major_strides
from rlbridge.sync.layout.trace.pieces import Piece, TooIrregularError, compose, piece, rectangles, without

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def views(draw, shape: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
    """Offset, and counts and strides, of a view of a row-major storage that was first reshaped at will."""
    n = math.prod(shape)
    reshaped = draw(st.sampled_from([(n,), shape, *((d, n // d) for d in range(1, n + 1) if n % d == 0)]))
    offset, dims = 0, []
    for size, stride in zip(reshaped, row_major_strides(reshaped), strict=True):
        low, step = draw(st.integers(0, size - 1)), draw(st.sampled_from([1, 1, 1, 2, 3]))
        offset += low * stride
        dims.append((draw(st.integers(1, -(-(size - low) // step))), step * stride))
    return offset, draw(st.permutations(dims))


def packed(dims, order):
    """Strides that pack the same counts densely, the first of ``order`` innermost."""
    strides, at = {}, 1
    for d in order:
        strides[d] = at
        at *= dims[d][0]
    return [strides[d] for d in range(len(dims))]


@st.composite
def reads_and_writes(draw) -> tuple[tuple[int, ...], Piece, Piece]:
    shape = draw(SHAPES)
    pieces = []
    for reading in (True, False):
        offset, dims = draw(views(shape))
        other = packed(dims, draw(st.permutations(range(len(dims)))))
        both = [(n, o, s) if reading else (n, s, o) for (n, s), o in zip(dims, other, strict=True)]
        base = draw(st.integers(0, 4))
        pieces.append(piece(base, offset, both) if reading else piece(offset, base, both))
    return shape, pieces[0], pieces[1]


def addresses(part: Piece) -> dict[int, int]:
    """Destination to source."""
    found = {}
    for k in itertools.product(*(range(n) for n, _, _ in part.dims)):
        at = part.at + sum(i * there for i, (_, there, _) in zip(k, part.dims, strict=True))
        assert at not in found
        found[at] = part.of + sum(i * here for i, (_, _, here) in zip(k, part.dims, strict=True))
    return found


def union(parts: list[Piece]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        more = addresses(part)
        assert not found.keys() & more.keys()
        found |= more
    return found


@settings(deadline=None, max_examples=300)
@given(reads_and_writes())
def test_a_read_gets_what_was_written(drawn):
    _, read, written = drawn
    inside = addresses(written)
    expected = {at: inside[x] for at, x in addresses(read).items() if x in inside}
    assert union(compose(read, written)) == expected


@settings(deadline=None, max_examples=300)
@given(reads_and_writes())
def test_an_overwritten_piece_keeps_the_rest(drawn):
    _, read, written = drawn
    hole = piece(read.of, 0, [(n, here, 0) for n, _, here in read.dims])
    gone = set(addresses(hole))
    assert union(without(written, hole)) == {at: x for at, x in addresses(written).items() if at not in gone}


@settings(deadline=None, max_examples=300)
@given(reads_and_writes(), st.booleans())
def test_rectangles_of_the_source_are_the_piece(drawn, one_more):
    shape, read, _ = drawn
    shape = (*shape, 1) if one_more else shape
    found = {}
    for area, at, strides in rectangles(read.of, read.at, read.dims, shape):
        for k in itertools.product(*(range(n) for n in area.count)):
            index = [s + i * step for s, i, step in zip(area.start, k, area.step, strict=True)]
            assert all(i < n for i, n in zip(index, shape, strict=True))
            destination = at + sum(i * stride for i, stride in zip(k, strides, strict=True))
            assert destination not in found
            found[destination] = sum(i * s for i, s in zip(index, row_major_strides(shape), strict=True))
    assert found == addresses(read)


def test_regular_layouts_need_no_cut():
    heads = piece(0, 0, [(8, 64, 128), (4, 16, 32), (16, 1, 1)])
    assert len(compose(piece(0, 0, [(512, 1, 1)]), heads)) == 1
    assert len(without(heads, piece(0, 0, [(2, 256, 0), (16, 1, 0)]))) == 1


def test_what_would_fall_apart_is_refused():
    steps = piece(0, 0, [(1 << 20, 1, 1013)])
    with pytest.raises(TooIrregularError):
        list(rectangles(steps.of, steps.at, steps.dims, (1 << 20, 1009)))
