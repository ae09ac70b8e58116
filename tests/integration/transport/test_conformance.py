"""What every ``Transport`` promises, checked against each implementation."""

from __future__ import annotations

import time

import anyio
import anyio.lowlevel
import numpy as np
import pytest
import torch

from rlbridge.transport.errors import PeerDiedError, TransportError
from rlbridge.transport.protocol import Transport, TransportAddress

pytestmark = pytest.mark.anyio

MIB = 1 << 20


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


async def exchange(a: Transport, b: Transport, tag: int, nbytes: int) -> None:
    """One message from ``a`` to ``b``, compared byte for byte."""
    sent, got = random_bytes(nbytes, tag), torch.zeros(nbytes, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.send, "b", tag, sent)
        tasks.start_soon(b.recv, "a", tag, got)
    assert torch.equal(sent, got)


async def test_is_a_transport(world):
    assert isinstance(await world.transport("a"), Transport)


@pytest.mark.parametrize("nbytes", [0, 1, 8, 4097, 64 * 1024, 64 * 1024 + 1, MIB, 8 * MIB + 64])
async def test_messages_of_every_size_arrive(world, nbytes):
    a, b = await world.pair()
    await exchange(a, b, 1, nbytes)


async def test_the_largest_tag_is_a_tag(world):
    a, b = await world.pair()
    await exchange(a, b, 2**64 - 1, 8)


@pytest.mark.parametrize("tag", [-1, 2**64])
async def test_what_is_no_tag_is_refused(world, tag):
    a, _ = await world.pair()
    with pytest.raises(TransportError, match="tag"):
        await a.send("b", tag, random_bytes(8))


async def test_many_messages_in_both_directions_at_once(world):
    a, b = await world.pair()
    sizes = [(i * 7919) % (256 * 1024) for i in range(96)]
    got = {(side, i): torch.zeros(n, dtype=torch.uint8) for side in "ab" for i, n in enumerate(sizes)}
    async with anyio.create_task_group() as tasks:
        for i, nbytes in enumerate(sizes):
            tasks.start_soon(a.send, "b", i, random_bytes(nbytes, i))
            tasks.start_soon(b.send, "a", i, random_bytes(nbytes, 1000 + i))
        for i in reversed(range(len(sizes))):
            tasks.start_soon(a.recv, "b", i, got["a", i])
            tasks.start_soon(b.recv, "a", i, got["b", i])
    for i, nbytes in enumerate(sizes):
        assert torch.equal(got["b", i], random_bytes(nbytes, i))
        assert torch.equal(got["a", i], random_bytes(nbytes, 1000 + i))


@pytest.mark.parametrize("first", ["send", "recv"])
@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_either_side_may_come_first(world, first, nbytes):
    a, b = await world.pair()
    sent, got = random_bytes(nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    calls = [(a.send, "b", 5, sent), (b.recv, "a", 5, got)]
    async with anyio.create_task_group() as tasks:
        for function, *arguments in calls if first == "send" else reversed(calls):
            tasks.start_soon(function, *arguments)
            await anyio.sleep(0.05)
    assert torch.equal(sent, got)


async def test_a_message_may_come_before_its_receiver_has_connected(world):
    a, b = await world.transport("a"), await world.transport("b")
    await a.connect("b", b.address)
    got = torch.zeros(8, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.send, "b", 1, random_bytes(8))
        await anyio.sleep(0.05)
        await b.connect("a", a.address)
        tasks.start_soon(b.recv, "a", 1, got)
    assert torch.equal(got, random_bytes(8))


async def test_tags_belong_to_their_sender(world):
    a, b = await world.pair()
    c = await world.transport("c")
    await c.connect("b", b.address)
    await b.connect("c", c.address)
    from_a, from_c = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(c.send, "b", 7, random_bytes(8, 2))
        tasks.start_soon(a.send, "b", 7, random_bytes(8, 1))
        await anyio.sleep(0.05)
        tasks.start_soon(b.recv, "a", 7, from_a)
        tasks.start_soon(b.recv, "c", 7, from_c)
    assert torch.equal(from_a, random_bytes(8, 1))
    assert torch.equal(from_c, random_bytes(8, 2))


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (torch.zeros(16, dtype=torch.uint8)[::2], "contiguous"),
        (torch.zeros(4, 4, dtype=torch.uint8), "contiguous"),
        (torch.zeros(8, dtype=torch.int8), "uint8"),
        (torch.zeros(8, dtype=torch.uint8, device="meta"), "host memory"),
        (np.zeros(8, np.uint8), "torch.Tensor"),
        (b"read only", "torch.Tensor"),
    ],
    ids=["strided", "matrix", "int8", "elsewhere", "numpy", "bytes"],
)
async def test_what_is_not_a_run_of_bytes_is_refused(world, buffer, complaint):
    a, _ = await world.pair()
    for operation in (a.send, a.recv):
        with pytest.raises(TransportError, match=complaint):
            await operation("b", 1, buffer)


