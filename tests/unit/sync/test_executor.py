"""Programs over the in-process transport: bytes, budget, digests, broken links, cancellation."""

from __future__ import annotations

import anyio
import pytest
import torch

from rlbridge.sync.executor import BufferPool, Execution, LinkError, Staging, message_tag
from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Piece, Program
from rlbridge.transport.errors import DeadlineExceededError, DigestMismatchError, PeerDiedError
from rlbridge.transport.inproc import InprocHub

pytestmark = pytest.mark.anyio

BUCKETS, ELEMENTS = 12, 64
PAYLOAD_BYTES = ELEMENTS * 2
WORKERS = ("rollout-0", "rollout-1", "trainer-0")


def program_of(worker: str) -> Program:
    """trainer-0 packs; it sends to rollout-0, which forwards to rollout-1."""
    route = {
        "trainer-0": (None, ("rollout-0",)),
        "rollout-0": ("trainer-0", ("rollout-1",)),
        "rollout-1": ("rollout-0", ()),
    }
    recv_from, send_to = route[worker]
    buckets = tuple(
        BucketProgram(
            number,
            PAYLOAD_BYTES,
            recv_from,
            send_to,
            (Piece("w", number * ELEMENTS, (ELEMENTS,), (1,), "bfloat16", 0),),
        )
        for number in range(BUCKETS)
    )
    return Program(worker, "hash", WORKERS, buckets)


class Cluster:
    """Three workers with linked transports and a weight each."""

    def __init__(self) -> None:
        self.hub = InprocHub()
        self.transports = {name: self.hub.transport(name) for name in WORKERS}
        self.pools = {name: BufferPool(3 * (HEADER_BYTES + PAYLOAD_BYTES)) for name in WORKERS}
        self.weights = {name: torch.zeros(BUCKETS * ELEMENTS) for name in WORKERS}
        self.weights["trainer-0"] = torch.randn(BUCKETS * ELEMENTS)
        self.staging = {name: Staging() for name in WORKERS}
        self.kept_alive: list[torch.Tensor] = []

    async def link(self) -> None:
        for name, transport in self.transports.items():
            for peer in WORKERS:
                if peer != name:
                    await transport.connect(peer, self.transports[peer].address)

    def execution(self, name: str, treatment: Treatment, version: int = 3) -> Execution:
        program = program_of(name)
        tensors = {"w": self.weights[name]}
        return Execution(
            program=program,
            transport=self.transports[name],
            epoch=1,
            version=version,
            treatment=treatment,
            prepared={bucket.bucket: prepare(bucket, tensors) for bucket in program.buckets},
            pool=self.pools[name],
            staging=self.staging[name],
        )

    async def run(self, treatment: Treatment, **versions: int) -> dict[str, object]:
        results: dict[str, object] = {}

        async def one(name: str) -> None:
            how = Treatment.SEND if name == "trainer-0" else treatment
            try:
                results[name] = await self.execution(name, how).run()
            except Exception as error:
                results[name] = error
                await self.transports[name].aclose()  # as a worker does that gives up

        with anyio.fail_after(10.0):
            async with anyio.create_task_group() as tasks:
                for name in WORKERS:
                    tasks.start_soon(one, name)
        return results


@pytest.fixture
async def cluster() -> Cluster:
    made = Cluster()
    await made.link()
    return made


async def test_forwarded_bytes_arrive_within_the_budget(cluster: Cluster) -> None:
    results = await cluster.run(Treatment.UNPACK)
    exported = cluster.weights["trainer-0"].to(torch.bfloat16).float()
    for name in ("rollout-0", "rollout-1"):
        assert torch.equal(cluster.weights[name], exported)
        assert results[name].digests_checked == BUCKETS
        assert results[name].received_bytes == BUCKETS * PAYLOAD_BYTES
    assert results["trainer-0"].packed_bytes == results["trainer-0"].sent_bytes == BUCKETS * PAYLOAD_BYTES
    assert results["rollout-0"].sent_bytes == BUCKETS * PAYLOAD_BYTES
    for pool in cluster.pools.values():
        assert pool.used_bytes == 0
        assert 0 < pool.peak_bytes <= pool.budget_bytes


async def test_kept_payloads_wait_and_live_weights_stay(cluster: Cluster) -> None:
    await cluster.run(Treatment.KEEP)
    exported = cluster.weights["trainer-0"].to(torch.bfloat16)
    for name in ("rollout-0", "rollout-1"):
        assert not cluster.weights[name].any()
        kept = cluster.staging[name].buffers
        payload = torch.cat([kept[number][HEADER_BYTES:] for number in range(BUCKETS)])
        assert torch.equal(payload.view(torch.bfloat16), exported)
        assert cluster.pools[name].peak_bytes == 0


async def test_relaying_forwards_and_writes_nothing(cluster: Cluster) -> None:
    results = await cluster.run(Treatment.RELAY)
    assert results["rollout-1"].digests_checked == BUCKETS
    for name in ("rollout-0", "rollout-1"):
        assert not cluster.weights[name].any()
        assert not cluster.staging[name].buffers


