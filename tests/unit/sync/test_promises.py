"""What a member promises its main thread: failed when the bridge is over, forgotten when nobody waits."""

from __future__ import annotations

from typing import Any

import pytest

from rlbridge.sync import messages as m
from rlbridge.sync.config import SyncConfig, SyncMode
from rlbridge.sync.member import MemberSettings
from rlbridge.sync.sender import Sender
from rlbridge.sync.stall import Timeline
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import PeerDiedError

pytestmark = pytest.mark.anyio


def make_sender() -> Sender:
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
    return Sender(nothing, settings, SyncConfig(mode=SyncMode.FULLY_ASYNC))


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
