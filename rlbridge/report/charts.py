"""Charts as inline SVG: pure functions from numbers to ``Markup``.

Every picture has a title and a description for who cannot see it. Points of a line chart carry their readable values in
``data-hover``, so that the page's script shows them without knowing what they mean; bars carry theirs in ``<title>``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rlbridge.report.markup import Markup, joined, tag
from rlbridge.report.scale import Scale, linear, logarithmic, tight
from rlbridge.report.units import PLAIN, Unit, percent, plain, significant

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 240
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 42
MOST_POINTS = 1200
"""A line keeps at most about so many points: more than it has pixels."""


MOST_LETTERS = 34
"""Longer labels of bars lose their beginning."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line, or dots.

    Attributes:
        label: for the legend and for hovering.
        points: (x, y) by rising x.
        style: CSS class that gives the colour.
        dots: draw points instead of a line.
        faint: drawn thin, without hovering: what a mean was taken of.
    """

    label: str
    points: Sequence[Point]
    style: str
    dots: bool = False
    faint: bool = False


@dataclass(frozen=True, slots=True)
class Axes:
    """What a line chart's axes say.

    Attributes:
        x: label of the horizontal axis.
        y: label of the vertical axis; the unit's name is added.
        unit: the unit that y values are shown in.
        log: a logarithmic vertical axis.
        from_zero: the vertical axis includes 0.
        tick: writes a value of the vertical axis.
        show: writes a point's own value for hovering; by default a number with the unit.
    """

    x: str
    y: str
    unit: Unit = PLAIN
    log: bool = False
    from_zero: bool = True
    tick: Callable[[float], str] = plain
    show: Callable[[float], str] | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a bar: what, how much, which CSS class."""

    label: str
    value: float
    style: str


@dataclass(frozen=True, slots=True)
class Bar:
    """A horizontal bar of segments."""

    label: str
    segments: Sequence[Segment] = field(default_factory=tuple)

    @property
    def total(self) -> float:
        """All segments together."""
        return sum(segment.value for segment in self.segments)


def figure(title: str, chart: Markup, legend: Iterable[tuple[str, str]] = (), note: str | None = None) -> Markup:
    """A chart with its heading, a legend of (label, style), and a remark below."""
    keys = [tag("li", tag("span", class_=f"swatch {style}"), label) for label, style in legend]
    head = tag("figcaption", tag("h3", title), tag("ul", *keys, class_="legend") if keys else None)
    return tag("figure", head, chart, tag("p", note, class_="note") if note else None)


def line_chart(title: str, description: str, series: Sequence[Series], axes: Axes) -> Markup:
    """Lines over one horizontal axis of steps or versions."""
    shown = [replace(one, points=thinned(one.points, MOST_POINTS)) for one in series if one.points]
    xs = [x for one in shown for x, _ in one.points]
    ys = [y / axes.unit.size for one in shown for _, y in one.points]
    x = tight(xs, LEFT, WIDTH - RIGHT, whole=True)
    bottom = HEIGHT - BOTTOM
    y = logarithmic(ys, bottom, TOP) if axes.log else linear(ys, bottom, TOP, from_zero=axes.from_zero)
    drawn = [_drawn(one, x, y, axes) for one in shown]
    unit = f" ({axes.unit.name})" if axes.unit.name else ""
    frame = [*_horizontal_axis(x, axes.x), *_vertical_axis(y, f"{axes.y}{unit}", axes.tick)]
    hover = json.dumps(_hover(shown, x, y, axes))
    return _picture(title, description, HEIGHT, [*frame, *drawn], data_hover=hover, class_="chart lines")


def _drawn(one: Series, x: Scale, y: Scale, axes: Axes) -> Markup:
    at = [(x(px), y(_within(py / axes.unit.size, y))) for px, py in one.points]
    if one.dots or len(at) == 1:
        return joined(tag("circle", cx=cx, cy=cy, r=3.5, class_=f"dot {one.style}") for cx, cy in at)
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in at)
    return tag("path", d=path, class_=f"line {one.style}{' faint' if one.faint else ''}")


def _within(value: float, y: Scale) -> float:
    """A logarithmic axis has no zero: such a value sits on its foot."""
    return max(value, y.low) if y.log else value


def _hover(shown: Sequence[Series], x: Scale, y: Scale, axes: Axes) -> list[tuple[float, float, str]]:
    found = []
    for one in shown:
        for px, py in [] if one.faint else one.points:
            value = py / axes.unit.size
            text = axes.show(py) if axes.show else f"{significant(value, 4)} {axes.unit.name}".rstrip()
            found.append((round(x(px), 1), round(y(_within(value, y)), 1), f"{axes.x} {px:g}: {one.label} {text}"))
    return found


