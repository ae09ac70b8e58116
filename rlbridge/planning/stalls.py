"""How long each side would stand still in each mode. Pure.

The rule is the table of docs/design.md, section 4. *Transfer* is the predicted time of the plan. *Snapshot*: with
sender staging all trainer ranks copy, at the same time, the runtime tensors that they may be asked for; the rank with
the most bytes decides. *Apply*: with receiver staging all rollout ranks copy their staged bytes into place; again the
largest decides. Loaders that compute, and waiting for a step boundary or for quiescence, are not in the figures.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from rlbridge.sync.config import SyncMode
from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.memory import snapshot_bytes


class CopyCost(msgspec.Struct, frozen=True):
    """The copies of staging, on the worker that has the most of them.

    Attributes:
        snapshot_bytes: of a trainer rank.
        apply_bytes: of a rollout rank.
        bytes_per_s: at which a worker copies; assumed, not measured.
    """

    snapshot_bytes: int
    apply_bytes: int
    bytes_per_s: float


class ModeStall(msgspec.Struct, frozen=True):
    """Seconds per update for which each side stands still."""

    mode: SyncMode
    trainer_s: float
    rollout_s: float


def copy_cost(correspondence: Correspondence, bytes_per_s: float) -> CopyCost:
    """What staging copies for one update."""
    table = correspondence.table
    applied: dict[str, int] = defaultdict(int)
    for key, size_bytes in zip(table.classes, table.class_bytes.tolist(), strict=True):
        for worker in key.needers:
            applied[worker] += size_bytes
    distinct = {id(layout): layout for layout in correspondence.senders.values()}
    most_bytes = max((snapshot_bytes(layout) for layout in distinct.values()), default=0)
    return CopyCost(most_bytes, max(applied.values(), default=0), bytes_per_s)


def predict_stalls(transfer_s: float, cost: CopyCost) -> list[ModeStall]:
    """The stall of every mode.

    Args:
        transfer_s: predicted time of one update.
        cost: of the copies.
    """
    snapshot_s, apply_s = cost.snapshot_bytes / cost.bytes_per_s, cost.apply_bytes / cost.bytes_per_s
    return [
        ModeStall(
            mode,
            snapshot_s if mode.sender_staging else transfer_s,
            apply_s if mode.receiver_staging else transfer_s,
        )
        for mode in SyncMode
    ]
