"""Prompts from a file and rewards from a user's function: what works, and what each mistake says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlbridge.rollout.config import TaskConfig
from rlbridge.rollout.tasks import Task, make_task
from rlbridge.transport.errors import ConfigError, RewardError, TaskError

REWARDS = """
import json
calls = []
def length(*, prompt, response, record):
    calls.append((prompt, response, record))
    return len(response) / record["wanted"]
def broken(*, prompt, response, record):
    raise KeyError("wanted")
def leaves(*, prompt, response, record):
    raise SystemExit(3)
def returns_record(*, prompt, response, record):
    return record["value"] if "value" in record else None
number = 3
"""


@pytest.fixture(autouse=True)
def _rewards_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards_for_jsonl.py").write_text(REWARDS)
    (tmp_path / "script_that_exits.py").write_text("import sys; sys.exit(0)")
    monkeypatch.syspath_prepend(str(tmp_path))


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def task(path: Path, reward: str = "length", seed: int = 0, **settings: Any) -> Task:
    name = reward if reward.count(":") or not reward.isidentifier() else f"user_rewards_for_jsonl:{reward}"
    return make_task(
        TaskConfig(**{"name": "jsonl", "path": str(path), "reward": name, "eval_fraction": 0.0, **settings}), seed
    )


def records(count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"question {i}", "wanted": 4, "answer": "four"} for i in range(count)]


def test_rewards_are_called_with_prompt_response_and_record(tmp_path: Path) -> None:
    made = task(write(tmp_path / "data.jsonl", *records(1)))
    problem = made.train_prompt(0)
    assert made.reward(problem, "ab") == 0.5
    assert not made.correct(problem, "ab", 0.5)
    assert made.correct(problem, "abcd", 1.0)
    assert made.demonstration(problem) == "four"
    import user_rewards_for_jsonl  # type: ignore[import-not-found]

    assert ("question 0", "ab", records(1)[0]) in user_rewards_for_jsonl.calls


def test_each_pass_over_the_file_is_a_new_order_of_all_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", *records(10))
    made = task(path)
    passes = [[made.train_prompt(start + i).prompt for i in range(10)] for start in (0, 10)]
    assert passes[0] != passes[1]
    assert sorted(passes[0]) == sorted(passes[1]) == [f"question {i}" for i in range(10)]
    assert [made.train_prompt(i).prompt for i in range(10)] == passes[0]
    assert [task(path, seed=1).train_prompt(i).prompt for i in range(10)] != passes[0]


def test_held_out_prompts_are_never_trained_on(tmp_path: Path) -> None:
    lines = records(40) + records(40)  # the same prompts twice must not straddle the split
    made = task(write(tmp_path / "data.jsonl", *lines), eval_fraction=0.25)
    held_out = {problem.prompt for problem in made.eval_problems()}
    trained = {made.train_prompt(i).prompt for i in range(200)}
    assert len(held_out) == 10
    assert len(trained) == 30
    assert not held_out & trained
    assert len(task(tmp_path / "data.jsonl", eval_fraction=0.25, eval_prompts=3).eval_problems()) == 3


def test_unicode_line_separators_do_not_end_a_line(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False)
    made = task(write(tmp_path / "data.jsonl", line, "", "  "))
    assert made.train_prompt(0).prompt == "a\u2028b"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{", {"prompt": "x"}], r"data\.jsonl, line 1: not valid JSON"),
        ([{"prompt": "x"}, "[1]"], r"line 2: a list, not an object"),
        (
            [{"prompt": "x"}, {"question": "y"}],
            r'line 2: needs a field "prompt" with text; its fields are \[\'question\'\]',
        ),
        ([{"prompt": ""}], "line 1: needs a field"),
        ([{"prompt": 3}], "line 1: needs a field"),
        (["[" * 100_000], "line 1: not valid JSON"),
        ([{"prompt": "x"}, {"prompt": "\ud800"}], "line 2: holds half of a surrogate pair"),
        ([{"prompt": "x", "answer": "\udfff"}], "line 1: holds half of a surrogate pair"),
        ([""], "holds no prompts"),
    ],
)
def test_bad_files_are_named_with_the_line(lines: list[Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=words):
        task(write(tmp_path / "data.jsonl", *lines))


def test_a_missing_or_binary_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"nowhere\.jsonl cannot be read"):
        task(tmp_path / "nowhere.jsonl")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TaskError, match="UTF-8"):
        task(tmp_path / "binary")


def test_a_file_too_small_to_hold_anything_out_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"set task\.eval_fraction=0"):
        task(write(tmp_path / "data.jsonl", *records(1)), eval_fraction=0.1)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ("no colon", "malformed; write package.module:function"),
        ("no_such_module_here:f", "importing no_such_module_here failed with ModuleNotFoundError.* PYTHONPATH"),
        ("script_that_exits:f", "importing script_that_exits failed with SystemExit: 0"),
        ("user_rewards_for_jsonl:absent", "user_rewards_for_jsonl has no 'absent'"),
        ("user_rewards_for_jsonl:number", "is a int, not a function"),
    ],
)
def test_unusable_reward_names_are_explained(reward: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        task(write(tmp_path / "data.jsonl", *records(1)), reward)


@pytest.mark.parametrize("settings", [{"path": None}, {"reward": None}, {"eval_fraction": 1.0}])
def test_missing_settings_are_named(settings: dict[str, Any], tmp_path: Path) -> None:
    (name,) = settings
    path = write(tmp_path / "data.jsonl", *records(2))
    reward = "user_rewards_for_jsonl:length"
    config: dict[str, Any] = {"name": "jsonl", "path": str(path), "reward": reward, **settings}
    with pytest.raises(ConfigError, match=rf"task\.{name}"):
        make_task(TaskConfig(**config), 0)


def test_a_reward_that_raises_is_reported_with_its_prompt_and_cause(tmp_path: Path) -> None:
    made = task(write(tmp_path / "data.jsonl", *records(1)), "broken")
    with pytest.raises(
        RewardError, match="prompt 'question 0', response 'hello': it raised KeyError: 'wanted'"
    ) as caught:
        made.reward(made.train_prompt(0), "hello")
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_reward_that_exits_is_reported_like_one_that_raises(tmp_path: Path) -> None:
    made = task(write(tmp_path / "data.jsonl", *records(1)), "leaves")
    with pytest.raises(RewardError, match="it raised SystemExit: 3"):
        made.reward(made.train_prompt(0), "hello")


@pytest.mark.parametrize(
    ("value", "good"), [(1, True), (0.5, True), (True, True), ("0.5", False), (None, False), ([], False)]
)
def test_only_numbers_are_rewards(value: Any, good: bool, tmp_path: Path) -> None:
    made = task(write(tmp_path / "data.jsonl", {"prompt": "x", "value": value}), "returns_record")
    problem = made.train_prompt(0)
    if good:
        assert made.reward(problem, "y") == float(value)
    else:
        with pytest.raises(RewardError, match="which is not a finite number"):
            made.reward(problem, "y")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("-inf")])
def test_numbers_that_are_not_finite_are_refused(value: Any, tmp_path: Path) -> None:
    from rlbridge.rollout.tasks.base import Problem

    made = task(write(tmp_path / "data.jsonl", *records(1)), "returns_record")
    with pytest.raises(RewardError, match="which is not a finite number"):
        made.reward(Problem("x", record={"value": value}), "y")
    assert made.reward(Problem("x", record={"value": np.float32(0.25)}), "y") == 0.25
