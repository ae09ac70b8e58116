"""Loaders that compute, in real processes over UCX, beside engines of other kinds."""

from __future__ import annotations

import pytest

from rlbridge.sync import PlanMade, ReplicaLost, SyncMode

pytestmark = pytest.mark.anyio


# All four modes run in one process; here are the two that share nothing in how they apply.
@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.FULLY_ASYNC])
async def test_computing_engine_gets_every_version_bit_for_bit(open_bridge, mode: SyncMode) -> None:
    async with open_bridge(mode, senders=1, receivers=("computing",), versions=3) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert not any(report.error or report.wrong for report in reports.values()), reports
    assert reports["trainer-0"].versions == reports["rollout-0"].versions == [0, 1, 2]
    (plan,) = bridge.of_kind(PlanMade)
    assert plan.report["buckets"] > 8, "an update comes in many buckets"


async def test_engines_of_all_kinds_share_one_plan(open_bridge) -> None:
    async with open_bridge(SyncMode.FULLY_ASYNC, receivers=("computing", "fused x2"), versions=3) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert set(reports) == {"trainer-0", "trainer-1", "rollout-0", "rollout-1", "rollout-1.1"}
    for name, report in reports.items():
        assert not report.error, f"{name}: {report.error}"
        assert report.versions == [0, 1, 2], name
        assert report.wrong == [], name
    (plan,) = bridge.of_kind(PlanMade)
    whole = {receiver["worker"]: receiver["whole"] for receiver in plan.report["coverage"]["receivers"]}
    assert whole == {"rollout-0": 3, "rollout-1": 0, "rollout-1.1": 0}


async def test_trainer_that_computes_exports_what_it_computed(open_bridge) -> None:
    async with open_bridge(
        SyncMode.SENDER_STAGED, senders=1, trainer="offset_norm", receivers=("swapping", "float32"), versions=3
    ) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert not any(report.error or report.wrong for report in reports.values()), reports
    assert reports["rollout-0"].versions == reports["rollout-1"].versions == [0, 1, 2]


async def test_loader_that_raises_when_a_version_is_applied_costs_its_replica_only(open_bridge) -> None:
    async with open_bridge(
        SyncMode.FULLY_SYNC, senders=1, receivers=("computing", "bfloat16"), versions=3, tricks={"rollout-0": "loader"}
    ) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert reports["rollout-0"].error_kind == "WorkerError"
    assert "version 1: load_weights on" in reports["rollout-0"].error
    assert "the loader is out of luck" in reports["rollout-0"].error
    assert reports["rollout-0"].versions == [0]
    assert reports["rollout-1"].versions == reports["trainer-0"].versions == [0, 1, 2]
    assert reports["rollout-1"].wrong == []
    (lost,) = bridge.of_kind(ReplicaLost)
    assert "the loader is out of luck" in lost.reason
