"""What the user sees of a run."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rlbridge.config import JobConfig
from rlbridge.tracking.config import TrackingConfig
from rlbridge.tracking.final_table import final_table, verdict
from rlbridge.tracking.progress import (
    NoProgress,
    PlainProgress,
    RichProgress,
    StepView,
    clock,
    open_progress,
    sparkline,
)
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.tracking.summary import SUMMARY_KEYS

VIEW = StepView(1, 20, 0.25, 0.5, 5012.4, 1, 0.3, 0.0123, 0.0021, 83)
FOLDER = RunFolder(Path("/tmp/runs/grpo-1"))
EMPTY: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS) | {
    "exit_reason": "interrupted",
    "generated": 0,
    "trained": 0,
    "dropped": 0,
    "queued": 0,
}
DONE = EMPTY | {
    "exit_reason": "completed",
    "reward_first": 0.1567,
    "reward_last": 0.9512,
    "eval_accuracy_before": 0.412,
    "eval_accuracy": 0.984,
    "agst_s": 0.0021,
    "trainer_stall_s_per_update": 0.0011,
    "rollout_stall_s_per_update": 0.0034,
    "updates": 120,
    "bytes_per_update": 536_064,
    "max_staleness_seen": 2,
    "generated": 10,
    "trained": 6,
    "dropped": 1,
    "queued": 3,
    "tokens_per_s": 5012.0,
    "wall_s": 83.25,
}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=110, force_terminal=terminal, soft_wrap=not terminal)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_plain_lines_say_everything_and_keep_their_distance() -> None:
    out = console()
    progress = PlainProgress("grpo", 1000.0, out)
    for step in (1, 2, 3, 20):
        progress.step(replace(VIEW, step=step))
    lines = text_of(out).splitlines()
    assert [line.split("  ")[0] for line in lines] == ["grpo", "step 1/20", "step 20/20"]
    for fact in (
        *("reward 0.250", "accuracy 0.500", "tokens/s 5,012", "version 1", "staleness 0.30"),
        *("stall trainer 12.3 ms", "stall rollout 2.1 ms", "eta 1:23"),
    ):
        assert fact in lines[1]


def test_plain_lines_can_show_every_step() -> None:
    out = console()
    progress = PlainProgress("grpo", 0.0, out)
    for step in range(1, 21):
        progress.step(replace(VIEW, step=step))
    assert len(text_of(out).splitlines()) == 21


@pytest.mark.parametrize("kind", ["plain", "rich"])
def test_the_end_is_shown_once_and_text_is_not_markup(kind: str) -> None:
    out = console(terminal=kind == "rich")
    progress = PlainProgress("t", 0.0, out) if kind == "plain" else RichProgress("t", out)
    progress.message("a [bold] word")
    progress.step(VIEW)
    progress.close(DONE, FOLDER)
    progress.close(DONE, FOLDER)
    text = text_of(out)
    assert "a [bold] word" in text
    assert text.count("AGST") == 1


def test_the_live_display_shows_the_step_and_gives_the_cursor_back() -> None:
    out = console(terminal=True)
    progress = RichProgress("grpo · sort", out)
    progress.step(VIEW)
    progress.close(DONE, FOLDER)
    assert "step 1/20" in text_of(out)
    assert text_of(out).rindex("\x1b[?25h") > text_of(out).rindex("\x1b[?25l")


def test_the_final_table_tells_learning_stall_books_and_files() -> None:
    out = console()
    out.print(final_table(DONE, FOLDER))
    text = text_of(out)
    for fact in (
        *("grpo-1: completed", "yes: held-out accuracy 0.412 → 0.984", "0.157 → 0.951", "trainer 1.10 ms"),
        *("rollout 3.40 ms", "AGST 2.10 ms", "536.06 kB", "10 generated = 6 trained + 1 dropped + 3 queued"),
        *("5,012 tokens/s", "/tmp/runs/grpo-1", "at most 2"),
    ):
        assert fact in text


def test_a_run_that_ended_at_once_still_has_a_table() -> None:
    out = console()
    out.print(final_table(EMPTY, FOLDER))
    assert "unknown: the run ended too early" in text_of(out)


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({}, "yes: held-out"),
        ({"eval_accuracy": 0.42}, "yes: held-out"),
        ({"eval_accuracy": 0.42, "reward_last": 0.16}, "no: held-out"),
        ({"eval_accuracy": 0.1}, "no: held-out"),
        ({"eval_accuracy_before": None}, "yes: reward"),
        ({"eval_accuracy": None, "reward_last": None}, "unknown"),
    ],
)
def test_the_verdict_is_that_of_the_numbers(change: dict[str, Any], answer: str) -> None:
    assert verdict(DONE | change).startswith(answer)


def test_books_that_do_not_balance_are_shown_as_such() -> None:
    out = console()
    out.print(final_table(DONE | {"queued": 4}, FOLDER))
    assert "10 generated ≠ 6 trained + 1 dropped + 4 queued" in text_of(out)


def test_the_kind_of_progress_is_chosen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def kind(progress: Any) -> type:
        opened = open_progress(JobConfig(recipe="grpo", tracking=TrackingConfig(progress=progress)))
        opened.close(EMPTY, FOLDER)
        return type(opened)

    assert kind("off") is NoProgress
    assert capsys.readouterr().out == ""
    assert kind("plain") is PlainProgress
    assert kind("auto") is PlainProgress
    assert kind("rich") is RichProgress


def test_small_helpers() -> None:
    assert [clock(s) for s in (0, 59.6, 83, 3723, -5)] == ["0:00", "1:00", "1:23", "1:02:03", "0:00"]
    assert sparkline([]) == ""
    assert sparkline([1, 1]) == "▁▁"
    assert sparkline([0, 0.5, 1]) == "▁▅█" or sparkline([0, 0.5, 1]) == "▁▄█"
