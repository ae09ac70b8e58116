"""Slow peers, tight budgets and many parameters: who waits for whom, how much memory, how many messages."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
import torch

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.executor import BufferPool, Execution, Staging
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.topology import Topology

pytestmark = pytest.mark.anyio

PARAMETERS, ROWS = 300, 16
SPEC = CheckpointSpec({f"p{i:03}": TensorSpec((ROWS, 8), "float32") for i in range(PARAMETERS)})
MODEL_BYTES = PARAMETERS * ROWS * 8 * 4
BUCKET_BYTES = 8 * 1024
MESSAGE_BYTES = BUCKET_BYTES + HEADER_BYTES
SENDERS, RECEIVERS = ("trainer-0", "trainer-1"), ("rollout-0", "rollout-1")


def rows(rank: int, ranks: int) -> SourceMap:
    n = ROWS // ranks
    boxes = [Box(p, p, (rank * n, 0), (n, 8), (1, 1), 0, (8, 1)) for p in SPEC.tensors]
    return SourceMap({p: TensorSpec((n, 8), "float32") for p in SPEC.tensors}, boxes)


class Ranks:
    """Two trainer ranks hold half of each parameter, two rollout ranks all or half of each; each on its own host."""

    def __init__(self, budget_bytes: int, *, replicas: bool) -> None:
        senders = {name: rows(i, 2) for i, name in enumerate(SENDERS)}
        receivers = {name: rows(0, 1) if replicas else rows(i, 2) for i, name in enumerate(RECEIVERS)}
        names = (*SENDERS, *RECEIVERS)
        self.plan = plan_transfer(
            correspond(SPEC, senders, receivers), Topology({n: n for n in names}), bucket_bytes=BUCKET_BYTES
        )
        self.live = {
            name: {p: torch.zeros(t.shape) for p, t in layout.runtime.items()}
            for name, layout in (senders | receivers).items()
        }
        for name in SENDERS:
            for tensor in self.live[name].values():
                tensor.normal_()
        hub = InprocHub()
        self.transports = {name: hub.transport(name) for name in names}
        self.pools = {name: BufferPool(budget_bytes) for name in names}
        self.messages: Counter[str] = Counter()
        self.done = {name: anyio.Event() for name in names}
        for transport in self.transports.values():
            self._count(transport)

    def _count(self, transport) -> None:
        send = transport.send

        async def counted(peer: str, tag: int, buffer: torch.Tensor) -> None:
            self.messages[transport.name] += 1
            await send(peer, tag, buffer)

        transport.send = counted

    def slow_down(self, name: str, wait) -> None:
        """Let ``name`` wait before each receive."""
        recv = self.transports[name].recv

        async def slow(peer: str, tag: int, buffer: torch.Tensor) -> None:
            await wait()
            await recv(peer, tag, buffer)

        self.transports[name].recv = slow

    async def run(self) -> None:
        for name, transport in self.transports.items():
            for peer in self.transports:
                if peer != name:
                    await transport.connect(peer, self.transports[peer].address)
        with anyio.fail_after(30.0):
            async with anyio.create_task_group() as tasks:
                for name in self.transports:
                    tasks.start_soon(self._one, name)

    async def _one(self, name: str) -> None:
        program = self.plan.program(name)
        await Execution(
            program=program,
            transport=self.transports[name],
            epoch=1,
            version=1,
            treatment=Treatment.SEND if name in SENDERS else Treatment.UNPACK,
            prepared={b.bucket: prepare(b, self.live[name]) for b in program.buckets if b.pieces},
            pool=self.pools[name],
            staging=Staging(),
        ).run()
        self.done[name].set()

    def assert_arrived(self) -> None:
        for p in SPEC.tensors:
            sent = torch.cat([self.live[name][p] for name in SENDERS])
            whole = self.live[RECEIVERS[0]][p].shape[0] == ROWS
            for i, name in enumerate(RECEIVERS):
                n = ROWS // 2
                assert torch.equal(self.live[name][p], sent if whole else sent[i * n : (i + 1) * n])


@pytest.mark.parametrize("buckets", [1, 2, 5])
@pytest.mark.parametrize("replicas", [True, False])
async def test_four_ranks_with_a_slow_receiver_finish_within_the_budget(buckets: int, replicas: bool) -> None:
    ranks = Ranks(buckets * MESSAGE_BYTES, replicas=replicas)
    ranks.slow_down("rollout-1", lambda: anyio.sleep(0.005))
    await ranks.run()
    ranks.assert_arrived()
    for pool in ranks.pools.values():
        assert 0 < pool.peak_bytes <= pool.budget_bytes
        assert pool.used_bytes == 0


async def test_a_slow_receiver_delays_nobody_who_does_not_depend_on_it() -> None:
    ranks = Ranks(10 * MODEL_BYTES, replicas=False)
    ranks.slow_down("rollout-1", ranks.done["rollout-0"].wait)
    await ranks.run()
    ranks.assert_arrived()


async def test_messages_are_counted_by_buckets_not_by_parameters() -> None:
    ranks = Ranks(10 * MODEL_BYTES, replicas=True)
    await ranks.run()
    report = ranks.plan.report()
    assert sum(ranks.messages.values()) == sum(
        len(bucket.send_to) for name in ranks.transports for bucket in ranks.plan.program(name).buckets
    )
    moved_bytes = sum(report["bytes_by_stage"].values())
    assert sum(ranks.messages.values()) <= moved_bytes / BUCKET_BYTES + 2 * report["routes"] < PARAMETERS
