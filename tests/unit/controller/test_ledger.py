"""Stall accounting: AGST is the mean over updates of the mean over all workers; the first delivery is no update."""

from __future__ import annotations

import pytest

from rlbridge.controller.ledger import StallLedger
from rlbridge.sync.stall import Span, Timeline


def test_agst_is_the_mean_over_updates_and_workers() -> None:
    ledger = StallLedger(trainers=1, rollouts=2)
    ledger.add([Span("stall/trainer", 0.0, 3.0, 1), Span("stall/trainer", 0.0, 1.0, 2)])
    ledger.add([Span("stall/rollout", 0.0, 1.0, 1), Span("idle/rollout/wait_for_prompts", 0.0, 9.0)])
    ledger.add([Span("stall/rollout", 0.0, 1.0, 2)])
    assert ledger.agst_s(updates=2) == pytest.approx(6.0 / (3 * 2))
    assert ledger.stall_per_update_s("trainer", 2) == pytest.approx(2.0)
    assert ledger.stall_per_update_s("rollout", 2) == pytest.approx(0.5)
    assert ledger.stall_s("rollout", 1) == pytest.approx(0.5)
    assert ledger.idle_s() == {"idle/rollout/wait_for_prompts": 9.0}


def test_an_update_after_a_loss_counts_the_workers_that_were_left() -> None:
    ledger = StallLedger(trainers=1, rollouts=2)
    ledger.took_part(2, trainers=1, rollouts=1)
    ledger.add(
        [Span("stall/rollout", 0.0, 2.0, 1), Span("stall/rollout", 0.0, 2.0, 1), Span("stall/rollout", 0.0, 2.0, 2)]
    )
    assert ledger.stall_per_update_s("rollout", 2) == pytest.approx(2.0)
    assert ledger.agst_s(2) == pytest.approx((4.0 / 3 + 2.0 / 2) / 2)


def test_a_step_that_did_not_end_is_no_update() -> None:
    ledger = StallLedger(trainers=1, rollouts=1)
    ledger.add([Span("stall/trainer", 0.0, 2.0, 1), Span("stall/trainer", 0.0, 50.0, 2)])
    assert ledger.agst_s(1) == pytest.approx(1.0)


def test_the_first_delivery_is_start_up_not_an_update() -> None:
    ledger = StallLedger(trainers=1, rollouts=1)
    ledger.add([Span("stall/rollout", 0.0, 60.0, 0), Span("stall/trainer", 0.0, 60.0, None)])
    assert ledger.agst_s(updates=1) == 0.0
    assert ledger.agst_s(updates=0) == 0.0


def test_a_span_is_recorded_also_when_its_block_raises() -> None:
    timeline = Timeline()
    with pytest.raises(ValueError, match="boom"), timeline.span("work/x", 3):
        raise ValueError("boom")
    (span,) = timeline.drain()
    assert (span.name, span.version) == ("work/x", 3)
    assert span.duration_s >= 0
    assert timeline.drain() == []
