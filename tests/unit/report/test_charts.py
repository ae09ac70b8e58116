"""Charts are well-formed, described, inside their frame, and true to their numbers."""

from __future__ import annotations

import json
import re
from xml.etree import ElementTree

import pytest
from example_runs import SPANS, UPDATES
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.report import timeline as timeline_module
from rlbridge.report.charts import (
    WIDTH,
    Axes,
    Bar,
    Segment,
    Series,
    bar_chart,
    histogram,
    line_chart,
    running_mean,
    thinned,
)
from rlbridge.report.markup import Markup
from rlbridge.report.timeline import lanes_of, merged, timeline
from rlbridge.report.units import Unit, seconds
from rlbridge.sync.stall import Span

POINTS = st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 1e6)), max_size=40).map(
    lambda points: sorted(dict(points).items())
)


def parsed(chart: Markup) -> ElementTree.Element:
    """The picture as XML; checks what every picture must have."""
    root = ElementTree.fromstring(chart)
    picture = root if root.tag == "svg" else root.find("svg")
    assert picture is not None
    assert picture.get("role") == "img"
    assert picture[0].tag == "title"
    assert picture[1].tag == "desc"
    assert picture[0].text
    assert picture[1].text
    assert "nan" not in chart.lower().replace("nanosecond", "")
    return picture


def texts(picture: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in picture.iter("text")]


@given(POINTS, POINTS, st.booleans())
def test_lines_stay_inside_their_frame(one: list[tuple[int, float]], two: list[tuple[int, float]], log: bool) -> None:
    series = [Series("one", one, "a"), Series("two", two, "b", dots=True)]
    chart = parsed(line_chart("t", "d", series, Axes("step", "value", log=log)))
    for path in chart.iter("path"):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.get("d", ""))]
        assert all(0 <= number <= WIDTH for number in numbers)
    for dot in chart.iter("circle"):
        assert 0 <= float(dot.get("cx", "")) <= WIDTH
    hover = json.loads(chart.get("data-hover", ""))
    assert len(hover) == len(one) + len(two)


def test_hovering_tells_each_point_in_the_axis_unit_or_as_told() -> None:
    series = [Series("trainer", [(1, 0.0025), (2, 0.005)], "a"), Series("raw", [(1, 0.001)], "a", faint=True)]
    axes = Axes("version", "stall", Unit(1e-3, "ms"))
    hover = json.loads(parsed(line_chart("t", "d", series, axes)).get("data-hover", ""))
    assert [text for _, _, text in hover] == ["version 1: trainer 2.500 ms", "version 2: trainer 5.000 ms"]
    chart = line_chart("t", "d", series[:1], Axes("version", "s", log=True, tick=seconds, show=seconds))
    assert json.loads(parsed(chart).get("data-hover", ""))[0][2] == "version 1: trainer 2.50 ms"
    assert "10.0 ms" in texts(parsed(chart))


def test_bars_are_as_long_as_their_values() -> None:
    bars = [Bar("trainer", [Segment("copy", 0.002, "a"), Segment("waiting", 0.006, "b")]), Bar("rollout", [])]
    chart = parsed(bar_chart("t", "d", bars, seconds))
    widths = [float(rect.get("width", "")) for rect in chart.iter("rect")]
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
    assert [rect[0].text for rect in chart.iter("rect")] == ["trainer, copy: 2.00 ms", "trainer, waiting: 6.00 ms"]
    assert texts(chart) == ["trainer", "8.00 ms", "rollout", "0 s"]


def test_a_long_label_leaves_room_for_its_bar() -> None:
    chart = parsed(bar_chart("t", "d", [Bar("x" * 250 + ", trainer", [Segment("copy", 1.0, "a")])], seconds))
    label, value = texts(chart)
    assert (label[0], label[-9:], value) == ("…", ", trainer", "1.00 s")
    assert [float(rect.get("width", "")) > 150 for rect in chart.iter("rect")] == [True]


def test_a_histogram_shows_shares_and_what_lies_beyond_the_bound() -> None:
    chart = parsed(histogram("t", "d", {0: 10, 2: 25, 5: 15}, 4, "staleness"))
    bars = [(rect.get("class"), rect[0].text) for rect in chart.iter("rect")]
    assert [name for name, _ in bars] == ["bar staleness"] * 5 + ["bar beyond"]
    assert bars[2][1] == "staleness 2: 25 trajectories, 50.0 %"
    heights = [float(rect.get("height", "")) for rect in chart.iter("rect")]
    assert heights[0] == pytest.approx(0.4 * heights[2], rel=0.01)
    assert "bound 4" in texts(chart)
    assert "bound 4" not in texts(parsed(histogram("t", "d", {0: 1}, None, "staleness")))


def test_a_long_line_is_thinned_without_losing_a_peak() -> None:
    points = [(float(step), 1000.0 if step == 7777 else float(step % 3)) for step in range(20_000)]
    kept = thinned(points, 1000)
    assert 500 <= len(kept) <= 1002
    assert (7777.0, 1000.0) in kept
    assert list(kept) == sorted(kept)
    assert thinned(points[:9], 1000) == points[:9]


def test_a_running_mean_looks_back_only() -> None:
    assert running_mean([(0, 4.0), (1, 2.0), (2, 0.0), (3, 1.0)], 2) == [(0, 4), (1, 3), (2, 1), (3, 0.5)]


def test_the_timeline_has_a_lane_per_worker_and_family_and_all_spans_for_zooming() -> None:
    lanes, left_out = lanes_of(SPANS)
    assert left_out == 0
    assert [(lane.worker, lane.family) for lane in lanes] == [
        *(("trainer-0", family) for family in ("work", "stall", "idle", "weights")),
        *(("rollout-0", family) for family in ("work", "stall", "weights")),
    ]
    tops = [lane.top for lane in lanes]
    assert tops == sorted(set(tops))
    box = timeline(lanes)
    picture = parsed(box)
    classes = {rect.get("class") for rect in picture.iter("rect")}
    assert classes == {"span work", "span stall", "span idle", "span weights"}
    block = ElementTree.fromstring(box).find("script")
    assert block is not None
    data = json.loads(block.text or "")
    assert sum(len(lane["spans"]) for lane in data["lanes"]) == sum(len(spans) for spans in SPANS.values())
    work = data["lanes"][0]["spans"]
    assert len(work) == UPDATES + 1
    assert data["names"][work[3][2]] == "work/trainer/step"
    assert work[3][3] == 3


def test_a_huge_trace_keeps_its_longest_spans_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "MOST_SPANS", 10)
    spans = {"rollout-0": [Span("work/x", float(index), 0.001 * index) for index in range(25)]}
    lanes, left_out = lanes_of(spans)
    assert left_out == 15
    assert min(span.duration_s for span in lanes[0].spans) == pytest.approx(0.015)


def test_an_empty_timeline_and_spans_too_near_to_tell_apart() -> None:
    assert parsed(timeline(lanes_of({})[0])).findall("rect") == []
    spans = [Span("a", 0.0, 1.0), Span("a", 1.05, 0.5), Span("a", 0.2, 2.0), Span("a", 3.0, 1.0)]
    assert merged(spans, 0.1) == [(0.0, 2.2), (3.0, 4.0)]
