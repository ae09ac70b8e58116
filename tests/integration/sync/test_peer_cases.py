"""How peers break, in every mode and in one process: what the losses over UCX show for some modes holds in all."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
import torch
from computing_engines import Rows, checkpoint_of, wrong_at
from one_loop_bridge import hosted, polled, receiver, sender, together

from rlbridge.sync import PlanMade, ReplicaAt, ReplicaLost, SyncMode
from rlbridge.transport.errors import ConfigError, RlbridgeError, WorkerError
from rlbridge.transport.protocol import Transport, TransportAddress

pytestmark = pytest.mark.anyio
LAST = 3


class Unlucky:
    """A transport that raises in the middle of version 1."""

    def __init__(self, inner: Transport) -> None:
        self._inner, self.address = inner, inner.address

    async def connect(self, peer: str, address: TransportAddress) -> None:
        await self._inner.connect(peer, address)

    async def send(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        await self._inner.send(peer, tag, buffer)

    async def recv(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        await self._inner.recv(peer, tag, buffer)
        if (tag >> 44) & 1023 == 1 and tag & ((1 << 28) - 1) != 0:
            raise ValueError("out of luck in mid-transfer")

    async def disconnect(self, peer: str) -> None:
        await self._inner.disconnect(peer)

    async def aclose(self) -> None:
        await self._inner.aclose()


def unlucky(transport: Transport, name: str) -> Transport:
    return Unlucky(transport) if name == "rollout-1" else transport


async def train(common: dict[str, Any], seen: list[Any], go_on: anyio.Event | None = None) -> None:
    trainer = Rows()
    async with sender(common, trainer) as bridge:
        await bridge.connect()
        for version in range(LAST + 1):
            if version == LAST and go_on is not None:
                await go_on.wait()
            trainer.train(version)
            handle = await bridge.send_weights(version)
            seen.append(await handle.wait(60.0))


async def serve(common: dict[str, Any], replica: int, seen: list[int], wrong: list[str]) -> None:
    engine = Rows()
    async with receiver(common, engine, replica) as bridge:
        await bridge.connect()
        while bridge.version != LAST:
            seen.append(await polled(bridge))
            wrong += wrong_at(engine, Rows(), checkpoint_of(seen[-1]))


async def fails(common: dict[str, Any], replica: int, seen: list[int]) -> None:
    with pytest.raises(ValueError, match="out of luck in mid-transfer"):
        await serve(common, replica, seen, [])


@pytest.mark.parametrize("mode", SyncMode)
async def test_a_receiver_that_raises_in_mid_transfer_costs_itself_and_the_next_sync_succeeds(mode: SyncMode) -> None:
    delivered: list[bool] = []
    good: list[int] = []
    bad: list[int] = []
    wrong: list[str] = []
    reports: list[Any] = []
    async with hosted(mode, receivers={0: 1, 1: 1}, tricky=unlucky, reports=reports) as common:
        await together(
            lambda: train(common, delivered), lambda: serve(common, 0, good, wrong), lambda: fails(common, 1, bad)
        )
    assert delivered == [True] * (LAST + 1)
    assert good == list(range(LAST + 1))
    assert bad == [0]
    assert wrong == []
    assert ["out of luck" in r.reason for r in reports if isinstance(r, ReplicaLost)] == [True]


@pytest.mark.parametrize("mode", SyncMode)
async def test_the_sender_raises_with_the_words_of_its_last_receiver(mode: SyncMode) -> None:
    async def hears(common: dict[str, Any]) -> None:
        with pytest.raises(RlbridgeError, match="out of luck in mid-transfer"):
            await train(common, [])

    async with hosted(mode, receivers={1: 1}, tricky=unlucky) as common:
        await together(lambda: hears(common), lambda: fails(common, 1, []))


@pytest.mark.parametrize("mode", SyncMode)
async def test_a_replacement_holds_nothing_until_it_holds_the_current_version(mode: SyncMode) -> None:
    """miles#1724: a replacement engine served base weights before it was synced."""
    delivered: list[bool] = []
    versions: dict[str, list[int]] = {"survivor": [], "replacement": []}
    wrong: list[str] = []
    reports: list[Any] = []
    planned = anyio.Event()

    async def dies_and_is_replaced(common: dict[str, Any]) -> None:
        async with receiver(common, Rows(), 1) as bridge:
            await bridge.connect()
            await polled(bridge)
            await bridge.abort(WorkerError("killed"))
        engine = Rows()
        async with receiver(common, engine, 1) as bridge:
            await bridge.connect()
            assert bridge.version is None
            assert await bridge.poll_requests() is None
            assert not [r for r in reports_since(reports) if r.replica == 1], "said to hold a version too early"
            planned.set()
            while bridge.version != LAST:
                versions["replacement"].append(await polled(bridge))
                wrong.extend(wrong_at(engine, Rows(), checkpoint_of(versions["replacement"][-1])))

    async with hosted(mode, receivers={0: 1, 1: 1}, reports=reports) as common:
        await together(
            lambda: train(common, delivered, planned),
            lambda: serve(common, 0, versions["survivor"], wrong),
            lambda: dies_and_is_replaced(common),
        )
    assert versions["survivor"] == list(range(LAST + 1))
    first = versions["replacement"][0]
    assert first > 0
    assert versions["replacement"] == list(range(first, LAST + 1))
    assert wrong == []


def reports_since(reports: list[Any]) -> list[ReplicaAt]:
    """What replicas were said to hold since the last loss."""
    lost_at = max((at for at, report in enumerate(reports) if isinstance(report, ReplicaLost)), default=0)
    return [report for report in reports[lost_at:] if isinstance(report, ReplicaAt)]


@pytest.mark.parametrize("mode", SyncMode)
async def test_the_plans_report_has_what_the_mode_costs_and_too_little_is_refused_to_all(mode: SyncMode) -> None:
    reports: list[Any] = []
    async with hosted(mode, reports=reports) as common:
        await together(lambda: train(common, []), lambda: serve(common, 0, [], []))
    memory = next(report for report in reports if isinstance(report, PlanMade)).report["memory"]
    weights_bytes = sum(t.numel() * t.element_size() for t in Rows().weights.values())
    assert memory["trainer-0"]["snapshot_bytes"] == (2 * weights_bytes if mode.sender_staging else 0)
    assert (memory["rollout-0"]["staging_bytes"] > 0) == mode.receiver_staging
    most_bytes = max(worker["total_bytes"] for worker in memory.values())

    async def refused(common: dict[str, Any], adapter: Any) -> None:
        with pytest.raises(ConfigError, match=f"memory_bytes={most_bytes - 1}"):
            async with adapter:
                await adapter.connect()

    async with hosted(mode, memory_bytes=most_bytes - 1) as common:
        await together(
            lambda: refused(common, sender(common, Rows())), lambda: refused(common, receiver(common, Rows()))
        )
