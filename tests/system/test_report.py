"""The report of a real run tells the numbers of its summary, and its causes of stall add up to them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from runs import Start

from rlbridge.report.reading import read_run
from rlbridge.report.stalls import SIDES, stalls_of

pytestmark = pytest.mark.system


def test_a_real_runs_report_is_true_to_it(start: Start) -> None:
    run = start("grpo", "trainer.steps=3", "sync=sender_staged").finish()
    assert run.status == 0, run.output
    command = [sys.executable, "-m", "rlbridge", "report", str(run.folder)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout == f"{run.folder / 'report.html'}\n"
    page = (run.folder / "report.html").read_text()
    shown = dict(re.findall(r'<data data-key="(\w+)" value="([^"]*)">', page))
    assert len(shown) >= 14
    assert {key: json.loads(value) for key, value in shown.items()} == {key: run.summary[key] for key in shown}

    data = read_run(str(run.folder))
    assert data.notes == []
    stalls = stalls_of(data.spans, run.summary["updates"])
    for side in SIDES:
        assert stalls.per_update_s(side) == pytest.approx(run.summary[f"{side}_stall_s_per_update"])
        assert stalls.per_update_s(side) > 0
    assert stalls.by_cause["trainer"]["copy"] > 0
    assert stalls.by_cause["rollout"]["transfer"] > 0
    assert [line["step"] for line in run.metrics("stall")] == [1, 2, 3], "the last update's stall is logged too"
