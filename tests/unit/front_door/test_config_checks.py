"""Bad settings: one clear line that names every setting involved."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.config import JobConfig, job_from_mapping, to_mapping
from rlbridge.config_parse import leaf_keys, parse_dataclass
from rlbridge.config_rules import check_prompt_length
from rlbridge.transport.errors import ConfigError


def job(**changes: Any) -> JobConfig:
    """The default GRPO job with ``changes``, whose keys have ``__`` for dots."""
    return job_from_mapping(changed({key.replace("__", "."): value for key, value in changes.items()}))


def changed(changes: Mapping[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(to_mapping(JobConfig(recipe="grpo")))
    for key, value in changes.items():
        *groups, name = key.split(".")
        place = values
        for group in groups:
            place = place[group]
        place[name] = value
    return values


def test_the_default_job_is_valid() -> None:
    assert job().recipe == "grpo"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("algorithm.clp", "algorithm.clip_low"),
        ("sync.max_stalness", "sync.max_staleness"),
        ("trainer.step", "trainer.steps"),
        ("sed", "seed"),
        ("rolout", "rollout"),
    ],
)
def test_an_unknown_key_is_named_in_full_with_the_nearest_one(key: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown setting '{key}'; did you mean '{nearest}'\?"):
        job_from_mapping(changed({key: 1}))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.steps", "abc", "expected a whole number"),
        ("trainer.steps", 1.5, "expected a whole number"),
        ("trainer.steps", 1 << 63, "at most 64 bits"),
        ("seed", 1 << 64, "at most 64 bits"),
        ("trainer.steps", True, "expected a whole number"),
        ("trainer.steps", None, "expected a whole number"),
        ("trainer.micro_batch_rows", "x", "expected a whole number or null"),
        ("trainer.learning_rate", "fast", "expected a number"),
        ("trainer.learning_rate", math.nan, "expected a finite number"),
        ("algorithm.normalize_std", "maybe", "expected true or false"),
        ("algorithm.normalize_std", 1, "expected true or false"),
        ("sync.mode", "fuly_async", "fully_async"),
        ("sync.at_bound", "hold", "one of wait, drop"),
        ("rollout.dtype", "bfloat", "did you mean 'bfloat16'"),
        ("model.path", 1.5, "expected text or null"),
        ("model", "tiny", "expected a group of settings"),
        ("tracking.wandb", False, "expected one of offline, online, disabled"),
    ],
)
def test_a_wrong_type_names_key_value_and_what_was_expected(key: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as error:
        job_from_mapping(changed({key: value}))
    assert key in str(error.value)
    assert repr(value) in str(error.value)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"algorithm.group_size": 1}, ["algorithm.group_size=1", "algorithm.advantage=group"]),
        ({"algorithm.group_size": 1, "algorithm.advantage": "rloo"}, ["group_size=1", "algorithm.advantage=rloo"]),
        ({"algorithm.aggregation": "constant"}, ["algorithm.aggregation=constant", "algorithm.constant_tokens=6"]),
        ({"algorithm.loss": "dual_clip", "algorithm.dual_clip_bound": 1.1}, ["dual_clip_bound=1.1", "clip_high=0.2"]),
        ({"algorithm.correction": "masked_token", "algorithm.is_cap": 0.9}, ["is_floor=0.5", "is_cap=0.9", "_token"]),
        ({"algorithm.kl_coef": -1.0}, ["algorithm.kl_coef=-1.0", "at least 0"]),
        (
            {"sync.mode": "fully_async", "algorithm.correction": "none"},
            ["algorithm.correction=none", "sync.max_staleness=4", "algorithm.allow_uncorrected"],
        ),
        ({"sync.max_staleness": 1, "algorithm.correction": "none"}, ["algorithm.correction", "sync.max_staleness=1"]),
        ({"algorithm.advantage": "gae"}, ["algorithm.advantage=gae", "recipe=grpo", "run ppo"]),
        ({"recipe": "ppo"}, ["algorithm.advantage=group", "recipe=ppo", "run grpo"]),
        (
            {"algorithm.prompts_per_step": 2, "algorithm.group_size": 2, "trainer.mini_batches": 5},
            ["trainer.mini_batches=5", "algorithm.prompts_per_step=2", "algorithm.group_size=2", "trainer.ranks=1"],
        ),
        ({"rollout.top_p": 0.9}, ["rollout.top_p=0.9"]),
        ({"rollout.top_k": 5}, ["rollout.top_k=5"]),
        ({"rollout.max_length": 6}, ["rollout.max_length=6", "task.max_new_tokens=6"]),
        ({"task.max_new_tokens": 5}, ["task.max_new_tokens=5", "task.digits=5", "needs 6"]),
        ({"task.name": "addition", "task.max_new_tokens": 6}, ["task.max_new_tokens=6", "needs 7"]),
        ({"task.path": "x"}, ["task.path=x", "task.name=sort"]),
        ({"task.name": "jsonl"}, ["task.name=jsonl", "task.path", "task.reward"]),
        ({"task.name": "jsonl", "task.path": "/no/such", "task.reward": "a:b"}, ["task.path=/no/such"]),
        ({"task.name": "jsonl", "task.path": __file__, "task.reward": "a.b"}, ["task.reward=a.b", "package.module:f"]),
        ({"transport.bucket_bytes": 2**30}, ["transport.bucket_bytes=1073741824", "transport.staging_bytes"]),
        ({"transport.node_gbps": "gpu07"}, ["transport.node_gbps=gpu07", "HOST=EXTERNAL/LOCAL"]),
        ({"transport.external_gbps": 0.0}, ["transport.external_gbps=0.0", "more than 0"]),
        ({"transport.heartbeat_s": 9}, ["transport.heartbeat_s=9", "transport.dead_after_s=10.0"]),
        ({"sync.export_dtype": "int8"}, ["sync.export_dtype=int8", "bfloat16"]),
        ({"trainer.steps": 0}, ["trainer.steps=0", "at least 1"]),
        ({"seed": -1}, ["seed=-1", "at least 0"]),
        ({"rollout.temperature": 0}, ["rollout.temperature=0", "more than 0"]),
        ({"sync.max_staleness": -1}, ["sync.max_staleness=-1"]),
        ({"trainer.beta1": 1}, ["trainer.beta1=1", "less than 1"]),
        ({"task.warmup_until": 1.1}, ["task.warmup_until=1.1", "between 0 and 1"]),
        ({"trainer.micro_batch_rows": 0}, ["trainer.micro_batch_rows=0"]),
        ({"transport.update_timeout_s": 0}, ["transport.update_timeout_s=0"]),
    ],
)
def test_a_contradiction_names_every_setting_involved(changes: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        job_from_mapping(changed(changes))
    for name in names:
        assert name in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sync.mode": "fully_async", "algorithm.correction": "none", "algorithm.allow_uncorrected": True},
        {"sync.mode": "fully_async", "sync.max_staleness": 0, "algorithm.correction": "none"},
        {"sync.mode": "fully_sync", "sync.max_staleness": 2},
        {"task.name": "jsonl", "task.path": __file__, "task.reward": "a.b:c"},
        {"name": 20261201},
    ],
)
def test_what_is_meant_is_accepted(changes: dict[str, Any]) -> None:
    job_from_mapping(changed(changes))


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        job(trainer__steps=0, rollout__top_k=1)
    assert len(str(error.value).splitlines()) == 2


def test_the_prompt_and_the_response_must_fit() -> None:
    check_prompt_length(job(rollout__max_length=16), longest_prompt=10)
    with pytest.raises(ConfigError, match=r"rollout\.max_length=16.*task\.max_new_tokens=6.*at least 17"):
        check_prompt_length(job(rollout__max_length=16), longest_prompt=11)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match="missing setting: recipe"):
        parse_dataclass(JobConfig, {})


@given(st.sampled_from(leaf_keys(JobConfig)), st.integers() | st.text(max_size=8) | st.booleans() | st.none())
def test_any_value_anywhere_is_accepted_or_refused_by_name(key: str, value: Any) -> None:
    try:
        job_from_mapping(changed({key: value}))
    except ConfigError as error:
        assert key in str(error)


def test_a_user_path_may_be_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "prompts.jsonl").write_text("")
    assert job(task__name="jsonl", task__path="~/prompts.jsonl", task__reward="a:b").task.path == "~/prompts.jsonl"
