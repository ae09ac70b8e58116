"""Built-in tasks: right answers, exact and partial rewards, a held-out set that training never meets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.rollout.config import TaskConfig
from rlbridge.rollout.tasks import Task, make_task
from rlbridge.transport.errors import ConfigError

NAMES = ["sort", "reverse", "addition"]


def task(name: str, seed: int = 0, digits: int = 4, **settings: Any) -> Task:
    config: Any = {"name": name, "digits": digits, "max_new_tokens": digits + 2, "eval_prompts": 200, **settings}
    return make_task(TaskConfig(**config), seed)


def solve(name: str, prompt: str) -> str:
    assert prompt.endswith("=")
    body = prompt[:-1]
    if name == "addition":
        first, second = body.split("+")
        return str(int(first) + int(second))
    return "".join(sorted(body)) if name == "sort" else body[::-1]


@pytest.mark.parametrize("name", NAMES)
@given(index=st.integers(0, 10**9), seed=st.integers(0, 2**31), digits=st.integers(2, 9))
def test_answers_are_right_and_rewarded(name: str, index: int, seed: int, digits: int) -> None:
    made = task(name, seed, digits, eval_prompts=4)
    assert isinstance(made, Task)
    problem = made.train_prompt(index)
    answer = solve(name, problem.prompt)
    assert problem == made.train_prompt(index)
    assert {len(part) for part in problem.prompt[:-1].split("+")} == {digits}
    assert made.demonstration(problem) == answer
    assert made.reward(problem, answer) == 1.0
    assert made.correct(problem, answer, 1.0)
    for wrong in (answer[:-1], answer + "0", "", answer.replace(answer[0], "x")):
        assert made.reward(problem, wrong) == 0.0
        assert not made.correct(problem, wrong, 0.0)


def test_the_examples_of_the_documentation() -> None:
    for name, prompt, answer in [
        ("sort", "40213=", "01234"),
        ("reverse", "40213=", "31204"),
        ("addition", "12+34=", "46"),
    ]:
        assert solve(name, prompt) == answer


def test_partial_credit_is_the_share_of_right_positions() -> None:
    made = task("sort", digits=4, partial_credit=True)
    problem = made.train_prompt(0)
    answer = problem.answer or ""
    assert made.reward(problem, answer) == 1.0
    assert made.reward(problem, "x" + answer[1:]) == 0.75
    assert made.reward(problem, answer[:2]) == 0.5
    assert made.reward(problem, answer * 2) == 0.5
    assert made.reward(problem, "") == 0.0
    assert not made.correct(problem, answer[:2], 0.5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("digits", [2, 3, 5])
def test_training_never_meets_the_held_out_problems(name: str, digits: int) -> None:
    everything = task(name, digits=digits, eval_prompts=10**9 if digits == 2 else 500)
    held_out = [problem.prompt for problem in everything.eval_problems()]
    seen = {everything.train_prompt(index).prompt for index in range(5000)}
    assert held_out
    assert len(held_out) == len(set(held_out))
    assert not seen & set(held_out)


def test_seeds_share_the_evaluation_but_not_the_training_order() -> None:
    one, other = task("sort", seed=1), task("sort", seed=2)
    assert one.eval_problems() == other.eval_problems() == one.eval_problems()
    assert len(one.eval_problems()) == 200
    assert [one.train_prompt(i) for i in range(20)] != [other.train_prompt(i) for i in range(20)]


def test_held_out_problems_cover_the_whole_range() -> None:
    first_digits = {problem.prompt[0] for problem in task("sort", digits=5).eval_problems()}
    assert first_digits == set("0123456789")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"digits": 0}, r"task\.digits=0 is outside 1 to 18"),
        ({"digits": 19}, r"task\.digits=19"),
        ({"max_new_tokens": 4}, r"task\.max_new_tokens=4 cuts the longest answer .* set it to 5"),
        ({"max_new_tokens": 0}, r"task\.max_new_tokens=0"),
        ({"eval_prompts": -1}, r"task\.eval_prompts=-1"),
        ({"name": "multiply"}, r"task\.name=multiply is unknown; choose one of sort, reverse, addition, jsonl"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task(**{"name": "sort", **settings})
