"""The run's record: everything that is measured, on its way to metrics, progress, trace and summary.

One object, one writer per run. The controller tells it what happened; it decides what that is called and where it goes.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from rlbridge.config import JobConfig
from rlbridge.controller.buffer import Counts, Group, RolloutBuffer
from rlbridge.controller.evaluation import Evaluation
from rlbridge.controller.ledger import StallLedger
from rlbridge.rollout.messages import RolloutReport
from rlbridge.sync.coordinator import PlanMade, UpdateDone
from rlbridge.sync.stall import Span, now_s
from rlbridge.tracking.metrics import MetricsWriter
from rlbridge.tracking.progress import Progress, StepView, open_progress
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.tracking.summary import write_summary
from rlbridge.tracking.trace import write_trace
from rlbridge.trainer.messages import Started

logger = logging.getLogger(__name__)

TARGET_ACCURACY = 0.9
"""``time_to_target_s`` is when the running mean of rollout accuracy first reaches this."""

RUNNING_MEAN_STEPS = 10


@dataclass(slots=True)
class Totals:
    """What the summary adds up over the run."""

    tokens: int = 0
    reward_first: float | None = None
    reward_last: float | None = None
    eval_before: float | None = None
    eval_after: float | None = None
    time_to_target_s: float | None = None
    transfer_s: list[float] = field(default_factory=list)
    lower_bound_s: float = 0.0
    bytes_per_update: int = 0
    digests_checked: int = 0
    train_tokens_on_version: int = 0
    train_tokens: int = 0
    lost_replicas: list[str] = field(default_factory=list)


def without_family(metrics: dict[str, float]) -> dict[str, float]:
    """``{"train/loss": 1.0}`` as ``{"loss": 1.0}``: the writer adds the family itself."""
    return {name.split("/", 1)[-1]: value for name, value in metrics.items()}


class RunRecord:
    """Collects one run. ``close`` writes the summary whatever happened before; nothing is kept only in memory."""

    def __init__(self, job: JobConfig, folder: RunFolder) -> None:
        self.job, self.folder = job, folder
        self.ledger = StallLedger(job.trainer.ranks, job.rollout.replicas)
        self.totals = Totals()
        self._metrics = MetricsWriter(job, folder)
        self._progress: Progress = open_progress(job)
        self._spans: dict[str, list[Span]] = {}
        self._accuracy: deque[float] = deque(maxlen=RUNNING_MEAN_STEPS)
        self._began_s = now_s()
        self._training_began_s: float | None = None
        self._steps_ended, self._version = 0, 0
        self._step: dict[str, Any] = {}
        self._counts, self._staleness_seen = Counts(), Counter[int]()
        self._rollout_tokens = 0
        self._closed = False

    # -- what happened -------------------------------------------------------------------------------------------------

    def planned(self, event: PlanMade) -> None:
        """A plan was made: the first, or a new one after a replica was lost."""
        self.folder.write_json("plan.json", {"epoch": event.epoch, **event.report})
        self.totals.lower_bound_s = float(event.report["lower_bound_s"])
        megabytes, buckets = event.report["bytes_total"] / 1e6, event.report["buckets"]
        self._progress.message(f"plan {event.epoch}: {megabytes:.2f} MB in {buckets} buckets an update")

    def warmed_up(self, started: Started) -> None:
        """Version 0 is published."""
        if started.warmup_steps:
            values = {"steps": started.warmup_steps, "expected_accuracy": started.warmup_accuracy}
            values |= without_family(started.metrics)
            self._metrics.log("warmup", started.warmup_steps, values)
            self._progress.message(
                f"warm-up: {started.warmup_steps} supervised steps, expected accuracy {started.warmup_accuracy:.2f}"
            )

    def evaluated(self, when: str, evaluation: Evaluation) -> None:
        """The held-out set was answered ``before`` or ``after`` training."""
        if not evaluation.problems:
            return
        if when == "before":
            self.totals.eval_before = evaluation.accuracy
        else:
            self.totals.eval_after = evaluation.accuracy
        self._metrics.log("eval", self._steps_ended, {"accuracy": evaluation.accuracy, "reward": evaluation.reward})
        self._progress.message(f"held-out accuracy {when} RL: {evaluation.accuracy:.3f}")

    def books_of(self, buffer: RolloutBuffer) -> None:
        """The run counts its trajectories in ``buffer``; the summary has them however early it ends."""
        self._counts, self._staleness_seen = buffer.counts, buffer.staleness_seen

    def step_began(self, version: int, batch: list[Group], waited_s: float) -> None:
        """A batch was taken; the trainer gets it at ``version``."""
        if self._training_began_s is None:
            self._training_began_s = now_s()
        scored = [item for group in batch for item in group.scored]
        ages = [version - item.trajectory.oldest_version for item in scored]
        for item in scored:
            for span in item.trajectory.versions:
                self.totals.train_tokens += span.stop - span.start
                self.totals.train_tokens_on_version += (span.stop - span.start) * (span.version == version)
        reward, accuracy = fmean(item.reward for item in scored), fmean(item.correct for item in scored)
        lengths = [len(item.trajectory.response_ids) for item in scored]
        self._step = {
            "began_s": now_s(),
            "reward": reward,
            "accuracy": accuracy,
            "staleness": fmean(ages),
            "tokens": sum(lengths),
        }
        self._accuracy.append(accuracy)
        self._reach_target()
        if self.totals.reward_first is None:
            self.totals.reward_first = reward
        self.totals.reward_last = reward
        counts = self._counts
        self._metrics.log(
            "rollout",
            version,
            {
                "reward": reward,
                "accuracy": accuracy,
                "response_length": fmean(lengths),
                "tokens_per_s": self._tokens_per_s(),
                "wait_for_batch_s": waited_s,
                "generated": counts.generated,
                "dropped": counts.dropped,
                "queued": counts.queued,
                "lost": counts.lost,
                "aborted": counts.aborted,
            },
        )
        self._metrics.log("staleness", version, {"mean": fmean(ages), "max": max(ages), "min": min(ages)})

    def _reach_target(self) -> None:
        full = len(self._accuracy) == RUNNING_MEAN_STEPS
        if self.totals.time_to_target_s is None and full and fmean(self._accuracy) >= TARGET_ACCURACY:
            self.totals.time_to_target_s = now_s() - self._began_s

    def step_ended(self, version: int, metrics: dict[str, float], held: dict[int, int]) -> None:
        """The trainer is at ``version`` now."""
        self._steps_ended += 1
        step_s = max(1e-9, now_s() - self._step["began_s"])
        self._metrics.log("train", version, without_family(metrics) | {"tokens_per_s": self._step["tokens"] / step_s})
        lag = version - min(held.values()) if held else 0
        stall = self._log_stall(version - 1)  # the update to this version has only begun
        self._version = version
        self._metrics.log("idle", version, {name.removeprefix("idle/"): s for name, s in self.ledger.idle_s().items()})
        self._metrics.log("weights", version, {"publish_lag": lag})
        elapsed_s = now_s() - (self._training_began_s or now_s())
        total = self.job.trainer.steps
        self._progress.step(
            StepView(
                step=self._steps_ended,
                total=total,
                reward=self._step["reward"],
                accuracy=self._step["accuracy"],
                tokens_per_s=self._tokens_per_s(),
                version=version,
                staleness=self._step["staleness"],
                trainer_stall_s=stall["trainer"],
                rollout_stall_s=stall["rollout"],
                eta_s=elapsed_s / self._steps_ended * (total - self._steps_ended),
            )
        )

    def _log_stall(self, version: int) -> dict[str, float]:
        """Stall of the update to ``version`` by side; the initial delivery is start-up and not logged."""
        stall = {side: self.ledger.stall_s(side, version) for side in ("trainer", "rollout")}
        if version > 0:
            self._metrics.log("stall", version, {f"{side}_s": value for side, value in stall.items()})
        return stall

    def updated(self, event: UpdateDone) -> None:
        """Every replica has applied a version."""
        stats = event.stats
        self.ledger.took_part(event.version, len(stats.sender_stall_s), len(stats.receiver_stall_s))
        self.totals.digests_checked += stats.digests_checked
        self.totals.bytes_per_update = stats.bytes_total
        if event.version > 0:
            self.totals.transfer_s.append(stats.transfer_s)
        ratio = stats.transfer_s / stats.lower_bound_s if stats.lower_bound_s else 0.0
        self._metrics.log(
            "weights",
            event.version,
            {
                "bytes": stats.bytes_total,
                "trainer_egress_bytes": stats.trainer_egress_bytes,
                "transfer_s": stats.transfer_s,
                "lower_bound_s": stats.lower_bound_s,
                "transfer_to_bound": ratio,
            },
        )

    def reported(self, worker: str, report: RolloutReport) -> None:
        """A rollout worker reported time and tokens."""
        self._rollout_tokens += report.tokens
        self.add_spans(worker, report.spans)

    def add_spans(self, worker: str, spans: list[Span]) -> None:
        """Spans of one worker, for the ledger and the trace."""
        self.ledger.add(spans)
        self._spans.setdefault(worker, []).extend(spans)

    def lost_replica(self, replica: int, reason: str, requests: int) -> None:
        """A rollout worker is gone and the run goes on without it."""
        self.totals.lost_replicas.append(reason)
        logger.warning("rollout-%d is lost: %s", replica, reason)
        self._progress.message(f"rollout-{replica} is lost; {requests} requests are issued again. {reason}")

    # -- the end -------------------------------------------------------------------------------------------------------

    def _tokens_per_s(self) -> float:
        began = self._training_began_s
        return self._rollout_tokens / max(1e-9, now_s() - began) if began else 0.0

    def close(self, exit_reason: str) -> None:
        """Write trace and summary, close the metrics, show the final table. Called once, however the run ended."""
        if self._closed:
            return
        self._closed = True
        summary = self.summary(exit_reason)
        try:
            self._log_stall(self._version)
            write_summary(self.folder.path / "summary.json", summary)
            write_trace(self.folder.path / "trace.json", self._spans)
        finally:
            self._metrics.close(summary)
            self._progress.close(summary, self.folder)

    def summary(self, exit_reason: str) -> dict[str, Any]:
        """The content of ``summary.json`` (design.md, section 6)."""
        job, totals, updates = self.job, self.totals, self._steps_ended
        counts, seen = self._counts, self._staleness_seen
        return {
            "recipe": job.recipe,
            "sync_mode": job.sync.mode.value,
            "seed": job.seed,
            "exit_reason": exit_reason,
            "updates": updates,
            "updates_delivered": len(totals.transfer_s),
            "policy_version": updates,
            "reward_first": totals.reward_first,
            "reward_last": totals.reward_last,
            "eval_accuracy_before": totals.eval_before,
            "eval_accuracy": totals.eval_after,
            "time_to_target_s": totals.time_to_target_s,
            "agst_s": self.ledger.agst_s(updates),
            "trainer_stall_s_per_update": self.ledger.stall_per_update_s("trainer", updates),
            "rollout_stall_s_per_update": self.ledger.stall_per_update_s("rollout", updates),
            "idle_s": self.ledger.idle_s(),
            "transfer_s_per_update": median(totals.transfer_s) if totals.transfer_s else None,
            "lower_bound_s": totals.lower_bound_s,
            "bytes_per_update": totals.bytes_per_update,
            "digests_checked": totals.digests_checked,
            "max_staleness": job.sync.max_staleness,
            "max_staleness_seen": max(seen, default=0),
            "staleness_seen": {str(age): seen[age] for age in sorted(seen)},
            "trained_tokens": totals.train_tokens,
            "trained_tokens_on_trainer_version": totals.train_tokens_on_version,
            "generated": counts.generated,
            "trained": counts.trained,
            "dropped": counts.dropped,
            "queued": counts.queued,
            "lost": counts.lost,
            "aborted": counts.aborted,
            "lost_replicas": totals.lost_replicas,
            "wall_s": now_s() - self._began_s,
            "tokens_per_s": self._tokens_per_s(),
        }
