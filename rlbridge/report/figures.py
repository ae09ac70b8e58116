"""The figures of the first ten seconds: what was learned, what weights cost, whether bounds and books held. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlbridge.report import units
from rlbridge.report.markup import Child, Markup, tag
from rlbridge.report.run import RunData
from rlbridge.tracking.final_table import verdict


def key_figures(run: RunData) -> Markup:
    """One tile per question."""
    summary = run.summary
    tiles = [
        _learned(summary),
        _stall(summary),
        _staleness(summary),
        _transfer(summary),
        _books(summary),
        _speed(summary),
    ]
    return tag("dl", *tiles, class_="figures")


def figure(summary: Mapping[str, Any], key: str, text: str) -> Markup:
    """A value of the summary as ``text``; the number itself stays readable for programs in ``value``."""
    return tag("data", text, data_key=key, value=json.dumps(summary.get(key)))


def books_balance(summary: Mapping[str, Any]) -> bool | None:
    """Whether generated = trained + dropped + queued, or ``None`` where one of them is not known."""
    generated, trained, dropped, queued = (summary.get(key) for key in ("generated", "trained", "dropped", "queued"))
    if generated is None or trained is None or dropped is None or queued is None:
        return None
    return bool(generated == trained + dropped + queued)


def bound_kept(summary: Mapping[str, Any]) -> bool | None:
    """Whether no trained token was older than the bound, or ``None`` where one of them is not known."""
    bound, seen = summary.get("max_staleness"), summary["max_staleness_seen"]
    return None if bound is None or seen is None else bool(seen <= bound)


def _tile(question: str, answer: Child, *details: Child, state: bool | None = None) -> Markup:
    mark = {True: " good", False: " bad", None: ""}[state]
    return tag(
        "div", tag("dt", question), tag("dd", answer, class_=f"answer{mark}"), tag("dd", *details), class_="tile"
    )


def _learned(s: Mapping[str, Any]) -> Markup:
    word, _, evidence = verdict(s).partition(": ")
    reward = tag(
        "span",
        "reward ",
        figure(s, "reward_first", units.number(s["reward_first"])),
        " → ",
        figure(s, "reward_last", units.number(s["reward_last"])),
    )
    other = None if evidence.startswith("reward") else f"{evidence}; "
    return _tile("Learned", word, other, reward, state={"yes": True, "no": False}.get(word))


def _stall(s: Mapping[str, Any]) -> Markup:
    sides = [
        tag("span", f"{side} ", figure(s, key, units.seconds(s[key])), class_=f"side {side}")
        for side in ("trainer", "rollout")
        for key in (f"{side}_stall_s_per_update",)
    ]
    return _tile("Stall per update (AGST)", figure(s, "agst_s", units.seconds(s["agst_s"])), sides[0], ", ", sides[1])


def _staleness(s: Mapping[str, Any]) -> Markup:
    seen, bound = figure(s, "max_staleness_seen", units.count(s["max_staleness_seen"])), s.get("max_staleness")
    kept = bound_kept(s)
    words = {True: "kept", False: "BROKEN", None: "unknown"}[kept]
    return _tile("Staleness at most", seen, f"bound {units.count(bound)} versions: {words}", state=kept)


def _transfer(s: Mapping[str, Any]) -> Markup:
    took, bound = s["transfer_s_per_update"], s["lower_bound_s"]
    ratio = f"{units.times(took / bound)} the bound of " if took and bound else "lower bound "
    details = (ratio, figure(s, "lower_bound_s", units.seconds(bound)), "; ")
    size = figure(s, "bytes_per_update", units.size(s["bytes_per_update"]))
    return _tile(
        "Transfer (median)", figure(s, "transfer_s_per_update", units.seconds(took)), *details, size, " an update"
    )


def _books(s: Mapping[str, Any]) -> Markup:
    balance = books_balance(s)
    sign = {True: " = ", False: " ≠ ", None: " ? "}[balance]
    parts: list[Child] = [figure(s, "generated", units.count(s["generated"])), " generated", sign]
    for index, key in enumerate(("trained", "dropped", "queued")):
        parts += [" + " if index else None, figure(s, key, units.count(s[key])), f" {key}"]
    answer = {True: "balance", False: "do NOT balance", None: "unknown"}[balance]
    return _tile("Books", answer, *parts, state=balance)


def _speed(s: Mapping[str, Any]) -> Markup:
    speed = figure(s, "tokens_per_s", units.count(s["tokens_per_s"]))
    wall = figure(s, "wall_s", units.number(s["wall_s"], 1))
    return _tile(
        "Tokens per second", speed, figure(s, "updates", units.count(s["updates"])), " updates in ", wall, " s"
    )
