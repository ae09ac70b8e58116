"""A job's whole configuration as frozen dataclasses.

Hydra composes YAML (``conf/``); ``job_from_mapping`` converts the result once, strictly, and nothing behind it sees an
untyped setting. Each group's dataclass lives beside the code it configures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rlbridge.config_parse import parse_dataclass
from rlbridge.config_rules import validate
from rlbridge.launcher.config import LauncherConfig
from rlbridge.model import ModelConfig
from rlbridge.rollout.config import RolloutConfig, TaskConfig
from rlbridge.sync.config import SyncConfig, SyncMode
from rlbridge.tracking.config import TrackingConfig
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.transport.config import TransportConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """One job.

    Attributes:
        recipe: the recipe that runs it.
        seed: of weights, prompts and sampling, at least 0.
        name: the run folder's name; ``None`` makes one from recipe, mode, seed and time.
        algorithm, model, task, trainer, rollout, sync, transport, launcher, tracking: the config groups.
    """

    recipe: str
    seed: int = 0
    name: str | None = None
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)


def job_from_mapping(values: Mapping[str, Any]) -> JobConfig:
    """Convert a composed configuration, resolve what depends on other settings, and validate it.

    Raises:
        ConfigError: see ``config_parse`` and ``config_rules``; the text names the keys.
    """
    job = resolve(parse_dataclass(JobConfig, values))
    validate(job)
    return job


def resolve(job: JobConfig) -> JobConfig:
    """Fill in ``sync.max_staleness``: 0 for ``fully_sync``, else the algorithm's default."""
    if job.sync.max_staleness is not None:
        return job
    fully_sync = job.sync.mode is SyncMode.FULLY_SYNC
    bound = 0 if fully_sync else job.algorithm.default_max_staleness
    return dataclasses.replace(job, sync=dataclasses.replace(job.sync, max_staleness=bound))


def to_mapping(job: JobConfig) -> dict[str, Any]:
    """The job as plain dictionaries and scalars; ``job_from_mapping`` gives it back."""
    plain = dataclasses.asdict(job, dict_factory=lambda items: {k: _plain(v) for k, v in items})
    return dict(plain)


def to_yaml(job: JobConfig) -> str:
    """The resolved configuration as YAML, as a run's ``config.yaml`` holds it."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(to_mapping(job))))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, StrEnum) else value
