"""How UCX transfers end when somebody cancels, dies or stands still in the middle: never with a buffer in use."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import anyio.lowlevel
import pytest
import torch

from rlbridge.transport.errors import PeerDiedError, RlbridgeError, TransportError

pytestmark = pytest.mark.anyio

LARGE = 96 << 20


async def cancel_when(scope: anyio.CancelScope, reached: Callable[[], bool]) -> None:
    while not reached():
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def ignore_errors(function: Callable, *arguments) -> None:
    """The other side may fail or not; this test looks at this side."""
    try:
        await function(*arguments)
    except RlbridgeError as error:
        print("the other side raised", repr(error))


async def test_a_buffer_is_not_written_after_its_receive_was_cancelled_in_mid_transfer(ucxx_world):
    a, b = await ucxx_world.pair_apart()
    buffer = torch.ones(LARGE, dtype=torch.uint8).zero_()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ignore_errors, b.send, "a", 1, 1, LARGE)
        async with anyio.create_task_group() as cancelling:
            with anyio.CancelScope() as scope:
                cancelling.start_soon(cancel_when, scope, lambda: bool(buffer[LARGE // 16]))
                await a.recv("b", 1, buffer)
        assert scope.cancelled_caught
        buffer.zero_()
        await anyio.sleep(1)
        assert not buffer.any()
    await a.connect("b", await b.address())
    await b.connect("a", a.address)
    got = torch.zeros(8, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(b.send, "a", 2, 1, 8)
        await a.recv("b", 2, got)
    assert not buffer.any()


async def test_bytes_written_after_a_cancelled_send_never_arrive_as_a_whole_message(ucxx_world):
    a, b = await ucxx_world.pair_apart()
    from_b: list[list[int]] = []

    async def receive(tag: int) -> None:
        from_b.append(await b.recv("a", tag, LARGE))

    buffer = torch.empty(LARGE, dtype=torch.uint8)
    for tag in range(1, 9):  # on a busy machine a send may be through before its cancellation is heard of
        buffer.fill_(9)
        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ignore_errors, receive, tag)
            await anyio.sleep(0.3)
            with anyio.move_on_after(0.01) as scope:
                await a.send("b", tag, buffer)
            assert time.monotonic() - began < 5
            buffer.fill_(7)
        if scope.cancelled_caught:
            break
    assert scope.cancelled_caught
    assert not any(from_b)  # errors; or all nines, which is no pattern


@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_a_peer_killed_in_mid_transfer_ends_the_transfer(ucxx_world, direction):
    a, b = await ucxx_world.pair_apart()
    buffer = torch.ones(LARGE, dtype=torch.uint8).zero_()
    async with anyio.create_task_group() as tasks:

        async def far_side() -> None:
            if direction == "recv":
                await b.send("a", 1, 1, LARGE)
            else:
                await b.recv("a", 1, LARGE)

        tasks.start_soon(far_side)

        async def kill() -> None:
            if direction == "recv":
                while not buffer[LARGE // 16]:
                    await anyio.lowlevel.checkpoint()
            else:
                await anyio.sleep(0.5)
            await b.kill()
            tasks.cancel_scope.cancel()

        tasks.start_soon(kill)
        with anyio.CancelScope(shield=True), anyio.fail_after(10):
            if direction == "recv":
                with pytest.raises(PeerDiedError, match="b"):
                    await a.recv("b", 1, buffer)
            else:
                with pytest.raises(PeerDiedError, match="b"):
                    for tag in range(1, 1000):
                        await a.send("b", tag, buffer)
    buffer.zero_()
    await anyio.sleep(0.3)
    assert not buffer.any()


@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_an_operation_with_a_peer_that_stands_still_ends_at_its_deadline(ucxx_world, direction):
    a, b = await ucxx_world.pair_apart()
    b.stand_still()
    began = time.monotonic()
    with anyio.move_on_after(0.5) as scope:
        await getattr(a, direction)("b", 1, torch.ones(8 << 20, dtype=torch.uint8))
    assert scope.cancelled_caught
    assert time.monotonic() - began < 5
    with pytest.raises(TransportError, match="cancelled"):
        await a.recv("b", 2, torch.zeros(8, dtype=torch.uint8))
    await a.aclose()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("direction", ["send", "recv"])
async def test_a_peer_that_stood_still_in_mid_transfer_and_goes_on_harms_nobody(ucxx_world, direction):
    """UCX crashes if an endpoint is closed under such a transfer; the cancelled call waits for it instead."""
    a, b = await ucxx_world.pair_apart()
    buffer = torch.zeros(LARGE, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        far_side = (b.recv, "a", 1, LARGE) if direction == "send" else (b.send, "a", 1, 1, LARGE)
        tasks.start_soon(ignore_errors, *far_side)
        await anyio.sleep(0.5)

        async def stop_for_a_while() -> None:
            await anyio.sleep(0.01)
            b.stand_still()
            await anyio.sleep(1)
            b.go_on()

        tasks.start_soon(stop_for_a_while)
        with anyio.move_on_after(0.02):
            await getattr(a, direction)("b", 1, buffer)
        buffer.fill_(7)
        await anyio.sleep(1.5)
        assert (buffer == 7).all()
    await a.connect("b", await b.address())
    await b.connect("a", a.address)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(b.send, "a", 2, 1, 8)
        with anyio.fail_after(5):
            await a.recv("b", 2, torch.zeros(8, dtype=torch.uint8))