async def test_without_a_link_nothing_moves(world):
    a = await world.transport("a")
    for operation in (a.send, a.recv):
        with pytest.raises(TransportError, match="no link to b"):
            await operation("b", 1, random_bytes(8))
    await a.disconnect("b")


async def test_an_address_that_cannot_be_read_is_refused(world):
    a, b = await world.transport("a"), await world.transport("b")
    good = b.address
    damaged = tuple(blob[:-1] + bytes([blob[-1] ^ 1]) for blob in good.blobs)
    for bad in (
        TransportAddress("pigeon", good.node, good.blobs),
        TransportAddress(good.kind, good.node, ()),
        TransportAddress(good.kind, good.node, damaged),
        TransportAddress(good.kind, good.node, tuple(b"" for _ in good.blobs)),
    ):
        with pytest.raises(TransportError, match="b"):
            await a.connect("b", bad)


@pytest.mark.parametrize(("sent", "room"), [(16, 8), (8, 16), (0, 8), (MIB, MIB // 2), (MIB, MIB + 1)])
async def test_a_message_that_does_not_fit_its_buffer_is_an_error_and_touches_nothing(world, sent, room):
    a, b = await world.pair()
    memory = torch.zeros(2 * room, dtype=torch.uint8)

    async def send() -> None:
        try:
            await a.send("b", 1, random_bytes(sent))
        except PeerDiedError as error:
            assert "b closed its link" in str(error)  # unless the message had gone already

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            with pytest.raises(TransportError, match=f"a sends {sent} bytes under tag 1, into a buffer of {room}"):
                await b.recv("a", 1, memory[:room])
        with pytest.raises(PeerDiedError, match="b closed its link"):
            await a.recv("b", 2, memory[:room])
    assert not memory.any()


async def test_a_cancelled_receive_ends_the_link_on_both_sides(world):
    a, b = await world.pair()
    buffer, waiting = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)

    async def wait_for_a() -> None:
        with pytest.raises(PeerDiedError, match="a"):
            await b.recv("a", 2, waiting)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait_for_a)
        await anyio.sleep(0.02)
        with anyio.move_on_after(0.05) as scope:
            await a.recv("b", 1, buffer)
    assert scope.cancelled_caught
    for transport, peer in ((a, "b"), (b, "a")):
        with pytest.raises(TransportError, match=peer):
            await transport.send(peer, 1, random_bytes(8))
    await a.connect("b", b.address)
    await b.connect("a", a.address)
    await exchange(a, b, 3, MIB)
    assert not buffer.any()


async def test_a_finished_operation_is_not_undone_by_a_late_cancellation(world):
    a, b = await world.pair()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(a.send, "b", 1, random_bytes(8))
        tasks.start_soon(b.recv, "a", 1, torch.zeros(8, dtype=torch.uint8))
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anyio.lowlevel.checkpoint()
    await exchange(a, b, 2, 8)


async def test_disconnecting_ends_what_is_pending_on_both_sides(world):
    a, b = await world.pair()
    raised = []

    async def wait(transport: Transport, peer: str) -> None:
        with pytest.raises(TransportError, match=peer) as error:
            await transport.recv(peer, 1, torch.zeros(8, dtype=torch.uint8))
        raised.append((peer, error.type))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, a, "b")
            tasks.start_soon(wait, b, "a")
            await anyio.sleep(0.05)
            await a.disconnect("b")
    assert sorted(raised, key=str) == [("a", PeerDiedError), ("b", TransportError)]


