"""The page: one run with all its sections, or several runs side by side and then each by itself. Pure."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence

from rlbridge.report.comparison import comparison
from rlbridge.report.figures import key_figures
from rlbridge.report.markup import Markup, joined, tag
from rlbridge.report.run import RunData
from rlbridge.report.sections import sections_of


def page(runs: Sequence[RunData], style: str, script: str) -> str:
    """The whole document of ``runs``; ``style`` and ``script`` are put into it.

    Its policy lets nothing load and no other script run, whatever the runs' own texts hold.
    """
    title = f"rlbridge: {runs[0].name}" if len(runs) == 1 else f"rlbridge: {len(runs)} runs"
    head = tag(
        "head",
        Markup('<meta charset="utf-8">'),
        _meta(http_equiv="Content-Security-Policy", content=_policy(style, script)),
        _meta(name="viewport", content="width=device-width, initial-scale=1"),
        _meta(name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    body = _single(runs[0]) if len(runs) == 1 else _several(runs)
    whole = tag("html", head, tag("body", body, tag("script", Markup(script))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _meta(**attributes: str) -> Markup:
    return Markup(tag("meta", **attributes).removesuffix("</meta>"))


def _policy(style: str, script: str) -> str:
    return f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'"


def _hash(content: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}"


def _single(run: RunData) -> Markup:
    return tag("main", _header(run, "h1"), _notes(run), key_figures(run), sections_of(run))


def _several(runs: Sequence[RunData]) -> Markup:
    each = [
        tag(
            "details", tag("summary", _header(run, "h2")), _notes(run), key_figures(run), sections_of(run), class_="run"
        )
        for run in runs
    ]
    return tag("main", tag("header", tag("h1", f"{len(runs)} runs side by side")), comparison(runs), *each)


def _header(run: RunData, level: str) -> Markup:
    summary = run.summary
    parts = [summary["recipe"], summary["sync_mode"]]
    parts += [f"seed {summary['seed']}"] if summary["seed"] is not None else []
    line = " · ".join(str(part) for part in [*parts, summary["exit_reason"]] if part)
    return tag("header", tag(level, run.name), tag("p", line, class_="subtitle"))


def _notes(run: RunData) -> Markup | None:
    notes = [*run.notes, *(f"Lost: {reason}" for reason in run.summary.get("lost_replicas") or ())]
    return tag("ul", joined(tag("li", note) for note in notes), class_="notes") if notes else None
