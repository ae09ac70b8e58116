"""Deaths and failures over UCX between real processes: nothing hangs, the survivors go on, and everybody hears why."""

from __future__ import annotations

import anyio
import pytest

from rlbridge.sync import PlanMade, ReplicaLost, SyncMode, UpdateDone
from rlbridge.transport.errors import DeadlineExceededError, DigestMismatchError, PeerDiedError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", list(SyncMode))
async def test_survivor_gets_every_version_when_a_receiver_is_killed_in_mid_transfer(open_bridge, mode) -> None:
    async with open_bridge(mode, senders=1, versions=4, tricks={"rollout-1": "hang"}) as bridge:
        await bridge.signalled("rollout-1")
        bridge.kill("rollout-1")
        sender, survivor = await bridge.report("trainer-0"), await bridge.report("rollout-0")
    assert not sender.error, sender.error
    assert not survivor.error, survivor.error
    assert sender.versions == survivor.versions == [0, 1, 2, 3]
    assert survivor.wrong == []
    (lost,) = bridge.of_kind(ReplicaLost)
    assert lost.replica == 1
    assert "rollout-1" in lost.reason
    assert [plan.epoch for plan in bridge.of_kind(PlanMade)][-1] >= 2
    assert [done.version for done in bridge.of_kind(UpdateDone)] == [0, 1, 2, 3]
    assert bridge.error is None


def _planned_again(bridge, worker: str) -> bool:
    lost_at = [at for at, event in enumerate(bridge.events) if isinstance(event, ReplicaLost)]
    later = bridge.events[lost_at[0] :] if lost_at else []
    return any(isinstance(event, PlanMade) and worker in event.workers for event in later)


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.FULLY_ASYNC])
async def test_replacement_joins_and_gets_the_next_version(open_bridge, mode) -> None:
    async with open_bridge(mode, senders=1, tricks={"rollout-1": "hang", "trainer-0": "wait"}) as bridge:
        await bridge.signalled("rollout-1")
        bridge.kill("rollout-1")
        bridge.replace("rollout-1")
        with anyio.fail_after(120.0):
            while not _planned_again(bridge, "rollout-1"):
                await anyio.sleep(0.05)
        (bridge.folder / "trainer-0").touch()
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert not any(report.error or report.wrong for report in reports.values()), reports
    assert reports["rollout-0"].versions == [0, 1, 2, 3]
    assert reports["rollout-1"].versions == [3]


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.FULLY_ASYNC])
async def test_sender_hears_in_time_when_the_only_receiver_is_killed(open_bridge, mode) -> None:
    async with open_bridge(mode, senders=1, receivers=("bfloat16",), tricks={"rollout-0": "hang"}) as bridge:
        await bridge.signalled("rollout-0")
        bridge.kill("rollout-0")
        sender = await bridge.report("trainer-0")
    assert sender.error_kind == "PeerDiedError"
    assert "rollout-0" in sender.error
    assert sender.waited_s < 20.0
    assert isinstance(bridge.error, PeerDiedError)
    assert "rollout-0" in str(bridge.error)


async def test_flipped_bit_is_found_named_and_costs_its_replica_only(open_bridge) -> None:
    async with open_bridge(SyncMode.FULLY_ASYNC, senders=1, tricks={"rollout-1": "flip"}) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    assert reports["rollout-1"].error_kind == "DigestMismatchError"
    assert reports["rollout-1"].versions == [0]
    assert "version 1" in reports["rollout-1"].error
    assert not reports["trainer-0"].error
    assert reports["rollout-0"].versions == reports["trainer-0"].versions == [0, 1, 2, 3]
    assert reports["rollout-0"].wrong == []
    (lost,) = bridge.of_kind(ReplicaLost)
    assert "digest" in lost.reason


@pytest.mark.parametrize(
    ("trick", "words"), [("flip", "digest"), ("raise", "the loader is out of luck")], ids=["flip", "raise"]
)
async def test_sender_raises_with_the_words_of_its_last_receiver(open_bridge, trick, words) -> None:
    async with open_bridge(
        SyncMode.FULLY_SYNC, senders=2, receivers=("float32",), tricks={"rollout-0": trick}
    ) as bridge:
        reports = {name: await bridge.report(name) for name in bridge.processes}
    for sender in ("trainer-0", "trainer-1"):
        assert words in reports[sender].error
        assert reports[sender].error_kind == ("DigestMismatchError" if trick == "flip" else "SyncError")
    assert words in reports["rollout-0"].error
    assert isinstance(bridge.error, DigestMismatchError) == (trick == "flip")


async def test_receiver_that_never_polls_is_named_at_the_deadline(open_bridge) -> None:
    async with open_bridge(
        SyncMode.FULLY_SYNC, senders=1, receivers=("float32",), tricks={"rollout-0": "sleep"}, update_timeout_s=2.0
    ) as bridge:
        sender = await bridge.report("trainer-0")
        bridge.kill("rollout-0")
    assert sender.error_kind == "DeadlineExceededError"
    assert sender.error.startswith("rollout-0")
    assert 1.5 < sender.waited_s < 6.0
    assert isinstance(bridge.error, DeadlineExceededError)


async def test_death_of_a_sender_ends_it_for_everybody(open_bridge) -> None:
    async with open_bridge(SyncMode.SENDER_STAGED, receivers=("float32",), tricks={"trainer-1": "die"}) as bridge:
        await bridge.signalled("trainer-1")
        bridge.kill("trainer-1")
        reports = [await bridge.report(name) for name in ("trainer-0", "rollout-0")]
    for report in reports:
        assert report.error_kind == "PeerDiedError"
        assert "trainer-1" in report.error
    assert isinstance(bridge.error, PeerDiedError)
