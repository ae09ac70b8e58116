"""The sections of one run. Each takes a run and gives its heading, charts and tables; pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from rlbridge.report import units
from rlbridge.report.charts import (
    Axes,
    Bar,
    Segment,
    Series,
    bar_chart,
    figure,
    histogram,
    line_chart,
    running_mean,
)
from rlbridge.report.markup import Child, Markup, joined, tag
from rlbridge.report.run import RunData
from rlbridge.report.stalls import CAUSES, SIDES, Stalls, stalls_of
from rlbridge.report.timeline import FAMILIES, lanes_of, timeline

MEAN_OVER = 10
"""Steps of the running mean; the target accuracy is judged over as many."""

CAUSE_LEGEND = list(zip(CAUSES, ("copy", "transfer", "waiting"), strict=True))
"""(cause, CSS class) in the order of a stall bar."""


def sections_of(run: RunData) -> Markup:
    """All sections of a run, in reading order."""
    stalls = stalls_of(run.spans, run.summary["updates"] or 0)
    return joined(
        [_learning(run), _stall(run, stalls), _idle(run), _staleness(run), _weights(run), _timeline(run), _config(run)]
    )


def section(title: str, *content: Child) -> Markup:
    """A heading and what belongs below it."""
    return tag("section", tag("h2", title), *content)


def charts(*figures: Child) -> Markup:
    """Charts side by side where there is room."""
    return tag("div", *figures, class_="charts")


def table(head: Sequence[str], rows: Iterable[Sequence[Child]]) -> Markup:
    """A table whose first column names its rows."""
    top = tag("tr", *(tag("th", name, scope="col") for name in head))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    whole = tag("table", tag("thead", top), tag("tbody", *body))
    return tag("div", whole, class_="table")


def nothing(what: str) -> Markup:
    """In the place of a chart that has no data."""
    return tag("p", f"Not recorded: {what}.", class_="nothing")


def _learning(run: RunData) -> Markup:
    return section("Learning", charts(_curve(run, "reward"), _curve(run, "accuracy")))


def _curve(run: RunData, name: str) -> Markup:
    sampled, held_out = run.series("rollout", name), run.series("eval", name)
    if not sampled and not held_out:
        return nothing(f"{name} by step")
    mean = f"mean of {MEAN_OVER} steps"
    lines = [
        Series("one step", sampled, name, faint=True),
        Series(mean, running_mean(sampled, MEAN_OVER), name),
        Series("held out", held_out, "held-out", dots=True),
    ]
    legend = [(f"training batches, thick: {mean}", name)] + ([("held-out set, greedy", "held-out")] if held_out else [])
    words = f"{name} of the training batches by step, and of the held-out set before and after."
    return figure(name.capitalize(), line_chart(f"{name} by step", words, lines, Axes("step", name)), legend)


def _stall(run: RunData, stalls: Stalls) -> Markup:
    by_side = {side: _stall_series(run, stalls, side) for side in SIDES}
    return section(
        "Stall: blocked by weight delivery",
        charts(_stall_by_cause(run, stalls), _stall_by_update(by_side)),
    )


def _stall_by_cause(run: RunData, stalls: Stalls) -> Markup:
    if not run.spans:
        return nothing("stall by cause, which is read off trace.json")
    bars = [Bar(side, stall_segments(stalls, side)) for side in SIDES]
    words = "Seconds per update that one worker stood still, by side and cause."
    chart = bar_chart("Stall per update by side and cause", words, bars, units.seconds)
    note = (
        "Mean of one worker per update. Copy: the snapshot, the apply, or the load. Transfer: the worker's own part of "
        "it. Waiting: for peers, a free slot, or the bridge's thread."
    )
    return figure("Per update, by side and cause", joined([chart, _stall_table(run, stalls)]), CAUSE_LEGEND, note)


def stall_segments(stalls: Stalls, side: str) -> list[Segment]:
    """The bar of one side."""
    return [Segment(cause, stalls.by_cause[side][cause], style) for cause, style in CAUSE_LEGEND]


def _stall_series(run: RunData, stalls: Stalls, side: str) -> list[tuple[float, float]]:
    if run.spans:
        return [(float(version), value) for version, value in stalls.by_version[side].items()]
    return run.series("stall", f"{side}_s")


def _stall_by_update(by_side: dict[str, list[tuple[float, float]]]) -> Markup:
    values = [value for points in by_side.values() for _, value in points]
    if not values:
        return nothing("stall by version")
    lines = [Series(side, points, side) for side, points in by_side.items()]
    axes = Axes("version", "stall of one worker", units.seconds_unit(max(values)))
    chart = line_chart("Stall by version", "Mean stall of one worker of each side, for each update.", lines, axes)
    return figure("Of each update, by side", chart, [(side, side) for side in by_side])


def _stall_table(run: RunData, stalls: Stalls) -> Markup:
    """Causes in rows, sides in columns."""
    rows = [[cause, *(_with_share(stalls, side, cause) for side in SIDES)] for cause in CAUSES]
    rows.append(["all", *(units.seconds(stalls.per_update_s(side)) for side in SIDES)])
    rows.append(
        ["worst update", *(units.seconds(max(stalls.by_version[side].values(), default=None)) for side in SIDES)]
    )
    wall, updates = run.summary["wall_s"], run.summary["updates"]
    if wall and updates:
        shares = (units.percent(stalls.per_update_s(side) * updates / wall) for side in SIDES)
        rows.append(["of the run's time", *shares])
    return table(["stall per update", *SIDES], rows)


def _with_share(stalls: Stalls, side: str, cause: str) -> str:
    value, whole = stalls.by_cause[side][cause], stalls.per_update_s(side)
    return f"{units.seconds(value)} ({units.percent(value / whole)})" if whole else units.seconds(value)


def _staleness(run: RunData) -> Markup:
    bound = run.summary.get("max_staleness")
    seen = run.summary.get("staleness_seen") or {}
    return section("Staleness: how old trained tokens were", charts(_histogram(seen, bound), _lag(run)))


def _histogram(seen: dict[str, int], bound: int | None) -> Markup:
    if not seen:
        return nothing("staleness of each trajectory, which summary.json counts")
    counts = {int(age): count for age, count in seen.items()}
    words = "Share of trained trajectories by staleness in versions, and the bound."
    label = "staleness (versions behind the trainer)"
    return figure("Trajectories by staleness", histogram("Staleness", words, counts, bound, label))


def _lag(run: RunData) -> Markup:
    lag, oldest, mean = (
        run.series("weights", "publish_lag"),
        run.series("staleness", "max"),
        run.series("staleness", "mean"),
    )
    if not lag and not oldest:
        return nothing("publish lag and staleness by step")
    lines = [Series("publish lag", lag, "lag"), Series("staleness, mean", mean, "staleness")]
    words = "By step: versions trained but not yet delivered to every replica, and the mean staleness of the batch."
    chart = line_chart("Publish lag and staleness by step", words, lines, Axes("step", "versions"))
    legend = [("publish lag: trained, not yet delivered", "lag"), ("staleness, mean of the batch", "staleness")]
    return figure("Publish lag and staleness", chart, legend)


def _weights(run: RunData) -> Markup:
    transfers = [point for point in run.series("weights", "transfer_s") if point[0] > 0]
    bounds = [point for point in run.series("weights", "lower_bound_s") if point[0] > 0]
    return section("Weights: the transfer against its bound", charts(_transfers(transfers, bounds), _bytes(run)))


def _transfers(transfers: Sequence[tuple[float, float]], bounds: Sequence[tuple[float, float]]) -> Markup:
    if not transfers:
        return nothing("transfer seconds by version")
    axes = Axes("version", "time, logarithmic", log=True, tick=units.tick_seconds, show=units.seconds)
    lines = [Series("transfer", transfers, "transfer"), Series("lower bound", bounds, "bound-line")]
    words = "Seconds of each update's transfer and the plan's lower bound, on a logarithmic axis."
    legend = [("transfer", "transfer"), ("lower bound of the plan", "bound-line")]
    return figure(
        "Transfer of each update",
        line_chart("Transfer seconds by version", words, lines, axes),
        legend,
        _ratio(transfers, bounds),
    )


def _ratio(transfers: Sequence[tuple[float, float]], bounds: Sequence[tuple[float, float]]) -> str | None:
    at = dict(bounds)
    ratios = [value / at[version] for version, value in transfers if at.get(version)]
    if not ratios:
        return None
    low, middle, high = (units.times(value) for value in (min(ratios), median(ratios), max(ratios)))
    return f"Transfer over its bound: median {middle}, best {low}, worst {high}."


def _bytes(run: RunData) -> Markup:
    stages = run.plan.get("bytes_by_stage")
    if not isinstance(stages, dict) or not stages:
        return nothing("bytes by stage, which plan.json tells")
    bars = [Bar(stage, [Segment(stage, float(count), "transfer")]) for stage, count in stages.items()]
    words = "Bytes of one update by stage of the plan."
    chart = bar_chart("Bytes per update by stage", words, bars, units.size)
    known = [("all stages", units.size(run.plan.get("bytes_total")))]
    known += [("leaving the trainers", units.size(run.plan.get("trainer_egress_bytes")))]
    terms = run.plan.get("lower_bound_terms_s")
    if isinstance(terms, dict):
        known += [(f"bound: {name.replace('_', ' ')}", units.seconds(value)) for name, value in terms.items() if value]
    return figure("Bytes of one update, by stage of the plan", joined([chart, table(["one update", ""], known)]))


def _timeline(run: RunData) -> Markup:
    if not run.spans:
        return section("Timeline", nothing("spans of the workers, which trace.json holds"))
    lanes, left_out = lanes_of(run.spans)
    legend = tag("ul", *(tag("li", tag("span", class_=f"swatch {name}"), name) for name in FAMILIES), class_="legend")
    short = tag("p", f"{left_out:,} of the shortest spans are not in this page.", class_="note") if left_out else None
    more = tag("p", "trace.json opens at ui.perfetto.dev.", class_="note")
    return section("Timeline", legend, timeline(lanes), short, more)


def _idle(run: RunData) -> Markup:
    idle = run.summary.get("idle_s") or {}
    if not idle:
        return section("Idle: waiting for something else", nothing("idle time by cause"))
    causes = sorted(((name.removeprefix("idle/"), value) for name, value in idle.items()), key=lambda pair: -pair[1])
    bars = [Bar(name.split("/", 1)[-1].replace("_", " "), [Segment(name, value, "idle")]) for name, value in causes]
    chart = bar_chart("Idle by cause", "Seconds idle by cause, summed over workers.", bars, units.seconds)
    rows = [[name, units.seconds(value), _share_of_side(run, name, value)] for name, value in causes]
    head = ["cause", "sum over workers", "of those workers' time"]
    return section(
        "Idle: waiting for something else",
        charts(figure("Seconds, summed over workers", chart), table(head, rows)),
    )


def _share_of_side(run: RunData, cause: str, value: float) -> str:
    wall, workers = run.summary["wall_s"], len(run.workers(cause.split("/", 1)[0]))
    return units.percent(value / (wall * workers)) if wall and workers else units.UNKNOWN


def _config(run: RunData) -> Markup:
    content = tag("pre", run.config, tabindex=0) if run.config else nothing("config.yaml")
    return section("Configuration", tag("details", tag("summary", "config.yaml, resolved"), content))
