"""One sender, one receiver, one host: what the way of a bucket costs beside a bare UCXX transfer of the same buckets.

Three ways take turns: ``bare`` (UCXX's core API alone), ``carry`` (the transport, without packing) and ``full`` (the
executor: pack, digest, send, check, unpack), over shared memory and over TCP.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from rlbridge.bench import messages as m
from rlbridge.bench.crew import Crew
from rlbridge.bench.transfer import PLANNED, Bench, Tell, elapsed_s, make_plans, one_round, proved_round, set_up
from rlbridge.bench.workload import Workload
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.config import TransportConfig

_GB = 1e9
_WAYS = (m.Way.BARE, m.Way.CARRY, m.Way.FULL)
_PAIR = {"trainers": 1, "rollouts": 1, "workers_per_host": 1}


class WayResult(msgspec.Struct, frozen=True):
    """One way over one kind of link.

    Attributes:
        times_s: of each round.
        gb_per_s: at their median.
        share_of_bare: median over the rounds of the bare transfer's time over this way's in the same round.
    """

    way: str
    times_s: list[float]
    gb_per_s: float
    share_of_bare: float


class LinkResult(msgspec.Struct, frozen=True):
    """One kind of link.

    Attributes:
        link: ``"shared memory"`` or ``"tcp"``.
        sender_s, receiver_s: median seconds in each step of the full way, on each side; steps overlap, and waiting
            for the other side counts as sending or receiving.
    """

    link: str
    buckets: int
    ways: list[WayResult]
    sender_s: dict[str, float]
    receiver_s: dict[str, float]
    peak_staging_bytes: int


class LoopbackResult(msgspec.Struct, frozen=True):
    """The whole benchmark, ready for JSON."""

    model_bytes: int
    bucket_bytes: int
    staging_bytes: int
    rounds: int
    links: list[LinkResult]


async def bench_loopback(model_bytes: int, config: TransportConfig, rounds: int, tell: Tell) -> LoopbackResult:
    """Measure.

    Raises:
        ConfigError: the model is too small. WorkerError, DeadlineExceededError: a worker failed.
        SyncError: wrong bytes landed.
    """
    workload = Workload(**_PAIR, model_bytes=model_bytes)
    plan = make_plans(Bench(workload=workload, config=config, rounds=rounds))[PLANNED]
    links = []
    for shared_memory in (True, False):
        link_config = dataclasses.replace(config, shared_memory=shared_memory)
        links.append(
            await _link("shared memory" if shared_memory else "tcp", workload, plan, link_config, rounds, tell)
        )
    return LoopbackResult(
        model_bytes=sum(plan.report()["bytes_by_stage"].values()),
        bucket_bytes=config.bucket_bytes,
        staging_bytes=config.staging_bytes,
        rounds=rounds,
        links=links,
    )


async def _link(
    link: str, workload: Workload, plan: TransferPlan, config: TransportConfig, rounds: int, tell: Tell
) -> LinkResult:
    ran: dict[m.Way, list[dict[str, m.Ran]]] = {way: [] for way in _WAYS}
    with tempfile.TemporaryDirectory(prefix="rlbridge-bench-") as logs:
        async with Crew(Path(logs), config.connect_timeout_s + config.update_timeout_s) as crew:
            for worker in workload.nodes():
                await crew.start(worker)
            await set_up(crew, workload, config, {PLANNED: plan.program}, bare=True)
            await proved_round(crew, workload, PLANNED, 1)
            for way in _WAYS:
                await one_round(crew, workload, PLANNED, 2, way)
            for number in range(rounds):
                for way in (*_WAYS[number % 3 :], *_WAYS[: number % 3]):
                    ran[way].append(await one_round(crew, workload, PLANNED, 3 + number, way))
                    tell(f"{link}, round {number + 1}/{rounds}: {way} {elapsed_s(ran[way][-1]):.3f} s")
    size_bytes = sum(plan.report()["bytes_by_stage"].values())
    bare_s = [elapsed_s(replies) for replies in ran[m.Way.BARE]]
    full = ran[m.Way.FULL]
    return LinkResult(
        link=link,
        buckets=len(plan.buckets.route),
        ways=[_way(way, [elapsed_s(replies) for replies in ran[way]], bare_s, size_bytes) for way in _WAYS],
        sender_s=_steps([replies[workload.workers_of(0)[0]] for replies in full]),
        receiver_s=_steps([replies[workload.workers_of(1)[0]] for replies in full]),
        peak_staging_bytes=max(r.peak_staging_bytes for replies in full for r in replies.values()),
    )


def _way(way: m.Way, times_s: list[float], bare_s: list[float], size_bytes: int) -> WayResult:
    shares = [bare / own for bare, own in zip(bare_s, times_s, strict=True)]
    return WayResult(str(way), times_s, size_bytes / _GB / median(times_s), median(shares))


def _steps(replies: list[m.Ran]) -> dict[str, float]:
    return {step: median(reply.step_s[step] for reply in replies) for step in replies[0].step_s}
