"""The trace: every span where it was, in the format that Perfetto reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlbridge.sync.stall import Span
from rlbridge.tracking.trace import trace_events, write_trace

SPANS = {
    "trainer-0": [Span("work/train", 100.0, 2.0, 3), Span("stall/trainer", 102.0, 0.5, 4)],
    "rollout-1": [Span("idle/rollout/wait_for_prompts", 101.0, 0.25), Span("work/decode", 99.5, 1.0)],
}


def test_spans_become_complete_events_in_microseconds_from_the_first(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", SPANS)
    content = json.loads((tmp_path / "trace.json").read_text())
    complete = {event["name"]: event for event in content["traceEvents"] if event["ph"] == "X"}
    assert len(complete) == 4
    assert complete["work/decode"]["ts"] == 0
    assert complete["work/train"]["ts"] == pytest.approx(500_000)
    assert complete["work/train"]["dur"] == pytest.approx(2_000_000)
    assert complete["stall/trainer"]["args"] == {"version": 4}
    assert complete["work/decode"]["args"] == {}


def test_rows_are_named_after_workers_and_families() -> None:
    events = list(trace_events(SPANS))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(processes.values()) == ["rollout-1", "trainer-0"]
    for event in events:
        if event["ph"] == "X":
            assert threads[event["pid"], event["tid"]] == event["name"].split("/")[0]
            assert event["name"] in {span.name for span in SPANS[processes[event["pid"]]]}


def test_no_spans_is_an_empty_trace(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", {})
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"] == []
