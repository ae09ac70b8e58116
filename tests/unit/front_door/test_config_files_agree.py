"""The YAML files and the dataclasses behind them say the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from rlbridge.cli import recipe_names
from rlbridge.config import JobConfig, job_from_mapping, to_mapping, to_yaml
from rlbridge.config_parse import leaf_keys
from rlbridge.overrides import CONFIG_PACKAGE, config_groups
from rlbridge.sync.config import SyncMode

BASE_OPTIONS = {
    "algorithm": "grpo",
    "model": "tiny",
    "task": "sort",
    "trainer": "default",
    "rollout": "default",
    "sync": "fully_sync",
    "transport": "ucxx",
    "launcher": "local",
    "tracking": "default",
}
"""The option of each group that spells out the dataclass's own defaults."""

JSONL = ("task=jsonl", f"task.path={__file__}", "task.reward=a.b:c")


def compose_job(recipe: str, *overrides: str) -> dict[str, Any]:
    with initialize_config_module(CONFIG_PACKAGE, version_base="1.3"):
        values = OmegaConf.to_container(compose(recipe, list(overrides)), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_a_recipe_spells_out_every_key_and_no_other(recipe: str) -> None:
    assert sorted(key for key, _ in flatten(compose_job(recipe))) == sorted(leaf_keys(JobConfig))


@pytest.mark.parametrize("group", BASE_OPTIONS)
def test_the_base_option_of_each_group_is_the_dataclass(group: str) -> None:
    composed = compose_job("grpo", f"{group}={BASE_OPTIONS[group]}")[group]
    assert composed == to_mapping(JobConfig(recipe="grpo"))[group]


def test_every_group_of_the_dataclass_has_files_and_the_other_way_round() -> None:
    groups = {field.name for field in dataclasses.fields(JobConfig)} - {"recipe", "seed", "name"}
    assert set(config_groups()) == groups == set(BASE_OPTIONS)


@pytest.mark.parametrize(("group", "option"), [(g, o) for g, options in config_groups().items() for o in options])
def test_every_option_of_every_group_composes_to_a_valid_job(group: str, option: str) -> None:
    recipe = "ppo" if option == "ppo" else "grpo"
    overrides = JSONL if option == "jsonl" else (f"{group}={option}",)
    job = job_from_mapping(compose_job(recipe, *overrides))
    if group == "sync":
        assert job.sync.mode is SyncMode(option)


@pytest.mark.parametrize(
    ("recipe", "mode", "bound"),
    [("grpo", "fully_sync", 0), ("ppo", "fully_sync", 0)]
    + [("grpo", m, 4) for m in ("sender_staged", "receiver_staged", "fully_async")]
    + [("ppo", m, 2) for m in ("sender_staged", "receiver_staged", "fully_async")],
)
def test_the_staleness_bound_follows_mode_and_algorithm_unless_given(recipe: str, mode: str, bound: int) -> None:
    assert job_from_mapping(compose_job(recipe, f"sync={mode}")).sync.max_staleness == bound
    assert job_from_mapping(compose_job(recipe, f"sync={mode}", "sync.max_staleness=1")).sync.max_staleness == 1


def test_a_resolved_configuration_survives_its_yaml() -> None:
    job = job_from_mapping(compose_job("ppo", "sync=fully_async", "seed=3", "name=20261201"))
    again = OmegaConf.to_container(OmegaConf.create(to_yaml(job)))
    assert isinstance(again, dict)
    assert job_from_mapping({str(key): value for key, value in again.items()}) == job
    assert job.name == "20261201"


def test_every_recipe_has_a_configuration_of_its_name() -> None:
    assert recipe_names(), "no recipe found"
    for recipe in recipe_names():
        assert compose_job(recipe)["recipe"] == recipe
