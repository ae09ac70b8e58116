"""``summary.json``: a run in one flat file, for people and for scripts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbridge.tracking.run_folder import write_json

SUMMARY_KEYS = (
    "recipe",
    "sync_mode",
    "seed",
    "updates",
    "policy_version",
    "reward_first",
    "reward_last",
    "eval_accuracy",
    "agst_s",
    "trainer_stall_s_per_update",
    "rollout_stall_s_per_update",
    "transfer_s_per_update",
    "lower_bound_s",
    "bytes_per_update",
    "max_staleness_seen",
    "generated",
    "trained",
    "dropped",
    "queued",
    "wall_s",
    "tokens_per_s",
    "exit_reason",
)
"""What every summary has, however its run ended; a value that was never measured is ``null``."""


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary`` atomically.

    Raises:
        KeyError: a key of ``SUMMARY_KEYS`` is missing.
    """
    missing = [key for key in SUMMARY_KEYS if key not in summary]
    if missing:
        raise KeyError(f"summary without {', '.join(missing)}")
    write_json(path, summary)
