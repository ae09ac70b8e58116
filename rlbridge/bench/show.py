"""Benchmark results as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from rlbridge.bench.loopback import LinkResult, LoopbackResult
from rlbridge.bench.transfer import TransferResult

_MB = 1e6


def show_transfer(console: Console, result: TransferResult) -> None:
    """The three kinds side by side, then where their bytes go."""
    where = "loopback, one host" if result.link_mbps is None else f"links of {result.link_mbps:g} Mbit/s"
    hosts = f"{result.trainers} trainer + {result.rollouts} rollout hosts x {result.workers_per_host} workers"
    console.print(
        f"{hosts}, {where}; {result.model_bytes / _MB:.1f} MB in buckets of up to {result.bucket_bytes / _MB:.2f} MB, "
        f"staging {result.staging_bytes / _MB:.0f} MB a worker; {result.rounds} rounds of each"
    )
    times = Table()
    for title in ("kind", "median s", "min s", "max s", "ratio", "bound s", "/ bound", "predicted s", "/ predicted"):
        times.add_column(title, justify="left" if title == "kind" else "right")
    for kind in result.kinds:
        figures = [kind.median_s, min(kind.times_s), max(kind.times_s), kind.ratio, kind.bound_s, kind.over_bound]
        figures += [kind.predicted_s, kind.median_s / kind.predicted_s]
        times.add_row(kind.kind, *(f"{figure:.3f}" for figure in figures))
    console.print(times)
    stages = list(dict.fromkeys(stage for kind in result.kinds for stage in kind.bytes_by_stage))
    loads = Table()
    for title in ("MB", *stages, "busiest link", "its MB", "peak staging MB", "digests checked"):
        loads.add_column(title, justify="left" if title in ("MB", "busiest link") else "right")
    for kind in result.kinds:
        by_stage = [f"{kind.bytes_by_stage.get(stage, 0) / _MB:.1f}" for stage in stages]
        loads.add_row(
            kind.kind,
            *by_stage,
            kind.busiest_link or "-",
            f"{kind.busiest_link_bytes / _MB:.1f}",
            f"{kind.peak_staging_bytes / _MB:.1f}",
            str(kind.digests_checked),
        )
    console.print(loads)


def show_loopback(console: Console, result: LoopbackResult) -> None:
    """Rates beside the bare transfer, then seconds per step."""
    console.print(
        f"one sender, one receiver; {result.model_bytes / _MB:.1f} MB in buckets of up to "
        f"{result.bucket_bytes / _MB:.2f} MB; {result.rounds} rounds of each"
    )
    rates = Table()
    for title in ("link", "way", "GB/s", "of bare"):
        rates.add_column(title, justify="left" if title in ("link", "way") else "right")
    for link in result.links:
        for way in link.ways:
            rates.add_row(link.link, way.way, f"{way.gb_per_s:.2f}", f"{way.share_of_bare:.0%}")
    console.print(rates)
    for link in result.links:
        _show_steps(console, link)


def _show_steps(console: Console, link: LinkResult) -> None:
    for side, steps in (("sender", link.sender_s), ("receiver", link.receiver_s)):
        parts = ", ".join(f"{step} {seconds:.3f}" for step, seconds in steps.items())
        console.print(f"full, {link.link}, {side}: {parts} s (summed over {link.buckets} buckets; steps overlap)")
