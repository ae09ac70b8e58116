"""Versions over UCX between real processes, in the four modes: every bit, every version, every replica."""

from __future__ import annotations

import anyio
import pytest

from rlbridge.sync import OnBusy, PlanMade, ReplicaAt, SyncMode, UpdateDone

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", list(SyncMode))
async def test_each_replica_computes_with_each_version_bit_for_bit(open_bridge, mode: SyncMode) -> None:
    async with open_bridge(mode, versions=5) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    for name, report in reports.items():
        assert not report.error, f"{name}: {report.error}"
        assert report.versions == [0, 1, 2, 3, 4], name
        assert report.wrong == [], name
    assert bridge.error is None
    (plan,) = bridge.of_kind(PlanMade)
    done = bridge.of_kind(UpdateDone)
    assert [event.version for event in done] == [0, 1, 2, 3, 4]
    assert {(e.replica, e.version) for e in bridge.of_kind(ReplicaAt)} == {(r, v) for r in (0, 1) for v in range(5)}
    for event in done:
        assert event.stats.bytes_total == plan.report["bytes_total"]
        assert event.stats.trainer_egress_bytes == plan.report["trainer_egress_bytes"]
        assert event.stats.digests_checked > 4
        assert set(event.stats.sender_stall_s) == {"trainer-0", "trainer-1"}
        assert set(event.stats.receiver_stall_s) == {"rollout-0", "rollout-1"}
    print(f"poll without news: {max(r.poll_us for n, r in reports.items() if n.startswith('rollout')):.2f} us")


async def test_superseding_skips_versions_on_all_ranks_alike(open_bridge) -> None:
    pauses = {"rollout-0": 0.2, "rollout-1": 0.2}
    async with open_bridge(SyncMode.FULLY_ASYNC, versions=12, on_busy=OnBusy.SUPERSEDE, pauses_s=pauses) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert not any(report.error for report in reports.values()), reports
    first, second = reports["trainer-0"], reports["trainer-1"]
    assert first.superseded, "the receivers are too slow for twelve versions"
    assert first.superseded == second.superseded
    assert sorted(first.versions + first.superseded) == list(range(12))
    assert reports["rollout-0"].versions == reports["rollout-1"].versions == first.versions
    assert first.versions[-1] == 11


async def test_blocking_delivers_every_version(open_bridge) -> None:
    async with open_bridge(
        SyncMode.SENDER_STAGED, versions=4, on_busy=OnBusy.BLOCK, receivers=("bfloat16",), senders=1
    ) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert not any(report.error or report.wrong for report in reports.values()), reports
    assert reports["rollout-0"].versions == [0, 1, 2, 3]


async def test_stopping_the_coordinator_tells_the_workers(open_bridge) -> None:
    async with open_bridge(SyncMode.FULLY_SYNC, senders=1, receivers=("float32",), pauses_s={"trainer-0": 60.0}) as b:
        with anyio.fail_after(120.0):
            while not b.of_kind(UpdateDone):
                await anyio.sleep(0.05)
        b.coordinator.stop()
        report = await b.report("rollout-0")
        b.kill("trainer-0")
    assert report.error_kind == "PeerDiedError"
    assert "coordinator" in report.error
