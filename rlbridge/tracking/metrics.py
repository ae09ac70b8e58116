"""The run's one metrics writer: ``metrics.jsonl`` always, wandb as configured.

Metrics come in families, each with its own step axis: a weight update, a training step and an evaluation do not tick
together.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from rlbridge.config import JobConfig, to_mapping
from rlbridge.tracking.run_folder import RunFolder
from rlbridge.transport.errors import ConfigError

FAMILIES = ("train", "rollout", "eval", "warmup", "staleness", "stall", "idle", "weights")


class MetricsWriter:
    """Writes metrics of one run. Only one process, the controller, owns one.

    Raises:
        ConfigError: wandb cannot start.
    """

    def __init__(self, job: JobConfig, folder: RunFolder) -> None:
        self._file = (folder.path / "metrics.jsonl").open("ab")
        try:
            self._wandb = _start_wandb(job, folder)
        except ConfigError:
            self._file.close()
            raise

    def log(self, family: str, step: int, values: Mapping[str, float]) -> None:
        """Write one line: ``family``, ``step`` on the family's own axis, ``time_s`` since the Unix epoch, the values.

        Raises:
            ValueError: the family is unknown.
        """
        if family not in FAMILIES:
            raise ValueError(f"unknown family of metrics {family!r}; choose one of {', '.join(FAMILIES)}")
        line = {"family": family, "step": step, "time_s": time.time(), **values}
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()
        if self._wandb is not None:
            self._wandb.log({f"{family}/step": step} | {f"{family}/{name}": value for name, value in values.items()})

    def close(self, summary: Mapping[str, Any]) -> None:
        """Close the file, hand wandb the summary, end its processes. Idempotent."""
        self._file.close()
        if self._wandb is not None:
            import wandb

            run, self._wandb = self._wandb, None
            run.summary.update(dict(summary))
            run.finish()
            wandb.teardown()


def _start_wandb(job: JobConfig, folder: RunFolder) -> Any:
    mode = job.tracking.wandb
    if mode == "disabled":
        return None
    import wandb

    try:
        run = wandb.init(
            project=job.tracking.project,
            name=folder.name,
            dir=folder.path,
            mode=mode,
            config=to_mapping(job),
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
    except Exception as error:  # wandb raises its own errors, those of its transport and of the file system
        wandb.teardown()
        raise ConfigError(
            f"tracking.wandb={mode}: wandb could not start ({type(error).__name__}: {error}); "
            "use tracking.wandb=offline, or tracking.wandb=disabled to do without it"
        ) from error
    for family in FAMILIES:
        run.define_metric(f"{family}/step", hidden=True)
        run.define_metric(f"{family}/*", step_metric=f"{family}/step")
    return run
