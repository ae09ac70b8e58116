"""Stall by side, version and cause: all of it is told, and none twice."""

from __future__ import annotations

import pytest
from example_runs import SPANS, UPDATES
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.controller.ledger import StallLedger
from rlbridge.report.stalls import CAUSES, COPY, TRANSFER, WAITING, split_by_cause, stalls_of
from rlbridge.sync.stall import Span

TIMES = st.integers(0, 100).map(lambda tick: tick / 10)
WEIGHTS = st.builds(
    Span, st.sampled_from(["weights/snapshot", "weights/apply", "weights/load", "weights/transfer"]), TIMES, TIMES
)


@given(TIMES, TIMES, st.lists(WEIGHTS, max_size=6))
def test_the_causes_of_a_stall_add_up_to_it(start_s: float, duration_s: float, weights: list[Span]) -> None:
    causes = split_by_cause([Span("stall/trainer", start_s, duration_s, 1)], weights)
    assert list(causes) == list(CAUSES)
    assert sum(causes.values()) == pytest.approx(duration_s, abs=1e-9)
    assert all(value >= -1e-9 for value in causes.values())


def test_the_copy_counts_before_the_transfer_and_only_inside_the_stall() -> None:
    stall = Span("stall/rollout", 10.0, 4.0, 1)
    weights = [
        Span("weights/transfer", 9.0, 3.0, 1),
        Span("weights/load", 11.5, 1.0, 1),
        Span("weights/x", 13.0, 1.0, 1),
    ]
    assert split_by_cause([stall], weights) == pytest.approx({COPY: 1.0, TRANSFER: 1.5, WAITING: 1.5})


def test_sides_versions_and_causes_of_a_run() -> None:
    stalls = stalls_of(SPANS, UPDATES)
    assert stalls.by_cause["trainer"] == pytest.approx({COPY: 0.005, TRANSFER: 0, WAITING: 0.015}, abs=1e-6)
    assert stalls.by_cause["rollout"] == pytest.approx({COPY: 0.008, TRANSFER: 0, WAITING: 0.002}, abs=1e-6)
    assert list(stalls.by_version["trainer"]) == list(range(1, UPDATES + 1)), "version 0 is start-up"
    assert stalls.per_update_s("rollout") == pytest.approx(0.01)


def test_it_is_the_summarys_stall_also_when_a_replica_was_lost_and_a_version_skipped() -> None:
    spans = {
        "trainer-0": [Span("stall/trainer", float(version), 0.2, version) for version in range(5)],
        "rollout-0": [Span("stall/rollout", float(version), 0.1, version) for version in (0, 1, 3, 4)],
        "rollout-1": [Span("stall/rollout", 0.0, 0.5, 0), Span("stall/rollout", 1.0, 0.3, 1)],
    }
    ledger = StallLedger(trainers=1, rollouts=2)
    for some in spans.values():
        ledger.add(some)
    for version, rollouts in ((1, 2), (3, 1), (4, 1)):
        ledger.took_part(version, 1, rollouts)
    stalls = stalls_of(spans, 4)
    for side in ("trainer", "rollout"):
        assert stalls.per_update_s(side) == pytest.approx(ledger.stall_per_update_s(side, 4))


def test_no_spans_no_stall() -> None:
    stalls = stalls_of({}, 0)
    assert stalls.per_update_s("trainer") == 0
    assert stalls.by_version == {"trainer": {}, "rollout": {}}
