"""Prompts from a JSONL file, rewards from the user's own function."""

from __future__ import annotations

import importlib
import json
import math
import random
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

import xxhash

from rlbridge.rollout.tasks.base import Problem
from rlbridge.transport.errors import ConfigError, RewardError, TaskError

Reward = Callable[..., Any]


class JsonlTask:
    """One JSON object a line, with at least ``prompt``; an ``answer`` serves as demonstration where there is one.

    Args:
        path: the file.
        reward: ``package.module:function``, called as ``f(prompt=..., response=..., record=...) -> float``.
        seed: chooses the order of training problems; each is used once before any is used again.
        eval_prompts: most held-out problems.
        eval_fraction: share of the distinct prompts that is held out, in [0, 1).

    Raises:
        ConfigError: a setting is missing or malformed, or the reward function cannot be imported.
        TaskError: the file cannot be read (names the line), or is too small to hold anything out.
    """

    def __init__(self, *, path: str, reward: str, seed: int, eval_prompts: int, eval_fraction: float) -> None:
        if not 0.0 <= eval_fraction < 1.0:
            raise ConfigError(f"task.eval_fraction={eval_fraction} is outside [0, 1)")
        self._reward_name = reward
        self._reward = import_reward(reward)
        self._seed = seed
        problems = read_problems(Path(path).expanduser())
        held_out = _held_out_prompts({problem.prompt for problem in problems}, eval_fraction)
        self._train = [problem for problem in problems if problem.prompt not in held_out]
        self._eval = [problem for problem in problems if problem.prompt in held_out][:eval_prompts]
        if eval_fraction and eval_prompts and not self._eval:
            raise TaskError(f"task.path={path} has one distinct prompt and none to hold out; set task.eval_fraction=0")
        self._order: tuple[int, list[int]] = (-1, [])

    def train_prompt(self, index: int) -> Problem:
        """Problem ``index`` of an endless sequence of shuffled passes over the file."""
        epoch, position = divmod(index, len(self._train))
        if self._order[0] != epoch:
            order = list(range(len(self._train)))
            random.Random(f"{self._seed} {epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._train[self._order[1][position]]

    def eval_problems(self) -> list[Problem]:
        """Held-out lines, in the order of the file."""
        return self._eval

    def reward(self, problem: Problem, response: str) -> float:
        """What the user's function says."""
        about = f"reward {self._reward_name} on prompt {_excerpt(problem.prompt)}, response {_excerpt(response)}"
        try:
            value = self._reward(prompt=problem.prompt, response=response, record=problem.record)
        except (Exception, SystemExit) as error:  # a function that exits must not end the run without a word
            raise RewardError(f"{about}: it raised {type(error).__name__}: {error}") from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise RewardError(f"{about}: it returned {_excerpt(repr(value))}, which is not a finite number")
        return float(value)

    def correct(self, problem: Problem, response: str, reward: float) -> bool:
        """Whether the reward is at least 1."""
        return reward >= 1.0

    def demonstration(self, problem: Problem) -> str | None:
        """The line's ``answer``, if it has one."""
        return problem.answer


def read_problems(path: Path) -> list[Problem]:
    """All lines of the file; blank ones are not lines.

    Raises:
        TaskError: the file is missing, empty or unreadable, or a line is not an object with a prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: JSON text may hold U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"task.path={path} cannot be read: {error}; give a UTF-8 JSONL file") from error
    problems = [_read_line(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise TaskError(f"task.path={path} holds no prompts")
    return problems


def import_reward(name: str) -> Reward:
    """Find ``package.module:function``.

    Raises:
        ConfigError: the name is malformed, or leads to nothing that can be called.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"task.reward={name} is malformed; write package.module:function")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a script without a __main__ guard exits when imported
        raise ConfigError(
            f"task.reward={name}: importing {module_name} failed with {type(error).__name__}: {error}; "
            "install it or put its folder on PYTHONPATH"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "has no" if function is None else f"is a {type(function).__name__}, not a function, under"
        raise ConfigError(f"task.reward={name}: {module_name} {found} {attribute!r}")
    return function  # type: ignore[no-any-return]


def _read_line(line: str, where: str) -> Problem:
    try:
        record = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise TaskError(f"{where}: not valid JSON ({error}); write one object a line") from error
    if not isinstance(record, dict):
        raise TaskError(f'{where}: a {type(record).__name__}, not an object; write {{"prompt": ...}}')
    prompt, answer = record.get("prompt"), record.get("answer")
    if not isinstance(prompt, str) or not prompt:
        raise TaskError(f'{where}: needs a field "prompt" with text; its fields are {sorted(record)}')
    if not _is_unicode(prompt) or (isinstance(answer, str) and not _is_unicode(answer)):
        raise TaskError(f"{where}: holds half of a surrogate pair (an escape \\ud800 to \\udfff), which is no text")
    return Problem(prompt, answer if isinstance(answer, str) else None, record)


def _is_unicode(text: str) -> bool:
    """Whether ``text`` can be encoded: JSON escapes can name lone surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _held_out_prompts(prompts: set[str], fraction: float) -> set[str]:
    """The share of distinct prompts with the smallest hashes; at least one prompt stays for training."""
    count = min(math.ceil(len(prompts) * fraction), len(prompts) - 1)
    return set(sorted(prompts, key=lambda prompt: (xxhash.xxh3_64_intdigest(prompt.encode()), prompt))[:count])


def _excerpt(text: str, length: int = 60) -> str:
    return repr(text if len(text) <= length else text[:length] + "…")