async def test_messages_flow_again_after_disconnect_and_connect(world):
    a, b = await world.pair()
    for round_ in range(5):
        await exchange(a, b, round_, 64 * 1024)
        await a.disconnect("b")
        await b.disconnect("a")
        await b.connect("a", a.address)
        await a.connect("b", b.address)
    await exchange(a, b, 99, MIB)


@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_a_stale_message_of_an_ended_link_is_not_received_by_the_next(world, nbytes):
    a, b = await world.pair()
    with anyio.move_on_after(0.05):
        await a.send("b", 1, random_bytes(nbytes, 1))  # nobody receives it
    await a.disconnect("b")
    await b.disconnect("a")
    await a.connect("b", b.address)
    await b.connect("a", a.address)
    got = torch.zeros(nbytes, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(b.recv, "a", 1, got)  # even under the same tag
        await anyio.sleep(0.05)
        assert not got.any()
        await a.send("b", 1, random_bytes(nbytes, 2))
    assert torch.equal(got, random_bytes(nbytes, 2))


async def test_connecting_again_replaces_the_link(world):
    a, b = await world.pair()
    raised = []

    async def wait() -> None:
        with pytest.raises(TransportError, match="closed") as error:
            await a.recv("b", 1, torch.zeros(8, dtype=torch.uint8))
        raised.append(error)

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.02)
            await a.connect("b", b.address)
    assert raised
    await b.connect("a", a.address)
    await exchange(a, b, 2, MIB)
    await exchange(a, b, 3, 8)


async def test_closing_ends_what_is_pending_and_refuses_more(world):
    a, b = await world.pair()

    async def wait() -> None:
        with pytest.raises(TransportError):
            await a.recv("b", 1, torch.zeros(8, dtype=torch.uint8))

    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.02)
            await a.aclose()
    await a.aclose()
    with pytest.raises(TransportError):
        await a.send("b", 1, random_bytes(8))
    with pytest.raises(TransportError):
        await a.connect("b", b.address)


@pytest.mark.parametrize("nbytes", [8, MIB])
async def test_messages_cross_processes(world, nbytes):
    a, b = await world.pair_apart()
    got = torch.zeros(nbytes, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(b.send, "a", 1, 3, nbytes)
        await a.recv("b", 1, got)
    seeds = []

    async def receive() -> None:
        seeds.extend(await b.recv("a", 2, nbytes))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await a.send("b", 2, got)
    assert 3 in seeds


async def test_a_dead_peer_ends_an_idle_receive_and_a_new_one_takes_its_place(world):
    a, b = await world.pair_apart()
    began = time.monotonic()
    async with anyio.create_task_group() as tasks:

        async def kill() -> None:
            await anyio.sleep(0.1)
            await b.kill()

        tasks.start_soon(kill)
        with anyio.fail_after(10), pytest.raises(PeerDiedError, match="b"):
            await a.recv("b", 1, torch.zeros(8, dtype=torch.uint8))
    assert time.monotonic() - began < 5
    for operation in (a.send, a.recv):
        with pytest.raises(PeerDiedError, match="b"):
            await operation("b", 2, random_bytes(8))

    successor = await world.distant("b")
    await a.connect("b", await successor.address())
    await successor.connect("a", a.address)
    got = torch.zeros(MIB, dtype=torch.uint8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(successor.send, "a", 3, 1, MIB)
        await a.recv("b", 3, got)
    assert got.all()
