"""Run folders as a run leaves them, written by the product's own writers, without running anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlbridge.config import JobConfig, resolve
from rlbridge.sync.config import SyncConfig, SyncMode
from rlbridge.sync.stall import Span
from rlbridge.tracking.config import TrackingConfig
from rlbridge.tracking.metrics import MetricsWriter
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.tracking.summary import SUMMARY_KEYS, write_summary
from rlbridge.tracking.trace import write_trace

UPDATES = 12
SPANS: dict[str, list[Span]] = {
    "trainer-0": [
        span
        for version in range(UPDATES + 1)
        for span in (
            Span("idle/trainer/wait_for_data", 100.0 + version, 0.1, version),
            Span("work/trainer/step", 100.1 + version, 0.7, version),
            Span("stall/trainer", 100.8 + version, 0.02, version),
            Span("weights/snapshot", 100.805 + version, 0.005, version),
            Span("weights/transfer", 100.83 + version, 0.1, version),
        )
    ],
    "rollout-0": [
        span
        for version in range(UPDATES + 1)
        for span in (
            Span("work/rollout/decode", 100.2 + version, 0.6, version),
            Span("weights/transfer", 100.83 + version, 0.1, version),
            Span("stall/rollout", 100.94 + version, 0.01, version),
            Span("weights/apply", 100.941 + version, 0.008, version),
        )
    ],
}
"""Per update: the trainer stalls 20 ms (copy 5, waiting 15), the rollout 10 ms (copy 8, waiting 2)."""

SUMMARY: dict[str, Any] = dict.fromkeys(SUMMARY_KEYS) | {
    "recipe": "grpo",
    "sync_mode": "fully_async",
    "seed": 3,
    "exit_reason": "completed",
    "updates": UPDATES,
    "policy_version": UPDATES,
    "reward_first": 0.25,
    "reward_last": 0.875,
    "eval_accuracy_before": 0.5,
    "eval_accuracy": 0.96875,
    "agst_s": 0.015,
    "trainer_stall_s_per_update": 0.02,
    "rollout_stall_s_per_update": 0.01,
    "idle_s": {"idle/trainer/wait_for_data": 1.3, "idle/rollout/wait_for_prompts": 2.5},
    "transfer_s_per_update": 0.1,
    "lower_bound_s": 0.004,
    "bytes_per_update": 1_072_128,
    "max_staleness": 4,
    "max_staleness_seen": 2,
    "staleness_seen": {"0": 16, "1": 160, "2": 208},
    "generated": 400,
    "trained": 384,
    "dropped": 6,
    "queued": 10,
    "lost_replicas": [],
    "wall_s": 14.5,
    "tokens_per_s": 5012.5,
}

PLAN = {
    "epoch": 1,
    "bytes_total": 1_072_128,
    "trainer_egress_bytes": 536_064,
    "bytes_by_stage": {"receive": 536_064, "exchange": 0, "distribute": 536_064},
    "lower_bound_s": 0.004,
    "lower_bound_terms_s": {"node_import": 0.004, "local_copies": 0.001},
}


def write_run(runs: Path, name: str, summary: Mapping[str, Any] = SUMMARY) -> Path:
    """A whole run in ``runs/name``: configuration, metrics, trace, plan and ``summary``."""
    mode = SyncMode(summary["sync_mode"])
    tracking = TrackingConfig(runs_dir=str(runs), wandb="disabled")
    job = resolve(JobConfig(recipe="grpo", name=name, seed=3, sync=SyncConfig(mode=mode), tracking=tracking))
    folder = RunFolder.create(dataclasses.replace(job, name=name))
    writer = MetricsWriter(job, folder)
    writer.log("eval", 0, {"accuracy": 0.5, "reward": 0.5})
    for version in range(UPDATES):
        _write_step(writer, version)
    writer.log("eval", UPDATES, {"accuracy": 0.96875, "reward": 0.96875})
    writer.close({})
    folder.write_json("plan.json", PLAN)
    write_trace(folder.path / "trace.json", SPANS)
    write_summary(folder.path / "summary.json", summary)
    return folder.path


def _write_step(writer: MetricsWriter, version: int) -> None:
    rise = version / UPDATES
    books = {"generated": 32 * (version + 2), "dropped": version // 2, "queued": 32, "lost": 0}
    writer.log("rollout", version, {"reward": 0.25 + rise / 2, "accuracy": 0.2 + rise / 2, **books})
    writer.log("staleness", version, {"mean": 1.5, "max": 2, "min": 1})
    writer.log("train", version + 1, {"loss": -0.1})
    if version:
        writer.log("stall", version, {"trainer_s": 0.02, "rollout_s": 0.01})
    writer.log("idle", version + 1, {"trainer/wait_for_data": 0.1 * version, "rollout/wait_for_prompts": 0.2 * version})
    writer.log("weights", version + 1, {"publish_lag": version % 2})
    took = 0.08 + version / 300
    bound = {"transfer_s": took, "lower_bound_s": 0.004, "transfer_to_bound": took / 0.004}
    writer.log("weights", version + 1, {"bytes": 1_072_128, "trainer_egress_bytes": 536_064, **bound})
