"""Settings of tracking (config group ``tracking``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackingConfig:
    """What is recorded and shown of a run. ``metrics.jsonl`` and ``summary.json`` are always written.

    Attributes:
        wandb: ``offline`` (into the run's folder; upload later with ``wandb sync``), ``online`` or ``disabled``.
        project: the wandb project.
        runs_dir: where run folders go, relative to the current directory.
        progress: ``auto`` (``rich`` on a terminal, else ``plain``), ``rich``, ``plain`` or ``off``.
        plain_every_s: least seconds between two plain progress lines.
        dump_weights: keep what every worker held at each version, in ``weights/`` of the run's folder (for debugging).
    """

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "rlbridge"
    runs_dir: str = "runs"
    progress: Literal["auto", "rich", "plain", "off"] = "auto"
    plain_every_s: float = 5.0
    dump_weights: bool = False
