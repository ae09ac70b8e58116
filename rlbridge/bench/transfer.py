"""Planned, ``broadcast`` and ``p2p`` side by side: the same processes, the same executor, turn by turn.

The parent plans; the workers hold shards and all three programs, and run one of them on command. Each kind is run once
to warm up, and what landed is compared element by element; then the kinds take turns, and every bucket's digest is
checked in every round.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from rlbridge.bench import messages as m
from rlbridge.bench.crew import Crew
from rlbridge.bench.hosts import Hosts, simulated_hosts
from rlbridge.bench.workload import Workload
from rlbridge.sync.correspondence import correspond
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.program import Program
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import SyncError
from rlbridge.transport.topology import NodeRates, Topology

PLANNED = "planned"
KINDS = (PLANNED, *(str(kind) for kind in BaselineKind))

Tell = Callable[[str], None]
"""Takes a line about what is going on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What to measure.

    Attributes:
        workload: model and hosts.
        config: transport settings; bucket size and staging budget among them.
        rounds: turns of each kind.
        link_mbps: with it, hosts are network namespaces whose links carry that much; without, all is one host.
    """

    workload: Workload
    config: TransportConfig
    rounds: int
    link_mbps: float | None = None

    @property
    def topology(self) -> Topology:
        """Where the workers are, for the planner."""
        external_gbps = self.config.external_gbps if self.link_mbps is None else self.link_mbps / 1e3
        nodes = {w: f"host{host if self.link_mbps is not None else 0}" for w, host in self.workload.nodes().items()}
        return Topology(nodes, NodeRates.of_gbps(external_gbps, self.config.local_gbps))


class KindResult(msgspec.Struct, frozen=True):
    """What was measured of one kind.

    Attributes:
        times_s: of each round, from the first worker's start to the last one's end.
        median_s, ratio: their median; how many times that of the planned transfer.
        predicted_s: what the simulator says.
        bound_s, over_bound: least time under the one-copy rule; the median over it.
        bytes_by_stage: payload bytes of one update.
        busiest_link, busiest_link_bytes: where the plan has most to do.
        peak_staging_bytes: most that one worker held in bucket buffers.
        digests_checked: in all rounds; all matched.
    """

    kind: str
    times_s: list[float]
    median_s: float
    ratio: float
    predicted_s: float
    bound_s: float
    over_bound: float
    bytes_by_stage: dict[str, int]
    busiest_link: str | None
    busiest_link_bytes: int
    peak_staging_bytes: int
    digests_checked: int


class TransferResult(msgspec.Struct, frozen=True):
    """The whole benchmark, ready for JSON."""

    trainers: int
    rollouts: int
    workers_per_host: int
    model_bytes: int
    bucket_bytes: int
    staging_bytes: int
    rounds: int
    link_mbps: float | None
    kinds: list[KindResult]


async def bench_transfer(bench: Bench, tell: Tell) -> TransferResult:
    """Measure.

    Raises:
        ConfigError: the machine cannot do it. WorkerError, DeadlineExceededError: a worker failed.
        SyncError: wrong bytes landed.
    """
    plans = make_plans(bench)
    async with _crew_of(bench, tell) as crew:
        await set_up(crew, bench.workload, bench.config, {kind: plan.program for kind, plan in plans.items()})
        rounds: dict[str, list[dict[str, m.Ran]]] = {kind: [] for kind in KINDS}
        version = 0
        for kind in KINDS:
            version += 1
            tell(f"warm up: {kind}")
            await proved_round(crew, bench.workload, kind, version)
        for number in range(bench.rounds):
            for kind in (*KINDS[number % len(KINDS) :], *KINDS[: number % len(KINDS)]):
                version += 1
                ran = await one_round(crew, bench.workload, kind, version)
                _check_complete(plans[kind], ran)
                rounds[kind].append(ran)
                tell(f"round {number + 1}/{bench.rounds}: {kind} {elapsed_s(ran):.3f} s")
    return _result(bench, plans, rounds)


def make_plans(bench: Bench) -> dict[str, TransferPlan]:
    """A plan of every kind."""
    w = bench.workload
    correspondence = correspond(w.spec(), w.senders(), w.receivers())
    topology, bucket_bytes = bench.topology, bench.config.bucket_bytes
    plans = {PLANNED: plan_transfer(correspondence, topology, bucket_bytes=bucket_bytes)}
    for kind in BaselineKind:
        plans[str(kind)] = plan_baseline(kind, correspondence, topology, bucket_bytes=bucket_bytes)
    return plans


@asynccontextmanager
async def _crew_of(bench: Bench, tell: Tell) -> AsyncIterator[Crew]:
    async with AsyncExitStack() as stack:
        hosts: Hosts | None = None
        if bench.link_mbps is not None:
            tell(f"making {bench.workload.hosts} hosts with links of {bench.link_mbps:g} Mbit/s")
            hosts = await stack.enter_async_context(simulated_hosts(bench.workload.hosts, bench.link_mbps))
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rlbridge-bench-")))
        deadline_s = bench.config.connect_timeout_s + bench.config.update_timeout_s
        crew = await stack.enter_async_context(Crew(logs, deadline_s))
        for worker, host in bench.workload.nodes().items():
            await crew.start(worker, hosts.inside(host) if hosts is not None else ())
        yield crew


async def set_up(
    crew: Crew,
    workload: Workload,
    config: TransportConfig,
    programs: dict[str, Callable[[str], Program]],
    *,
    bare: bool = False,
) -> None:
    """Give every worker its shard, its program of every kind, and links to the peers that these need."""
    senders, receivers = workload.senders(), workload.receivers()
    setups = {worker: m.Setup(config, layout, True, bare) for worker, layout in senders.items()}
    setups |= {worker: m.Setup(config, layout, False, bare) for worker, layout in receivers.items()}
    ready = await crew.ask(setups, m.Ready, "start")
    loads = {}
    for worker in setups:
        its = {kind: program(worker) for kind, program in programs.items()}
        peers = sorted({peer for program in its.values() for peer in peers_of(program)})
        addresses = {peer: ready[peer].address for peer in peers}
        loads[worker] = m.Load(its, addresses, {peer: ready[peer].bare_address for peer in peers if bare})
    await crew.ask(loads, m.Done, "open links")


def peers_of(program: Program) -> set[str]:
    """Whom the program sends to or receives from."""
    peers = {bucket.recv_from for bucket in program.buckets if bucket.recv_from is not None}
    return peers | {peer for bucket in program.buckets for peer in bucket.send_to}


async def one_round(
    crew: Crew, workload: Workload, kind: str, version: int, way: m.Way = m.Way.FULL
) -> dict[str, m.Ran]:
    """Run one kind on all workers."""
    return await crew.ask(dict.fromkeys(workload.nodes(), m.Run(kind, way, version)), m.Ran, f"end of {kind}")


async def proved_round(crew: Crew, workload: Workload, kind: str, version: int) -> None:
    """Run one kind with values of its own, and compare everything that landed.

    Raises:
        SyncError: naming the workers with wrong elements.
    """
    workers = workload.nodes()
    await crew.ask(dict.fromkeys(workers, m.Fill(version)), m.Done, "fill")
    await one_round(crew, workload, kind, version)
    checked = await crew.ask(dict.fromkeys(workers, m.Check(version)), m.Checked, "comparison")
    wrong = {worker: reply.wrong_elements for worker, reply in checked.items() if reply.wrong_elements}
    if wrong:
        raise SyncError(f"{kind}: wrong elements landed: {', '.join(f'{w}: {n}' for w, n in sorted(wrong.items()))}")


def elapsed_s(ran: dict[str, m.Ran]) -> float:
    """From the first start to the last end."""
    return max(r.end_s for r in ran.values()) - min(r.begin_s for r in ran.values())


def _check_complete(plan: TransferPlan, ran: dict[str, m.Ran]) -> None:
    received = sum(r.stats.received_bytes for r in ran.values())
    expected = sum(plan.report()["bytes_by_stage"].values())
    if received != expected:
        raise SyncError(f"{plan.kind}: {received} bytes were received and checked, but the plan has {expected}")


def _result(bench: Bench, plans: dict[str, TransferPlan], rounds: dict[str, list[dict[str, m.Ran]]]) -> TransferResult:
    w, config = bench.workload, bench.config
    planned_s = median(elapsed_s(ran) for ran in rounds[PLANNED])
    return TransferResult(
        trainers=w.trainers,
        rollouts=w.rollouts,
        workers_per_host=w.workers_per_host,
        model_bytes=sum(plans[PLANNED].correspondence.table.class_bytes.tolist()),
        bucket_bytes=config.bucket_bytes,
        staging_bytes=config.staging_bytes,
        rounds=bench.rounds,
        link_mbps=bench.link_mbps,
        kinds=[_kind_result(plans[kind], rounds[kind], planned_s, config) for kind in KINDS],
    )


def _kind_result(
    plan: TransferPlan, rounds: list[dict[str, m.Ran]], planned_s: float, config: TransportConfig
) -> KindResult:
    report: dict[str, Any] = plan.report()
    times_s = [elapsed_s(ran) for ran in rounds]
    typical_s = median(times_s)
    worst = report["worst_link"]
    replies = [r for ran in rounds for r in ran.values()]
    return KindResult(
        kind=plan.kind,
        times_s=times_s,
        median_s=typical_s,
        ratio=typical_s / planned_s,
        predicted_s=predict(plan, staging_bytes=config.staging_bytes).seconds,
        bound_s=plan.bound.seconds,
        over_bound=typical_s / plan.bound.seconds,
        bytes_by_stage=report["bytes_by_stage"],
        busiest_link=worst,
        busiest_link_bytes=sum(report["bytes_by_link"][worst].values()) if worst else 0,
        peak_staging_bytes=max(r.peak_staging_bytes for r in replies),
        digests_checked=sum(r.stats.digests_checked for r in replies),
    )
