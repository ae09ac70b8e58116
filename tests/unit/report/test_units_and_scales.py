"""How numbers and axes read."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.report import units
from rlbridge.report.scale import linear, logarithmic, tight

FINITE = st.floats(-1e12, 1e12).map(lambda value: round(value, 9))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.seconds(0.00427), "4.27 ms"),
        (units.seconds(0.000107), "107 µs"),
        (units.seconds(0.0099999999), "10.0 ms"),
        (units.seconds(155.04), "155 s"),
        (units.seconds(12345.6), "12,346 s"),
        (units.seconds(3e-9), "0.00300 µs"),
        (units.seconds(0), "0 s"),
        (units.seconds(None), "\N{EN DASH}"),
        (units.tick_seconds(1e-4), "100 µs"),
        (units.tick_seconds(10.0), "10 s"),
        (units.size(1_072_128), "1.07 MB"),
        (units.size(0), "0 B"),
        (units.size(17), "17 B"),
        (units.size(2.5e12), "2.50 TB"),
        (units.size(None), "\N{EN DASH}"),
        (units.count(66560), "66,560"),
        (units.number(0.96875), "0.969"),
        (units.times(721.2), "721 ×"),  # noqa: RUF001
        (units.times(1.3), "1.30 ×"),  # noqa: RUF001
        (units.percent(0.0072), "0.7 %"),
        (units.plain(1200.0), "1,200"),
    ],
)
def test_numbers_read_as_people_write_them(text: str, expected: str) -> None:
    assert text == expected


@given(st.lists(FINITE, min_size=1), st.booleans(), st.booleans())
def test_a_linear_axis_holds_its_values_and_has_few_round_ticks(values: list[float], zero: bool, whole: bool) -> None:
    scale = linear(values, 200, 10, from_zero=zero, whole=whole)
    slack = 1e-6 * (scale.high - scale.low)
    assert all(scale.low - slack <= value <= scale.high + slack for value in values)
    assert all(10 - 1 <= scale(value) <= 200 + 1 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 8
    assert ticks == sorted(set(ticks))
    assert not zero or scale.low <= 0 <= scale.high or min(values) > 0
    assert not whole or all(tick == round(tick) for tick in ticks)


@given(st.lists(st.floats(1e-9, 1e9), min_size=1))
def test_a_logarithmic_axis_has_whole_decades(values: list[float]) -> None:
    scale = logarithmic([*values, 0.0], 200, 10)
    assert all(10 - 1e-6 <= scale(value) <= 200 + 1e-6 for value in values)
    ticks = scale.ticks()
    assert 2 <= len(ticks) <= 7
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in ticks)


def test_axes_without_data_or_with_one_value_still_draw() -> None:
    assert linear([], 200, 10).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert linear([math.nan, 5.0], 200, 10).low < 5 < linear([5.0], 200, 10).high
    assert logarithmic([0.0], 200, 10).ticks() == [1, 10]
    assert tight([3], 0, 100, whole=True)(3) == 0
    assert tight([0, 130], 0, 100, whole=True).ticks(8) == [0, 20, 40, 60, 80, 100, 120]
