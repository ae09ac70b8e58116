"""What a recipe's ``main()`` calls: command line in, exit status out.

Hydra composes, ``JobConfig`` is built once and validated, then the recipe's own ``run(job)`` is called: once, or once
for each job of a multirun, which ends at the first job that fails.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlbridge.config import JobConfig, job_from_mapping
from rlbridge.exit_status import exit_status
from rlbridge.overrides import CONFIG_PACKAGE, check_overrides, config_groups
from rlbridge.transport.errors import ConfigError

RunJob = Callable[[JobConfig], int]
"""Runs one job and returns its exit status."""


def recipe_main(recipe: str, run: RunJob) -> NoReturn:
    """Run ``recipe`` as ``sys.argv`` says and leave the process with its status.

    Status 0: done; 1: a run failed; 2: the configuration is wrong; 130: interrupted.
    """
    sys.exit(exit_status(lambda: _compose_and_run(recipe, run)))


def job_from_config(config: DictConfig) -> JobConfig:
    """Convert what Hydra composed.

    Raises:
        ConfigError: a value is missing, cannot be resolved, is unknown, or contradicts another one.
    """
    try:
        missing = sorted(OmegaConf.missing_keys(config))
        values = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{error.full_key} cannot be resolved: {reason}") from error
    if missing:
        raise ConfigError(f"{', '.join(missing)} must be given, e.g. {missing[0]}=VALUE")
    if not isinstance(values, dict):
        raise ConfigError("the configuration is not a mapping of settings")
    return job_from_mapping({str(key): value for key, value in values.items()})


def _compose_and_run(recipe: str, run: RunJob) -> int:
    arguments = _parse_arguments(sys.argv[1:])
    if not (arguments.shell_completion or arguments.hydra_help):
        extra = Path(arguments.config_dir) if arguments.config_dir else None
        check_overrides(arguments.overrides, config_groups(extra))

    def job_task(config: DictConfig) -> None:
        # Hydra turns exceptions into its own traces; an exit passes through, and ends a multirun at this job.
        status = exit_status(lambda: run(_checked_job(recipe, config)))
        if status:
            sys.exit(status)

    start: Any = hydra.main(version_base="1.3", config_path=f"pkg://{CONFIG_PACKAGE}", config_name=recipe)(job_task)
    try:
        start()
    except (HydraException, ValueError) as error:
        raise ConfigError(str(error)) from error
    return 0


def _checked_job(recipe: str, config: DictConfig) -> JobConfig:
    job = job_from_config(config)
    if job.recipe != recipe:
        raise ConfigError(f"recipe={job.recipe} cannot be run by recipe {recipe!r}; use `rlbridge run {job.recipe}`")
    return job


def _parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read Hydra's own arguments; moves overrides behind its flags, where Hydra takes them in any number."""
    parser = get_args_parser()
    parsed: argparse.Namespace = parser.parse_intermixed_args(list(arguments))
    flags = [argument for argument in arguments if argument not in parsed.overrides]
    sys.argv[1:] = [*flags, *parsed.overrides]
    return parsed
