"""The timeline: one lane per worker and family of spans, drawn whole here, zoomed by the page's script. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlbridge.report.markup import Markup, data_block, tag
from rlbridge.report.scale import Scale
from rlbridge.report.units import plain
from rlbridge.sync.stall import Span

FAMILIES = ("work", "stall", "idle", "weights")
MOST_SPANS = 60_000
"""The longest so many spans come into the page; ``trace.json`` has them all."""

_WIDTH, _LEFT, _RIGHT = 1160, 150, 12
_TOP, _ROW, _GAP, _FOOT = 4, 15, 10, 40


@dataclass(frozen=True, slots=True)
class Lane:
    """The spans of one family of one worker, by start.

    Attributes:
        first: whether it is the worker's first lane, which bears its name.
    """

    worker: str
    family: str
    top: float
    first: bool
    spans: Sequence[Span]


def lanes_of(spans: Mapping[str, Sequence[Span]]) -> tuple[list[Lane], int]:
    """Lanes from top to bottom, trainers first, and how many of the shortest spans were left out."""
    longest, left_out = _longest(spans)
    lanes: list[Lane] = []
    top = float(_TOP)
    for worker in sorted(longest, key=lambda name: (not name.startswith("trainer"), name)):
        families: dict[str, list[Span]] = {}
        for span in sorted(longest[worker], key=lambda span: span.start_s):
            families.setdefault(span.name.split("/", 1)[0], []).append(span)
        known = [family for family in FAMILIES if family in families]
        for index, family in enumerate([*known, *sorted(families.keys() - set(FAMILIES))]):
            lanes.append(Lane(worker, family, top, index == 0, families[family]))
            top += _ROW
        top += _GAP
    return lanes, left_out


def _longest(spans: Mapping[str, Sequence[Span]]) -> tuple[Mapping[str, Sequence[Span]], int]:
    durations = sorted((span.duration_s for worker in spans.values() for span in worker), reverse=True)
    if len(durations) <= MOST_SPANS:
        return spans, 0
    least = durations[MOST_SPANS - 1]
    kept = {worker: [span for span in some if span.duration_s >= least] for worker, some in spans.items()}
    return kept, len(durations) - sum(len(some) for some in kept.values())


def merged(spans: Iterable[Span], nearer_than_s: float) -> list[tuple[float, float]]:
    """(start, end) of spans by start; neighbours too near to be told apart become one."""
    found: list[tuple[float, float]] = []
    for span in spans:
        end = span.start_s + span.duration_s
        if found and span.start_s - found[-1][1] < nearer_than_s:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((span.start_s, end))
    return found


def timeline(lanes: Sequence[Lane]) -> Markup:
    """The whole run as a picture, and the spans for zooming into it."""
    end_s = max((span.start_s + span.duration_s for lane in lanes for span in lane.spans), default=1.0) or 1.0
    x = Scale(0.0, end_s, _LEFT, _WIDTH - _RIGHT)
    foot = max((lane.top for lane in lanes), default=_TOP) + _ROW + 6.0
    bars = tag("g", *(rect for lane in lanes for rect in _rects(lane, x)), class_="spans")
    names = [mark for lane in lanes for mark in _names(lane)]
    words = tag("title", "Timeline"), tag("desc", _description(lanes, end_s))
    picture = tag(
        "svg",
        *(*words, *names, tag("g", *_axis(x, foot), class_="time-axis"), bars),
        tag("text", "seconds since the first span", x=(_LEFT + _WIDTH) / 2, y=foot + 32, class_="axis-label"),
        viewBox=f"0 0 {_WIDTH} {foot + _FOOT:g}",
        role="img",
        aria_label="Timeline of all workers",
        tabindex=0,
        class_="chart timeline",
    )
    return tag("div", picture, data_block(_data(lanes, end_s, foot), class_="timeline-data"), class_="timeline-box")


def _description(lanes: Sequence[Lane], end_s: float) -> str:
    workers = ", ".join(dict.fromkeys(lane.worker for lane in lanes))
    return (
        f"What {workers or 'nobody'} did in {end_s:.1f} s: work, stall, idle time and weight transfers, one lane each."
    )


def _rects(lane: Lane, x: Scale) -> Iterable[Markup]:
    second = x(1.0) - x(0.0)
    for start_s, end_s in merged(lane.spans, 0.4 / second):
        width = max(0.6, (end_s - start_s) * second)
        yield tag("rect", x=x(start_s), y=lane.top, width=width, height=_ROW - 3, class_=f"span {lane.family}")


def _names(lane: Lane) -> Iterable[Markup]:
    if lane.first:
        yield tag("text", lane.worker, x=4, y=lane.top + 10, class_="worker")
    yield tag("text", lane.family, x=_LEFT - 8, y=lane.top + 10, class_="tick-y")
    middle = lane.top + (_ROW - 3) / 2
    yield tag("line", x1=_LEFT, y1=middle, x2=_WIDTH - _RIGHT, y2=middle, class_="grid")


def _axis(x: Scale, foot: float) -> Iterable[Markup]:
    yield tag("line", x1=_LEFT, y1=foot, x2=_WIDTH - _RIGHT, y2=foot, class_="axis")
    for value in x.ticks(10):
        yield tag("line", x1=x(value), y1=foot, x2=x(value), y2=foot + 4, class_="axis")
        yield tag("text", plain(value), x=x(value), y=foot + 17, class_="tick-x")


def _data(lanes: Sequence[Lane], end_s: float, foot: float) -> dict[str, Any]:
    """For the script: [start s, duration s, index of name, version] per span, and where the picture has its parts."""
    names = sorted({span.name for lane in lanes for span in lane.spans})
    index = {name: number for number, name in enumerate(names)}
    return {
        "left": _LEFT,
        "right": _WIDTH - _RIGHT,
        "foot": foot,
        "height": _ROW - 3,
        "end": round(end_s, 6),
        "names": names,
        "lanes": [
            {
                "worker": lane.worker,
                "family": lane.family,
                "top": lane.top,
                "spans": [
                    [round(span.start_s, 6), round(span.duration_s, 6), index[span.name], span.version]
                    for span in lane.spans
                ],
            }
            for lane in lanes
        ],
    }
