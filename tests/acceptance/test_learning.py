"""The default jobs learn what they promise to learn, in every mode (``make acceptance``; minutes each)."""

from __future__ import annotations

from typing import Any

import pytest
from runs import Start

from rlbridge.sync.config import SyncMode

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

DEADLINE_S = 800.0


def learn(start: Start, summaries: list[dict[str, Any]], recipe: str, *overrides: str) -> dict[str, Any]:
    """Run a job to its end and return its summary."""
    run = start(recipe, *overrides, small=False).finish(DEADLINE_S)
    assert run.status == 0, run.output
    summaries.append(run.summary)
    return run.summary


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mode", list(SyncMode))
def test_grpo_learns_in_every_mode(start: Start, summaries: list[dict[str, Any]], mode: SyncMode, seed: int) -> None:
    summary = learn(start, summaries, "grpo", f"sync={mode}", f"seed={seed}")
    assert summary["reward_first"] <= 0.4
    assert summary["eval_accuracy"] >= 0.9
    assert summary["max_staleness_seen"] <= summary["max_staleness"]


def test_ppo_learns_with_its_defaults(start: Start, summaries: list[dict[str, Any]]) -> None:
    assert learn(start, summaries, "ppo")["eval_accuracy"] >= 0.9


def test_ppo_learns_fully_async(start: Start, summaries: list[dict[str, Any]]) -> None:
    assert learn(start, summaries, "ppo", "sync=fully_async")["eval_accuracy"] >= 0.9


def test_two_sharded_trainer_ranks_learn(start: Start, summaries: list[dict[str, Any]]) -> None:
    assert learn(start, summaries, "grpo", "trainer.ranks=2")["eval_accuracy"] >= 0.7


def test_partial_credit_learns_without_warm_up(start: Start, summaries: list[dict[str, Any]]) -> None:
    summary = learn(start, summaries, "grpo", "task=sort3", "trainer.steps=220", "trainer.learning_rate=6e-4")
    assert summary["eval_accuracy"] >= 0.9
