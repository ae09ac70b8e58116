"""What a member promises its main thread, how its front closes, and what a coordinator owes to a host that left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal

from rlbridge.sync import messages as m
from rlbridge.sync.bridge import finished
from rlbridge.sync.config import SyncConfig, SyncMode
from rlbridge.sync.coordinator import Coordinator
from rlbridge.sync.front import Blocking, Place, Weights
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import MemberSettings
from rlbridge.sync.reports import ReplicaLost
from rlbridge.sync.sender import Sender
from rlbridge.sync.stall import Timeline
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import PeerDiedError

pytestmark = pytest.mark.anyio


def make_sender(kind: type[Sender] = Sender) -> Sender:
    def nothing(*_: object) -> Any:
        return None

    settings = MemberSettings(
        name="trainer-0",
        endpoint="",
        secret=b"",
        transport=TransportConfig(),
        transport_factory=nothing,
        timeline=Timeline(),
        on_news=lambda: None,
    )
    return kind(nothing, settings, SyncConfig(mode=SyncMode.FULLY_ASYNC))


def close(sender: Sender) -> None:
    for stream in (sender._say, sender._outbox, sender._do, sender._todo):
        stream.close()


async def test_fates_that_nobody_asks_for_are_not_kept() -> None:
    sender = make_sender()
    before = len(sender._promises)
    for version in range(5):
        slot, fate = await sender.begin(version)
        assert slot is not None
        await sender.offer(version, slot, {})
        sender.feed(m.Release(version))
        assert fate.result()
        del fate
    assert len(sender._promises) == before
    close(sender)


async def test_a_fate_that_somebody_waits_for_fails_with_the_bridge() -> None:
    sender = make_sender()
    _, fate = await sender.begin(0)
    sender.abandon(PeerDiedError("the coordinator is gone"))
    with pytest.raises(PeerDiedError, match="the coordinator is gone"):
        await sender.settled(0, fate)
    with pytest.raises(PeerDiedError, match="the coordinator is gone"):
        await sender.begin(1)
    close(sender)


class LastToGo(Sender):
    """A sender whose coordinator ends as soon as it hears the goodbye."""

    async def leave(self) -> None:
        await super().leave()
        self.abandon(PeerDiedError("the coordinator hung up"))


@contextmanager
def connected(kind: type[Sender] = Sender) -> Iterator[tuple[Blocking[Sender], Sender]]:
    """A front as after ``connect``, with its member and the member's loop."""

    async def make() -> Sender:
        return make_sender(kind)

    async def end() -> None:
        close(member)

    with start_blocking_portal("asyncio") as portal:
        member = portal.call(make)
        weights = Weights(CheckpointSpec({}), lambda _: None, dict)
        front = Blocking(Place("sender", 0, 0, 1), weights, member.settings, portal, lambda _, __: member)
        front._member, front._bridge._portal = member, portal
        yield front, member
        portal.call(end)


def fail(front: Blocking[Sender], member: Sender) -> None:
    async def abandon() -> None:
        member.abandon(PeerDiedError("the coordinator is gone"))

    finished(front._bridge.call(abandon))


def test_closing_a_front_whose_bridge_had_failed_says_so_once() -> None:
    with connected() as (front, member):
        fail(front, member)
        with pytest.raises(PeerDiedError, match="the coordinator is gone"):
            front.close()
        front.close()


def test_a_failed_bridge_does_not_hide_the_error_of_the_body() -> None:
    with connected() as (front, member), pytest.raises(ZeroDivisionError), front:
        fail(front, member)
        raise ZeroDivisionError


def test_a_coordinator_that_ends_after_the_goodbye_is_no_failure() -> None:
    with connected(LastToGo) as (front, member):
        front.close()
        assert member.error is not None


async def test_a_host_that_no_longer_follows_the_events_does_not_end_the_coordinator() -> None:
    coordinator = Coordinator(
        secret=b"s" * 32, senders=1, receivers={0: 1, 1: 1, 2: 1}, sync=SyncConfig(), transport=TransportConfig()
    )
    events = coordinator.events()
    async with anyio.create_task_group() as tasks:
        await tasks.start(coordinator.run)
        await coordinator.lose(0, "it was seen to die")
        assert isinstance(await anext(events), ReplicaLost)
        await events.aclose()
        await coordinator.lose(1, "nobody looks")
        coordinator.stop()
