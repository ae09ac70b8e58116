"""Bytes per link by stage as one SVG file, for light and dark pages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlbridge.planning.links import Load
from rlbridge.planning.outlook import Outlook, PlanOutlook
from rlbridge.report.markup import Markup, tag
from rlbridge.report.scale import Scale
from rlbridge.report.units import seconds, size, times
from rlbridge.sync.plan.tables import STAGES

WIDTH, LEFT, RIGHT = 860, 230, 190
_ROW, _BAR, _PANEL, _HEAD = 26, 16, 34, 74
_MOST_ROWS = 10
"""Links of one plan that are drawn; the busiest."""

_STYLE = Markup("""
text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: #1d2329; }
.title { font-size: 15px; font-weight: 600; } .panel { font-weight: 600; } .muted { fill: #5c6670; }
.label { text-anchor: end; } .ground { fill: #ffffff; } .axis { stroke: #9aa4af; }
.gather { fill: #7a6a00; } .receive { fill: #2a6fb0; } .exchange { fill: #c05a12; } .distribute { fill: #1f8a5b; }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8ec; } .muted { fill: #9aa5b0; } .ground { fill: #14181c; } .axis { stroke: #5c6670; }
.gather { fill: #d4c04a; } .receive { fill: #6db0ee; } .exchange { fill: #f0914a; } .distribute { fill: #5cc38c; }
}
""")


def picture(outlook: Outlook) -> str:
    """A panel for each plan, all on one scale; each bar is a link, or as many equal ones as its label says."""
    most_bytes = max((load.total_bytes for plan in outlook.plans for load in plan.loads), default=0)
    x = Scale(0, max(1, most_bytes), LEFT, WIDTH - RIGHT)
    drawn: list[Markup] = []
    top = float(_HEAD)
    for plan in outlook.plans:
        panel, top = _panel(plan, x, top)
        drawn += panel
    title = f"{outlook.question.model or 'saved layouts'}: bytes per link and stage in one update"
    question = outlook.question
    sides = (
        f"trainer {outlook.trainer.layout} on {outlook.trainer.nodes}, rollout {outlook.rollout.layout} on "
        f"{outlook.rollout.nodes} nodes; {question.link_gbps:g} Gbit/s between nodes, {question.local_gbps:g} within; "
        f"lower bound {seconds(outlook.bound.seconds)}"
    )
    head = [
        tag("title", title),
        tag("desc", f"{sides}. {_words(outlook.plans)}"),
        tag("style", _STYLE),
        tag("rect", width=WIDTH, height=top, class_="ground"),
        tag("text", title, x=16, y=24, class_="title"),
        tag("text", sides, x=16, y=43, class_="muted"),
        *_legend(outlook.plans),
    ]
    frame = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {WIDTH} {top:g}"}
    return tag("svg", *head, *drawn, **frame, width=WIDTH, height=top, role="img", aria_label=title) + "\n"


def _legend(plans: Iterable[PlanOutlook]) -> list[Markup]:
    used = {stage for plan in plans for load in plan.loads for stage in load.bytes_by_stage}
    drawn, left = [], 16
    for stage in (str(stage) for stage in STAGES if stage in used):
        drawn.append(tag("rect", x=left, y=55, width=11, height=11, class_=stage))
        drawn.append(tag("text", stage, x=left + 16, y=65, class_="muted"))
        left += 40 + 7 * len(stage)
    return drawn


def _panel(plan: PlanOutlook, x: Scale, top: float) -> tuple[list[Markup], float]:
    """The bars of one plan, and where the next begins."""
    shown, left_out = plan.loads[:_MOST_ROWS], len(plan.loads[_MOST_ROWS:])
    more = f"; {left_out} less busy not drawn" if left_out else ""
    heading = f"{plan.kind}: {seconds(plan.predicted_s)}, {times(plan.over_bound)} the bound{more}"
    drawn = [tag("text", heading, x=16, y=top + 20, class_="panel")]
    begin = top + _PANEL
    for index, load in enumerate(shown):
        drawn += _row(load, x, begin + index * _ROW)
    end = begin + _ROW * len(shown)
    drawn.append(tag("line", x1=LEFT, y1=begin - 3, x2=LEFT, y2=end - _ROW + _BAR + 3, class_="axis"))
    return drawn, end + 6


def _row(load: Load, x: Scale, top: float) -> list[Markup]:
    drawn = [tag("text", load.label, x=LEFT - 8, y=top + 13, class_="label")]
    reached = 0
    for stage, amount in load.bytes_by_stage.items():
        hint = tag("title", f"{load.label}, {stage}: {size(amount)} ({', '.join(load.nodes)})")
        width = x(reached + amount) - x(reached)
        drawn.append(tag("rect", hint, x=x(reached), y=top, width=width, height=_BAR, class_=stage))
        reached += amount
    end = f"{size(load.total_bytes)}, {seconds(load.seconds)}"
    return [*drawn, tag("text", end, x=x(reached) + 8, y=top + 13)]


def _words(plans: Sequence[PlanOutlook]) -> str:
    """The picture for who cannot see it."""
    return " ".join(
        f"{plan.kind}: {seconds(plan.predicted_s)}"
        + "".join(f", {load.label} {size(load.total_bytes)}" for load in plan.loads[:_MOST_ROWS])
        + "."
        for plan in plans
    )