async def test_flipped_byte_stops_at_the_first_hop(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    receive = cluster.transports["rollout-0"].recv

    async def flipping(peer: str, tag: int, buffer: torch.Tensor) -> None:
        await receive(peer, tag, buffer)
        if tag == message_tag(1, 3, WORKERS.index("trainer-0"), 5):
            buffer[HEADER_BYTES] ^= 0x10

    monkeypatch.setattr(cluster.transports["rollout-0"], "recv", flipping)
    results = await cluster.run(Treatment.UNPACK)
    assert isinstance(results["rollout-0"], DigestMismatchError)
    assert "bucket 5" in str(results["rollout-0"])
    assert not cluster.weights["rollout-1"][5 * ELEMENTS : 6 * ELEMENTS].any()
    assert isinstance(results["rollout-1"], LinkError)
    assert results["rollout-1"].peer == "rollout-0"


async def test_message_of_another_version_is_refused(cluster: Cluster) -> None:
    outcome: list[Exception] = []

    async def receive() -> None:
        try:
            await cluster.execution("rollout-0", Treatment.UNPACK, version=3 + 1024).run()
        except Exception as error:
            outcome.append(error)
            tasks.cancel_scope.cancel()

    with anyio.fail_after(10.0):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cluster.execution("trainer-0", Treatment.SEND).run)
            tasks.start_soon(receive)
    assert "version 3 instead of 1027" in str(outcome[0])


async def test_death_of_a_peer_names_the_link(cluster: Cluster) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(self_destruct, cluster)
        with pytest.raises(LinkError) as caught:
            await cluster.execution("rollout-0", Treatment.UNPACK).run()
    assert caught.value.peer == "trainer-0"
    assert isinstance(caught.value.__cause__ or caught.value, (PeerDiedError, LinkError, ExceptionGroup))
    assert cluster.pools["rollout-0"].used_bytes == 0


async def self_destruct(cluster: Cluster) -> None:
    await anyio.sleep(0.02)
    cluster.hub.kill("trainer-0")


async def test_cancelling_gives_every_buffer_back(cluster: Cluster) -> None:
    with anyio.move_on_after(0.05) as scope:
        await cluster.execution("rollout-0", Treatment.UNPACK).run()
    assert scope.cancelled_caught
    assert cluster.pools["rollout-0"].used_bytes == 0


@pytest.mark.parametrize("treatment", [Treatment.UNPACK, Treatment.KEEP])
async def test_a_buffer_that_the_transport_cannot_let_go_of_is_never_used_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, treatment: Treatment
) -> None:
    """A peer that stands still in mid-transfer owns the memory that it may yet write to."""
    owned: set[int] = set()

    async def recv(peer: str, _tag: int, buffer: torch.Tensor) -> None:
        owned.add(buffer.data_ptr())
        cluster.kept_alive.append(buffer)
        try:
            await anyio.sleep_forever()
        finally:
            raise DeadlineExceededError(peer, "end of a transfer, whose buffer must not be reused", 30.0)

    monkeypatch.setattr(cluster.transports["rollout-0"], "recv", recv)
    with anyio.move_on_after(0.05), pytest.raises(DeadlineExceededError):
        await cluster.execution("rollout-0", treatment).run()
    assert owned
    pool, staging = cluster.pools["rollout-0"], cluster.staging["rollout-0"]
    assert not staging.buffers
    room = pool.budget_bytes - pool.used_bytes
    size_bytes = HEADER_BYTES + PAYLOAD_BYTES
    assert room == (0 if treatment is Treatment.UNPACK else pool.budget_bytes)
    fresh = [pool.take(size_bytes).data_ptr() for _ in range(BUCKETS)]
    fresh += [staging.buffer(bucket, size_bytes).data_ptr() for bucket in range(BUCKETS)]
    assert not owned & set(fresh)


async def taken(pool: BufferPool, size_bytes: int) -> torch.Tensor:
    await pool.reserve(size_bytes)
    return pool.take(size_bytes)


async def test_pool_serves_a_buffer_larger_than_the_budget_alone() -> None:
    pool = BufferPool(100)
    large = await taken(pool, 1000)
    with anyio.move_on_after(0.05) as scope:
        await pool.reserve(1)
    assert scope.cancelled_caught
    pool.give(large)
    small = await taken(pool, 60)
    assert small.numel() == 60
    pool.give(small)
    assert (await taken(pool, 60)).data_ptr() == small.data_ptr(), "equal sizes are reused"


async def test_pool_reuses_what_came_back_last_and_forgets_what_does_not_fit() -> None:
    pool = BufferPool(100)
    first, second = await taken(pool, 40), await taken(pool, 40)
    pool.give(first)
    pool.give(second)
    assert (await taken(pool, 40)).data_ptr() == second.data_ptr()
    await taken(pool, 60)  # the idle one goes
    assert (pool.used_bytes, pool.peak_bytes) == (100, 100)


async def test_room_without_a_buffer_is_given_back() -> None:
    pool = BufferPool(100)
    await pool.reserve(80)
    pool.release(80)
    await pool.reserve(100)
    assert (pool.used_bytes, pool.peak_bytes) == (100, 0)


def test_tags_tell_apart_what_is_in_flight() -> None:
    tags = {
        message_tag(epoch, version, source, bucket)
        for epoch in (0, 1, 1023)
        for version in (0, 7, 1023)
        for source in (0, 1, 65535)
        for bucket in (0, 1, 2**28 - 1)
    }
    assert len(tags) == 81
    assert all(0 <= tag < 2**64 for tag in tags)
