"""The summary's books, also of a run that ended early."""

from __future__ import annotations

from pathlib import Path

from rlbridge.config import JobConfig, job_from_mapping, to_mapping
from rlbridge.controller.buffer import RolloutBuffer
from rlbridge.controller.record import RunRecord
from rlbridge.sync.config import AtBound
from rlbridge.sync.staleness import StalenessPolicy
from rlbridge.tracking.run_folder import RunFolder


def test_a_run_that_ends_before_its_first_step_has_counted_what_was_generated(tmp_path: Path) -> None:
    values = to_mapping(JobConfig(recipe="grpo"))
    values["tracking"] |= {"wandb": "disabled", "progress": "off", "runs_dir": str(tmp_path)}
    job = job_from_mapping(values)
    record, buffer = RunRecord(job, RunFolder.create(job)), RolloutBuffer(StalenessPolicy(0, AtBound.WAIT, 1))
    record.books_of(buffer)
    buffer.counts.generated = buffer.counts.queued = 3
    summary = record.summary("interrupted")
    record.close("interrupted")
    assert (summary["generated"], summary["queued"], summary["trained"]) == (3, 3, 0)
