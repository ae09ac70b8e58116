"""An outlook as a few lines and tables, for who decides about a cluster."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rlbridge.planning.outlook import Outlook, PlanOutlook, Side
from rlbridge.report.units import percent, seconds, significant, size, times
from rlbridge.sync.plan.tables import STAGES, Stage

_TERMS = {
    "trainer_egress": "one copy leaves the trainers' nodes",
    "node_import": "each node imports once what it needs",
    "external_copies": "all copies between nodes, shared by the nodes that can send them",
    "local_copies": "all copies inside a node, shared by its workers",
    "worker_import": "what a worker takes from its own node",
}
_BILLION = 1e9
_NOTABLE = 0.995
"""A term that is so much of the bound explains it."""
_BUSIEST = 4


def show_outlook(console: Console, outlook: Outlook) -> None:
    """What, where, how long, over which links, and who waits."""
    _heading(console, outlook)
    console.print(_times(outlook))
    console.print(_terms(outlook))
    console.print(_links(outlook.plans[0]))
    console.print(_stalls(outlook))
    question, copies = outlook.question, outlook.copies
    console.print(
        f"Copy rates are assumptions, not measured: each worker copies at {question.copy_gbps:g} Gbit/s (--copy-gbps); "
        f"trainer snapshot {size(copies.snapshot_bytes)}, rollout apply {size(copies.apply_bytes)}"
    )
    shares = [plan.simulated for plan in outlook.plans]
    if min(shares) < 1:
        console.print(f"Predicted from the first part of each plan ({percent(min(shares))} or more of it).")


def _heading(console: Console, outlook: Outlook) -> None:
    question = outlook.question
    billions = f"{significant(outlook.parameters / _BILLION)} B"
    dtype = f" in {question.export_dtype}" if question.export_dtype else ""
    console.print(
        f"[bold]{question.model or 'saved layouts'}[/bold]: {billions} parameters, {size(outlook.update_bytes)}{dtype} "
        "in each update"
    )
    where = f"{outlook.nodes} nodes in all, " if question.colocated else ""
    console.print(
        f"{_side('trainer', outlook.trainer)} → {_side('rollout', outlook.rollout)}; {where}"
        f"{question.link_gbps:g} Gbit/s between nodes, {question.local_gbps:g} within"
    )


def _side(name: str, side: Side) -> str:
    return f"{name} {side.layout}: {side.workers} workers on {side.nodes} node{'s' if side.nodes > 1 else ''}"


def _times(outlook: Outlook) -> Table:
    stages = [stage for stage in STAGES if any(plan.report["bytes_by_stage"][stage] for plan in outlook.plans)]
    table = Table(title="one update", title_justify="left")
    for title in ("", "time", "of bound", "of planned", *stages, "waits for", "its bytes"):
        table.add_column(str(title), justify="left" if title in ("", "waits for") else "right")
    table.add_row("lower bound", seconds(outlook.bound.seconds), times(1.0))
    for plan in outlook.plans:
        busiest = plan.loads[0] if plan.loads else None
        table.add_row(
            plan.kind,
            seconds(plan.predicted_s),
            times(plan.over_bound),
            times(plan.over_planned),
            *(_bytes(plan, stage) for stage in stages),
            busiest.label if busiest else "nothing",
            size(busiest.total_bytes if busiest else 0),
            style="bold" if plan.kind == "planned" else None,
        )
    return table


def _bytes(plan: PlanOutlook, stage: Stage) -> str:
    return size(plan.report["bytes_by_stage"][stage])


def _terms(outlook: Outlook) -> Table:
    bound = outlook.bound
    table = Table(title=f"why the bound is {seconds(bound.seconds)} ({bound.method})", title_justify="left")
    table.add_column("term")
    table.add_column("time", justify="right")
    table.add_column("what it says")
    for name, term_s in sorted(bound.terms_s.items(), key=lambda term: -term[1]):
        explains = name == outlook.explained_by and outlook.explained_share >= _NOTABLE and term_s > 0
        what = f"{_TERMS[name]}{': this is the bound' if explains else ''}"
        table.add_row(name, seconds(term_s), what, style="bold" if explains else None)
    if 0 < outlook.explained_share < _NOTABLE:
        table.caption = (
            f"No term is all of it: {outlook.explained_by} is {percent(outlook.explained_share)}, the rest comes from "
            "links that must share several of these loads."
        )
    return table


def _links(plan: PlanOutlook) -> Table:
    table = Table(title="busiest links of the planned update", title_justify="left")
    for title in ("link", "bytes", "at full rate", "by stage"):
        table.add_column(title, justify="left" if title in ("link", "by stage") else "right")
    for load in plan.loads[:_BUSIEST]:
        by_stage = ", ".join(f"{stage} {size(amount)}" for stage, amount in load.bytes_by_stage.items())
        table.add_row(load.label, size(load.total_bytes), seconds(load.seconds), by_stage)
    return table


def _stalls(outlook: Outlook) -> Table:
    table = Table(title="predicted stall per update, planned", title_justify="left")
    for title in ("sync=", "trainer", "rollouts"):
        table.add_column(title, justify="left" if title == "sync=" else "right")
    for stall in outlook.stalls:
        table.add_row(str(stall.mode), seconds(stall.trainer_s), seconds(stall.rollout_s))
    return table