def bar_chart(title: str, description: str, bars: Sequence[Bar], show: Callable[[float], str]) -> Markup:
    """Horizontal stacked bars, each with its total at its end; ``show`` writes a value with its unit."""
    row, end = 34, WIDTH - 92
    shown = [_tail(bar.label) for bar in bars]
    label_width = 20 + 7 * max(map(len, shown), default=0)  # a letter has at most about 7 pixels
    x = linear([bar.total for bar in bars], label_width, end, from_zero=True)
    drawn: list[Markup] = []
    for index, bar in enumerate(bars):
        top, reached = 8 + index * row, 0.0
        drawn.append(tag("text", shown[index], x=label_width - 10, y=top + 15.0, class_="bar-label"))
        for segment in bar.segments:
            left, right = x(reached), x(reached + segment.value)
            reached += segment.value
            hint = tag("title", f"{bar.label}, {segment.label}: {show(segment.value)}")
            drawn.append(
                tag("rect", hint, x=left, y=top, width=max(0.0, right - left), height=20, class_=f"bar {segment.style}")
            )
        drawn.append(tag("text", show(bar.total), x=x(reached) + 8, y=top + 15.0, class_="bar-value"))
    foot = 8 + len(bars) * row
    drawn.insert(0, tag("line", x1=label_width, y1=2, x2=label_width, y2=foot - 4.0, class_="axis"))
    return _picture(title, description, foot, drawn, class_="chart bars")


def _tail(label: str) -> str:
    """The end of a label that is too long for the room beside a bar: names of runs differ there."""
    return label if len(label) <= MOST_LETTERS else f"…{label[1 - MOST_LETTERS :]}"


def histogram(title: str, description: str, counts: dict[int, int], bound: int | None, label: str) -> Markup:
    """How often each whole number occurred, from 0 to the bound, with the bound drawn in."""
    last = max([*counts, bound or 0, 1])
    total, bottom = sum(counts.values()), HEIGHT - BOTTOM
    x = Scale(-0.5, last + (1.0 if bound is not None else 0.5), LEFT, WIDTH - RIGHT)
    y = linear([count / max(1, total) * 100 for count in counts.values()], bottom, TOP + 16, from_zero=True)
    width = min(64.0, 0.7 * (x(1) - x(0)))
    drawn = _vertical_axis(y, "share of trajectories (%)")
    for value in range(last + 1):
        share, middle = counts.get(value, 0) / max(1, total), x(value)
        top = y(100 * share)
        hint = tag("title", f"{label} {value}: {counts.get(value, 0):,} trajectories, {percent(share)}")
        style = "bar beyond" if bound is not None and value > bound else "bar staleness"
        drawn.append(tag("rect", hint, x=middle - width / 2, y=top, width=width, height=bottom - top, class_=style))
        if counts.get(value) and x(1) - x(0) > 46:  # else hovering tells it: beside its neighbours it has no room
            drawn.append(tag("text", percent(share), x=middle, y=top - 5, class_="bar-top"))
    stride = max(1, -(-(last + 1) // 16))
    drawn += [
        tag("text", str(value), x=x(value), y=bottom + 16.0, class_="tick-x") for value in range(0, last + 1, stride)
    ]
    drawn.append(tag("text", label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6.0, class_="axis-label"))
    if bound is not None:
        at = x(bound + 0.5)
        drawn.append(tag("line", x1=at, y1=TOP, x2=at, y2=bottom, class_="bound"))
        drawn.append(tag("text", f"bound {bound}", x=at, y=TOP - 2.0, class_="bound-label"))
    return _picture(title, description, HEIGHT, drawn, class_="chart histogram")


def thinned(points: Sequence[Point], most: int) -> Sequence[Point]:
    """At most about ``most`` points: of each group of neighbours the lowest and the highest, so no peak is lost."""
    if len(points) <= most:
        return points
    group = -(-2 * len(points) // most)
    kept: list[Point] = []
    for start in range(0, len(points), group):
        some = points[start : start + group]
        ends = {min(some, key=lambda point: point[1]), max(some, key=lambda point: point[1])}
        kept.extend(sorted(ends))
    return kept


def running_mean(points: Sequence[Point], over: int) -> list[Point]:
    """Each point's mean with the up to ``over - 1`` points before it."""
    means = []
    for index, (x, _) in enumerate(points):
        some = points[max(0, index + 1 - over) : index + 1]
        means.append((x, sum(y for _, y in some) / len(some)))
    return means


def _picture(title: str, description: str, height: float, inside: Iterable[Markup], **attributes: str) -> Markup:
    words = tag("title", title), tag("desc", description)
    return tag("svg", *words, *inside, viewBox=f"0 0 {WIDTH} {height}", role="img", aria_label=title, **attributes)


def _vertical_axis(y: Scale, label: str, tick: Callable[[float], str] = plain) -> list[Markup]:
    drawn = []
    for value in y.ticks():
        at = y(value)
        drawn.append(tag("line", x1=LEFT, y1=at, x2=WIDTH - RIGHT, y2=at, class_="grid"))
        drawn.append(tag("text", tick(value), x=LEFT - 7, y=at + 4.0, class_="tick-y"))
    middle = (y.start + y.end) / 2
    drawn.append(tag("text", label, x=10, y=middle, transform=f"rotate(-90 10 {middle:g})", class_="axis-label"))
    return drawn


def _horizontal_axis(x: Scale, label: str) -> list[Markup]:
    bottom = HEIGHT - BOTTOM
    drawn = [tag("line", x1=LEFT, y1=bottom, x2=WIDTH - RIGHT, y2=bottom, class_="axis")]
    for value in x.ticks(8):
        drawn.append(tag("line", x1=x(value), y1=bottom, x2=x(value), y2=bottom + 4, class_="axis"))
        drawn.append(tag("text", plain(value), x=x(value), y=bottom + 17.0, class_="tick-x"))
    drawn.append(tag("text", label, x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6.0, class_="axis-label"))
    return drawn
