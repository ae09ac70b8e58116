"""A run's folder: never shared, never half written."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from rlbridge.config import JobConfig, resolve, to_yaml
from rlbridge.tracking.config import TrackingConfig
from rlbridge.tracking.run_folder import RunFolder, write_json
from rlbridge.tracking.summary import SUMMARY_KEYS, write_summary
from rlbridge.transport.errors import ConfigError


@pytest.fixture
def job(tmp_path: Path) -> JobConfig:
    return resolve(JobConfig(recipe="grpo", seed=3, tracking=TrackingConfig(runs_dir=str(tmp_path / "runs"))))


def test_a_folder_has_its_parts_and_the_resolved_configuration(job: JobConfig) -> None:
    folder = RunFolder.create(job)
    assert re.fullmatch(r"grpo-fully_sync-s3-\d{8}-\d{6}", folder.name)
    assert folder.path.is_absolute()
    assert {entry.name for entry in folder.path.iterdir()} == {"logs", "checkpoints", "config.yaml"}
    assert (folder.path / "config.yaml").read_text() == to_yaml(job)
    assert "max_staleness: 0" in to_yaml(job)
    assert folder.checkpoint_dir(12) == folder.path / "checkpoints" / "version-12"


def test_two_runs_of_one_second_get_two_folders(job: JobConfig) -> None:
    paths = {RunFolder.create(job).path for _ in range(5)}
    assert len(paths) == 5


def test_a_given_name_is_never_used_twice(job: JobConfig) -> None:
    named = dataclasses.replace(job, name="mine")
    assert RunFolder.create(named).name == "mine"
    with pytest.raises(ConfigError, match=r"name=mine: .*runs/mine exists already"):
        RunFolder.create(named)


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "/tmp/x", ""])
def test_a_name_is_not_a_path(job: JobConfig, name: str) -> None:
    with pytest.raises(ConfigError, match=r"tracking\.runs_dir says where"):
        RunFolder.create(dataclasses.replace(job, name=name))


def test_a_place_that_cannot_be_written_is_named(job: JobConfig, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match=r"tracking\.runs_dir=.*runs"):
        RunFolder.create(job)


def test_a_summary_has_all_its_keys_or_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    whole = dict.fromkeys(SUMMARY_KEYS, 1) | {"agst_s": math.nan, "extra": {"nested": [1]}}
    write_summary(path, whole)
    assert json.loads(path.read_text())["agst_s"] is None
    assert json.loads(path.read_text())["extra"] == {"nested": [1]}
    with pytest.raises(KeyError, match="wall_s"):
        write_summary(path, {key: 1 for key in SUMMARY_KEYS if key != "wall_s"})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"epoch": 1})
    with pytest.raises(TypeError):
        write_json(path, {"epoch": object()})
    assert json.loads(path.read_text()) == {"epoch": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]
