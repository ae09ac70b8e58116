"""What a mode costs in host memory, computed from layouts and programs before anything is allocated. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from rlbridge.sync.config import OnBusy, SyncConfig
from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.messages import Join
from rlbridge.sync.opaque import EXPORT, WHOLE
from rlbridge.sync.plan.program import HEADER_BYTES, Program
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import ConfigError

_LISTED = 8


class MemoryCost(msgspec.Struct, frozen=True):
    """Most bytes that the bridge holds on one worker, beside the live weights.

    Attributes:
        snapshot_bytes: a sender's slots, each a copy of all that it may be asked for.
        staging_bytes: a receiver's staged version.
        whole_bytes: whole checkpoint tensors for, or from, a loader that computes; those in snapshots count there.
        pool_bytes: bucket buffers.
    """

    snapshot_bytes: int = 0
    staging_bytes: int = 0
    whole_bytes: int = 0
    pool_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.snapshot_bytes + self.staging_bytes + self.whole_bytes + self.pool_bytes


def memory_cost(join: Join, program: Program, sync: SyncConfig, transport: TransportConfig) -> MemoryCost:
    """What the mode costs the worker that said ``join`` and runs ``program``."""
    if join.role == "sender":
        return _sender_cost(join.layout, program, sync, transport)
    return _receiver_cost(join.layout, program, sync, transport)


def snapshot_bytes(layout: SourceMap) -> int:
    """Bytes of one copy of everything that a sender with this layout may be asked for."""
    return sum(_sizes(layout, _sent(layout)))


def _sent(layout: SourceMap) -> set[str]:
    return {box.runtime for box in (*layout.boxes, *layout.aliases)}


def _sender_cost(layout: SourceMap, program: Program, sync: SyncConfig, transport: TransportConfig) -> MemoryCost:
    exported = {name for name in _sent(layout) if name.startswith(EXPORT)}
    pool_bytes = _pool_bytes((b.payload_bytes for b in program.buckets), transport.staging_bytes)
    if not sync.mode.sender_staging:  # what was exported stays until the version is out
        return MemoryCost(whole_bytes=sum(_sizes(layout, exported)), pool_bytes=pool_bytes)
    slots = 1 if sync.on_busy is OnBusy.BLOCK else 2
    one_bytes = max(_sizes(layout, exported), default=0)  # exported one by one, each copied at once
    return MemoryCost(snapshot_bytes=slots * snapshot_bytes(layout), whole_bytes=one_bytes, pool_bytes=pool_bytes)


def _receiver_cost(layout: SourceMap, program: Program, sync: SyncConfig, transport: TransportConfig) -> MemoryCost:
    wholes = _sizes(layout, (name for name in layout.runtime if name.startswith(WHOLE)))
    if not sync.mode.receiver_staging:  # the whole tensors come out of the budget for bucket buffers
        budget_bytes = transport.staging_bytes - sum(wholes)
        pool_bytes = _pool_bytes((b.payload_bytes for b in program.buckets), budget_bytes)
        return MemoryCost(whole_bytes=sum(wholes), pool_bytes=pool_bytes)
    kept = sum(HEADER_BYTES + b.payload_bytes for b in program.buckets if b.pieces)
    # All buckets: a version that this worker holds already goes through bucket buffers if it is sent again for others.
    pool_bytes = _pool_bytes((b.payload_bytes for b in program.buckets), transport.staging_bytes)
    return MemoryCost(staging_bytes=kept, whole_bytes=max(wholes, default=0), pool_bytes=pool_bytes)


def _sizes(layout: SourceMap, names: Iterable[str]) -> list[int]:
    specs = [layout.runtime[name] for name in names]
    return [math.prod(spec.shape) * item_bytes(spec.dtype) for spec in specs]


def _pool_bytes(payloads_bytes: Iterable[int], budget_bytes: int) -> int:
    """A pool holds at most its budget, or one bucket that is larger than that."""
    sizes = [HEADER_BYTES + size for size in payloads_bytes]
    return max(min(sum(sizes), budget_bytes), max(sizes, default=0))


def refuse_beyond(costs: Mapping[str, MemoryCost], members: Sequence[Join], sync: SyncConfig) -> None:
    """Refuse a plan that needs more memory than there is.

    Args:
        costs: by worker.
        members: who they are; each says how much its host has left, before the bridge allocates anything.

    Raises:
        ConfigError: a worker needs more than ``sync.memory_bytes``, or, without that, the workers of a host together
            more than its available memory; the text names bytes, budget and what would help.
    """
    if sync.memory_bytes is not None:
        over = [w for w in costs if costs[w].total_bytes > sync.memory_bytes]
        if over:
            raise ConfigError(_too_much(costs, over, f"sync.memory_bytes={sync.memory_bytes} for each worker", sync))
        return
    hosts: dict[str, list[Join]] = {}
    for join in members:
        hosts.setdefault(join.address.node, []).append(join)
    for host, joins in hosts.items():
        available_bytes = max(join.available_bytes for join in joins)
        workers = [join.worker for join in joins]
        if available_bytes and sum(costs[w].total_bytes for w in workers) > available_bytes:
            raise ConfigError(_too_much(costs, workers, f"{available_bytes} bytes available on {host}", sync))


def _too_much(costs: Mapping[str, MemoryCost], workers: Sequence[str], budget: str, sync: SyncConfig) -> str:
    listed = "".join(f"\n  {worker}: {describe(costs[worker])}" for worker in workers[:_LISTED])
    more = f"\n  and {len(workers) - _LISTED} more" if len(workers) > _LISTED else ""
    total_bytes = sum(costs[worker].total_bytes for worker in workers)
    mends = []
    if any(costs[w].snapshot_bytes for w in workers):
        mends += ["sync.on_busy=block (one snapshot instead of two)"] if sync.on_busy is not OnBusy.BLOCK else []
        mends += ["a mode without sender staging"]
    mends += ["a mode without receiver staging"] if any(costs[w].staging_bytes for w in workers) else []
    mends += ["a smaller transport.staging_bytes"]
    needed_bytes = max(costs[worker].total_bytes for worker in workers)
    return (
        f"sync={sync.mode} needs {total_bytes} bytes of host memory, more than {budget}:{listed}{more}"
        f"\nChoose {', '.join(mends)}, or, if there is more, set sync.memory_bytes={needed_bytes} (of each worker)."
    )


def describe(cost: MemoryCost) -> str:
    """One line of what is not zero."""
    parts = {
        "snapshots": cost.snapshot_bytes,
        "staged version": cost.staging_bytes,
        "whole tensors": cost.whole_bytes,
        "bucket buffers": cost.pool_bytes,
    }
    listed = ", ".join(f"{name} {size}" for name, size in parts.items() if size)
    return f"{cost.total_bytes} bytes" + (f" ({listed})" if listed else "")


def table(costs: Mapping[str, MemoryCost]) -> dict[str, Any]:
    """For the plan's report: each worker's parts and their sum, in bytes."""
    return {w: msgspec.to_builtins(cost) | {"total_bytes": cost.total_bytes} for w, cost in costs.items()}
