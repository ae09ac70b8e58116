"""The summary's books, also of a run that ended early."""

from __future__ import annotations

import json
from pathlib import Path

from rlbridge.config import JobConfig, job_from_mapping, to_mapping
from rlbridge.controller.buffer import Group, RolloutBuffer, ScoredTrajectory
from rlbridge.controller.record import RunRecord
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import Trajectory, VersionSpan
from rlbridge.sync.config import AtBound
from rlbridge.sync.staleness import StalenessPolicy
from rlbridge.tracking.run_folder import RunFolder


def open_record(tmp_path: Path) -> RunRecord:
    values = to_mapping(JobConfig(recipe="grpo"))
    values["tracking"] |= {"wandb": "disabled", "progress": "off", "runs_dir": str(tmp_path)}
    job = job_from_mapping(values)
    return RunRecord(job, RunFolder.create(job))


def test_a_run_that_ends_before_its_first_step_has_counted_what_was_generated(tmp_path: Path) -> None:
    record, buffer = open_record(tmp_path), RolloutBuffer(StalenessPolicy(0, AtBound.WAIT, 1))
    record.books_of(buffer)
    buffer.counts.generated = buffer.counts.queued = 3
    summary = record.summary("interrupted")
    record.close("interrupted")
    assert (summary["generated"], summary["queued"], summary["trained"]) == (3, 3, 0)


def test_a_step_logs_reward_accuracy_length_and_speed(tmp_path: Path) -> None:
    record = open_record(tmp_path)
    spans = [VersionSpan(0, 2, 0)]
    scored = [
        ScoredTrajectory(Trajectory(i, 0, i, [2], [3, 1], [-1.0, -1.0], spans, "stop", 0), float(i), bool(i))
        for i in range(2)
    ]
    group = Group(0, Problem("1", "1"), {}, scored)
    record.step_began(0, [group], 0.5)
    record.step_ended(1, {"train/loss": 0.25}, {})
    record.close("completed")
    lines = [json.loads(line) for line in (record.folder.path / "metrics.jsonl").read_text().splitlines()]
    logged = {(line["family"], name): value for line in lines for name, value in line.items()}
    assert logged["rollout", "reward"] == logged["rollout", "accuracy"] == 0.5
    assert logged["rollout", "response_length"] == 2.0
    assert logged["rollout", "tokens_per_s"] == 0.0  # no worker has reported yet
    assert logged["train", "loss"] == 0.25
    assert logged["train", "tokens_per_s"] > 0.0
