"""One writer per run: JSON lines always, wandb as configured, nothing left running."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from rlbridge.config import JobConfig, resolve
from rlbridge.tracking.config import TrackingConfig
from rlbridge.tracking.metrics import FAMILIES, MetricsWriter
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.transport.errors import ConfigError

pytestmark = pytest.mark.integration

Mode = Literal["offline", "online", "disabled"]


def job_with(tmp_path: Path, wandb: Mode) -> JobConfig:
    return resolve(JobConfig(recipe="grpo", tracking=TrackingConfig(runs_dir=str(tmp_path), wandb=wandb)))


def lines_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a ``.wandb`` file: after its own header, blocks of 32 KiB that hold pieces of records."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768
        if left < 7:  # too little for a piece's header: padding
            at += left
            continue
        _checksum, length, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last piece of one
            yield Record.FromString(whole)
            whole = b""


def test_lines_are_written_at_once_each_family_on_its_own_axis(tmp_path: Path) -> None:
    job = job_with(tmp_path, "disabled")
    folder = RunFolder.create(job)
    writer = MetricsWriter(job, folder)
    writer.log("train", 1, {"loss": 0.5, "ratio": math.nan})
    writer.log("weights", 7, {"bytes": 12})
    first, second = lines_of(folder)
    assert (first["family"], first["step"], first["loss"], first["ratio"]) == ("train", 1, 0.5, None)
    assert (second["family"], second["step"], second["bytes"]) == ("weights", 7, 12)
    assert second["time_s"] >= first["time_s"]
    with pytest.raises(ValueError, match="unknown family of metrics 'trian'"):
        writer.log("trian", 1, {})
    writer.close({})
    writer.close({})
    assert not (folder.path / "wandb").exists()


def test_wandb_offline_keeps_everything_in_the_runs_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    job = job_with(tmp_path / "runs", "offline")
    folder = RunFolder.create(dataclasses.replace(job, name="run"))
    writer = MetricsWriter(job, folder)
    for family in FAMILIES:
        writer.log(family, 1, {"value": 1.0, "wait/for": 2.0})
    writer.close({"agst_s": 0.5, "idle_s": {"trainer": 1.0}, "exit_reason": "completed"})
    assert len(lines_of(folder)) == len(FAMILIES)
    records = list((folder.path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(records) == 1, "one writer, one run"
    written = list(wandb_records(records[0]))
    axes = {record.metric.glob_name: record.metric.step_metric for record in written if record.HasField("metric")}
    assert {name: axis for name, axis in axes.items() if name} == {f"{name}/*": f"{name}/step" for name in FAMILIES}
    lines = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in written
        if record.HasField("history")
    ]
    values = [{name: value for name, value in line.items() if not name.startswith("_")} for line in lines]
    assert values == [{f"{f}/step": 1, f"{f}/value": 1.0, f"{f}/wait/for": 2.0} for f in FAMILIES]
    assert b"agst_s" in records[0].read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == ["runs"]
    assert capfd.readouterr() == ("", "")


def test_wandb_that_cannot_start_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    job = job_with(tmp_path, "online")
    with pytest.raises(ConfigError, match=r"tracking\.wandb=online: wandb could not start .*tracking\.wandb=disabled"):
        MetricsWriter(job, RunFolder.create(job))
