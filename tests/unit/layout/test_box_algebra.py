"""Box algebra against plain sets of elements."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.sync.layout.algebra import Region, contains, intersect, partition, region, restrict, size, split, subtract
from rlbridge.sync.layout.source_map import Box
from rlbridge.transport.errors import LayoutError

exact = settings(deadline=None, max_examples=60)
axis = st.tuples(st.integers(0, 8), st.integers(1, 6), st.integers(1, 4))


def as_region(axes) -> Region:
    start, count, step = zip(*axes, strict=True) if axes else ((), (), ())
    return Region(start, count, tuple(s if n > 1 else 1 for n, s in zip(count, step, strict=True)))


def elements(area: Region) -> list[tuple[int, ...]]:
    ranges = (range(a, a + n * s, s) for a, n, s in zip(area.start, area.count, area.step, strict=True))
    return list(itertools.product(*ranges))


def regions(dims: int):
    return st.lists(axis, min_size=dims, max_size=dims).map(as_region)


@exact
@given(st.integers(0, 3).flatmap(lambda n: st.tuples(regions(n), regions(n))))
def test_intersection_and_difference_are_those_of_the_sets(pair):
    a, b = pair
    common = intersect(a, b)
    assert set(elements(a)) & set(elements(b)) == (set(elements(common)) if common else set())
    assert common == intersect(b, a)
    rest = [e for part in subtract(a, b) for e in elements(part)]
    assert sorted(rest) == sorted(set(elements(a)) - set(elements(b)))
    assert contains(a, b) == set(elements(b)).issubset(elements(a))


@exact
@given(st.integers(0, 3).flatmap(regions), st.integers(1, 30))
def test_splitting_keeps_the_row_major_order(area, largest):
    parts = split(area, largest)
    assert [e for part in parts for e in elements(part)] == elements(area)
    assert all(size(part) <= largest for part in parts)


def unstepped(dims: int):
    """Regions without steps, which have a fast path of their own."""
    return regions(dims).map(lambda area: Region(area.start, area.count, (1,) * dims))


@exact
@given(
    st.integers(1, 2).flatmap(lambda n: st.lists(regions(n), min_size=1, max_size=4))
    | st.integers(0, 3).flatmap(lambda n: st.lists(unstepped(n), min_size=1, max_size=6))
)
def test_cells_are_disjoint_and_inside_or_outside_of_every_region(areas):
    cells = partition(areas)
    everything = [e for cell, _ in cells for e in elements(cell)]
    assert sorted(everything) == sorted({e for area in areas for e in elements(area)})
    for cell, members in cells:
        for i, area in enumerate(areas):
            inside = set(elements(cell)) & set(elements(area))
            assert inside == (set(elements(cell)) if i in members else set())


@exact
@given(st.integers(0, 3).flatmap(lambda n: st.tuples(regions(n), regions(n))), st.integers(0, 9))
def test_a_restricted_box_puts_the_same_elements_in_the_same_places(pair, offset):
    outer, inner = pair
    strides = tuple(7**d if n > 1 else 0 for d, n in enumerate(outer.count))
    box = Box("p", "w", outer.start, outer.count, outer.step, offset, strides)

    def places(of: Box) -> dict[tuple[int, ...], int]:
        ks = itertools.product(*map(range, of.count))
        steps = [of.offset + sum(k * s for k, s in zip(ks_, of.strides, strict=True)) for ks_ in ks]
        return dict(zip(elements(region(of)), steps, strict=True))

    common = intersect(outer, inner)
    if common is not None:
        cut = restrict(box, common)
        assert region(cut) == common
        assert places(cut) == {e: places(box)[e] for e in elements(common)}
    if common != inner:
        with pytest.raises(LayoutError, match="'p'"):
            restrict(box, inner)


def test_a_grid_is_cut_into_its_crossings():
    rows = [Region((i, 0), (1, 64), (1, 1)) for i in range(64)]
    columns = [Region((0, 8 * i), (64, 8), (1, 1)) for i in range(8)]
    cells = partition([*rows, *columns])
    assert len(cells) == 64 * 8
    assert all(members == {cell.start[0], 64 + cell.start[1] // 8} for cell, members in cells)
    blocks = [Region((i, j), (1, 1), (1, 1)) for i in range(200) for j in range(40)]
    assert [cell for cell, _ in partition(blocks)] == blocks


def test_splitting_into_nothing_is_refused():
    with pytest.raises(LayoutError, match="0 elements"):
        split(Region((0,), (4,), (1,)), 0)
