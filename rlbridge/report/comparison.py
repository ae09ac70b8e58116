"""Several runs side by side: what differed, in one table and three charts. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rlbridge.report import units
from rlbridge.report.charts import Axes, Bar, Series, bar_chart, figure, line_chart, running_mean
from rlbridge.report.figures import bound_kept
from rlbridge.report.markup import Child, Markup
from rlbridge.report.run import RunData
from rlbridge.report.sections import CAUSE_LEGEND, MEAN_OVER, charts, nothing, section, stall_segments, table
from rlbridge.report.stalls import SIDES, stalls_of

_STYLES = 8
"""Colours that the style sheet has for runs; more runs use them again."""


def comparison(runs: Sequence[RunData]) -> Markup:
    """The part of the page that stands before the single runs."""
    names = short_names(runs)
    pictures = charts(_curves(runs, names, "accuracy"), _curves(runs, names, "reward"), _stalls(runs, names))
    return section("Side by side", _table(runs, names), pictures)


def short_names(runs: Sequence[RunData]) -> list[str]:
    """What tells the runs apart: the sync mode if all differ in it, with the seed if that is needed, else the name."""
    modes = [run.sync_mode for run in runs]
    seeded = [f"{run.sync_mode} s{run.summary['seed']}" for run in runs]
    for names in (modes, seeded):
        if all(modes) and len(set(names)) == len(runs):
            return names
    return [run.name for run in runs]


def _table(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    head = ["run", "AGST", "trainer stall", "rollout stall", "transfer", "bound", "staleness", "reward", "accuracy"]
    return table([*head, "tokens/s", "wall"], [_row(run, name) for run, name in zip(runs, names, strict=True)])


def _row(run: RunData, name: str) -> list[Child]:
    s = run.summary
    broken = " BROKEN" if bound_kept(s) is False else ""
    return [
        name,
        units.seconds(s["agst_s"]),
        units.seconds(s["trainer_stall_s_per_update"]),
        units.seconds(s["rollout_stall_s_per_update"]),
        units.seconds(s["transfer_s_per_update"]),
        units.seconds(s["lower_bound_s"]),
        f"{units.count(s['max_staleness_seen'])} of {units.count(s.get('max_staleness'))}{broken}",
        units.number(s["reward_last"]),
        units.number(s["eval_accuracy"]),
        units.count(s["tokens_per_s"]),
        units.seconds(s["wall_s"]),
    ]


def _curves(runs: Sequence[RunData], names: Sequence[str], metric: str) -> Markup:
    lines = [
        Series(name, running_mean(run.series("rollout", metric), MEAN_OVER), f"run-{index % _STYLES}")
        for index, (run, name) in enumerate(zip(runs, names, strict=True))
    ]
    if not any(line.points for line in lines):
        return nothing(f"{metric} by step")
    words = f"{metric} of the training batches, mean of {MEAN_OVER} steps, for each run."
    chart = line_chart(f"{metric} by step and run", words, lines, Axes("step", metric))
    return figure(
        f"{metric.capitalize()}, mean of {MEAN_OVER} steps", chart, [(line.label, line.style) for line in lines]
    )


def _stalls(runs: Sequence[RunData], names: Sequence[str]) -> Markup:
    bars = []
    for run, name in zip(runs, names, strict=True):
        stalls = stalls_of(run.spans, run.summary["updates"] or 0)
        bars += [Bar(f"{name}, {side}", stall_segments(stalls, side)) for side in SIDES if run.spans]
    if not bars:
        return nothing("stall by cause")
    words = "Seconds per update that one worker stood still, by run, side and cause."
    chart = bar_chart("Stall per update by run, side and cause", words, bars, units.seconds)
    return figure("Stall per update, by side and cause", chart, CAUSE_LEGEND)
