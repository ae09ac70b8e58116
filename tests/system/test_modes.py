"""Every recipe, mode and size of trainer in a few steps: the invariants that hold in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import Run, Start
from safetensors.torch import load_file

from rlbridge.sync.config import SyncMode

pytestmark = pytest.mark.system

STEPS = 5


def check_invariants(run: Run, steps: int = STEPS) -> None:
    """What design.md promises of every run, from its summary."""
    assert run.status == 0, run.output
    summary = run.summary
    assert summary["exit_reason"] == "completed"
    assert summary["policy_version"] == steps
    assert summary["generated"] == summary["trained"] + summary["dropped"] + summary["queued"]
    assert summary["generated"] > 0
    assert 0 <= summary["max_staleness_seen"] <= summary["max_staleness"]
    assert summary["digests_checked"] > 0
    assert summary["bytes_per_update"] > 0
    if summary["sync_mode"] == "fully_sync":
        assert summary["trained_tokens_on_trainer_version"] == summary["trained_tokens"] > 0
    for name in ("config.yaml", "metrics.jsonl", "trace.json", "plan.json", "logs/trainer-0.log"):
        assert (run.folder / name).is_file(), name
    assert (run.folder / "checkpoints" / f"version-{steps}" / "config.json").is_file()


def check_weights(folder: Path, dtype: torch.dtype) -> int:
    """At each version that a rollout held, its weights are the trainer's exported ones, cast, bit for bit."""
    compared = 0
    for path in sorted(folder.glob("weights/rollout-*/version-*.safetensors")):
        exported = load_file(folder / "weights" / "trainer-0" / path.name)
        held = load_file(path)
        assert held.keys() == exported.keys()
        for name, tensor in held.items():
            assert tensor.dtype == dtype
            assert torch.equal(tensor.view(torch.uint8), exported[name].to(dtype).view(torch.uint8)), (path, name)
        compared += 1
    return compared


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        (SyncMode.FULLY_SYNC, torch.float32),
        (SyncMode.SENDER_STAGED, torch.bfloat16),
        (SyncMode.RECEIVER_STAGED, torch.float32),
        (SyncMode.FULLY_ASYNC, torch.bfloat16),
    ],
)
def test_every_mode_keeps_the_invariants_and_delivers_the_weights(
    start: Start, mode: SyncMode, dtype: torch.dtype
) -> None:
    """Case 15 among them: at bound 0 every trained token has the trainer's version."""
    name = str(dtype).removeprefix("torch.")
    overrides = [f"sync={mode}", f"rollout.dtype={name}", "rollout.replicas=2", "tracking.dump_weights=true"]
    run = start("grpo", *overrides).finish()
    check_invariants(run)
    assert check_weights(run.folder, dtype) >= 4, "two replicas, at least the first and the last version"


def test_ppo_runs(start: Start) -> None:
    run = start("ppo", "sync=fully_async", "algorithm.group_size=1").finish()
    check_invariants(run)
    assert any("train/value_loss" in line or "value_loss" in line for line in run.metrics("train"))


def test_two_trainer_ranks_shard_the_model_and_feed_two_replicas(start: Start) -> None:
    run = start("grpo", "trainer.ranks=2", "rollout.replicas=2", "trainer.steps=3", "sync=sender_staged").finish()
    check_invariants(run, steps=3)


def test_dropping_at_the_bound_keeps_the_books(start: Start) -> None:
    run = start("grpo", "sync=fully_async", "sync.at_bound=drop", "sync.max_staleness=1").finish()
    check_invariants(run)


def test_a_checkpoint_of_the_run_is_a_model_for_the_next(start: Start) -> None:
    first = start("grpo", "trainer.steps=1").finish()
    assert first.status == 0, first.output
    second = start("grpo", "trainer.steps=1", f"model.path={first.folder}/checkpoints/version-1").finish()
    check_invariants(second, steps=1)
