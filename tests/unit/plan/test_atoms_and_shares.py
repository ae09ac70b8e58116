"""Atoms as columns give back what was put in; work is shared as the programme says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.sync.layout.algebra import Region, size
from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.plan import sharing
from rlbridge.sync.plan.atoms import AtomBlock, AtomClass, AtomTable, row_major_range
from rlbridge.sync.plan.sharing import Choice, share

counts = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def elements(area: Region) -> list[tuple[int, ...]]:
    axes = [[a + k * s for k in range(n)] for a, n, s in zip(area.start, area.count, area.step, strict=True)]
    return [tuple(int(x) for x in row) for row in np.array(np.meshgrid(*axes, indexing="ij")).reshape(len(axes), -1).T]


@given(counts, st.data())
def test_a_range_of_a_region_is_its_elements_in_order(count, data):
    area = Region((1,) * len(count), count, tuple(3 if n > 1 else 1 for n in count))
    begin = data.draw(st.integers(0, size(area)))
    end = data.draw(st.integers(begin, size(area)))
    parts = row_major_range(area, begin, end)
    assert sum(map(size, parts)) == end - begin
    if count:
        assert [e for part in parts for e in elements(part)] == elements(area)[begin:end]
    assert len(parts) <= max(1, 2 * len(count) - 1)


@st.composite
def tables(draw) -> AtomTable:
    content = []
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(["float32", "bfloat16", "int8"]), min_size=1, max_size=4))):
        blocks = []
        for b in range(draw(st.integers(1, 2))):
            areas = tuple(
                Region((0, 0), (n, 3), (1, 1)) for n in draw(st.lists(st.integers(2, 6), min_size=1, max_size=3))
            )
            names = tuple(f"w{i}.{b}.{t}" for t in range(draw(st.integers(1, 3))))
            blocks.append(AtomBlock(names, dtype, areas))
        content.append((AtomClass(item_bytes(dtype), (f"t{i}",), ("r",)), blocks))
    return AtomTable.of(content)


@given(tables(), st.sampled_from([1, 4, 12, 30, 1000]), st.data())
def test_cuts_leave_whole_elements_rows_or_atoms(table, grain_bytes, data):
    end = int(table.class_begin[-1])
    units = table.units(grain_bytes)
    whole = list(table.parts(0, end))
    assert len(whole) == table.atoms
    assert sum(part.size_bytes for part in whole) == end
    position = data.draw(st.integers(0, end))
    for nearest in (False, True):
        cut = int(table.snapped(np.array([position]), units, nearest=nearest)[0])
        assert abs(cut - position) < max(4, grain_bytes)
        assert nearest or cut <= position
        both = [*table.parts(0, cut), *table.parts(cut, end)]
        assert sum(part.size_bytes for part in both) == end
        if grain_bytes >= 12:
            assert all(part.area.count[1] == 3 for part in both), "rows stay whole"
        if grain_bytes == 1000:
            assert both == whole


def test_wide_elements_come_first_so_that_payloads_are_aligned():
    blocks = [
        AtomBlock(("a",), "int8", (Region((0,), (3,), (1,)),)),
        AtomBlock(("b",), "float32", (Region((0,), (3,), (1,)),)),
    ]
    table = AtomTable.of([(AtomClass(1, ("t",), ("r",)), blocks[:1]), (AtomClass(4, ("t",), ("r",)), blocks[1:])])
    assert [part.tensor for part in table.parts(0, 15)] == ["b", "a"]


def test_work_goes_where_the_links_are_fast_and_where_there_is_no_choice():
    one_way = Choice(100, ((("a", 1.0),),))
    either = Choice(300, ((("a", 1.0),), (("b", 1.0),)))
    shares = share([one_way, either], {}, {"a": 1.0, "b": 3.0})
    assert shares.fractions[0] == (1.0,)
    assert shares.fractions[1] == (0.0, 1.0)
    assert shares.load_s == pytest.approx({"a": 100.0, "b": 100.0})
    assert shares.exact


def test_links_that_no_choice_connects_are_even_each_for_itself():
    busy = Choice(1000, ((("a", 1.0),), (("b", 1.0),)))
    quiet = Choice(10, ((("c", 1.0),), (("d", 1.0),)))
    shares = share([busy, quiet], {}, dict.fromkeys("abcd", 1.0))
    assert shares.load_s == pytest.approx({"a": 500.0, "b": 500.0, "c": 5.0, "d": 5.0}, rel=1e-5)


def test_too_large_programmes_fill_up_the_least_loaded_link(monkeypatch):
    monkeypatch.setattr(sharing, "_PROGRAMME_OPTIONS_MAX", 1)
    choices = [Choice(100, ((("a", 1.0),), (("b", 1.0),))), Choice(100, ((("a", 1.0),), (("b", 1.0),), (("c", 1.0),)))]
    shares = share(choices, {}, dict.fromkeys("abc", 1.0))
    assert not shares.exact
    assert shares.busiest_s <= 1.1 * 200 / 3
