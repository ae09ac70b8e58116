"""Acceptance runs share the whole-job fixture of the system tests, and leave a table of what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from runs import Start, started_jobs

COLUMNS = (
    "recipe",
    "sync_mode",
    "seed",
    "reward_first",
    "eval_accuracy",
    "time_to_target_s",
    "wall_s",
    "agst_s",
    "trainer_stall_s_per_update",
    "rollout_stall_s_per_update",
    "transfer_s_per_update",
    "max_staleness_seen",
)

_SUMMARIES: list[dict[str, Any]] = []


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start ``rlbridge run RECIPE OVERRIDES...`` with its default size."""
    yield from started_jobs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def summaries() -> list[dict[str, Any]]:
    """Where a test leaves the summary of its run for the table at the end."""
    return _SUMMARIES


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the table."""
    if not _SUMMARIES:
        return
    terminalreporter.section("acceptance runs")
    terminalreporter.write_line(" | ".join(COLUMNS))
    for summary in _SUMMARIES:
        cells = (summary[name] for name in COLUMNS)
        terminalreporter.write_line(" | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))
