"""What a task is. Prompts and responses are text here; tokens are the business of the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing to ask.

    Attributes:
        prompt: the text given to the policy.
        answer: a right response, if one is known.
        record: whatever else a reward needs (``jsonl``: the whole line).
    """

    prompt: str
    answer: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Task(Protocol):
    """Where prompts come from and what responses are worth."""

    def train_prompt(self, index: int) -> Problem:
        """Training problem number ``index`` (>= 0, without end). The same (seed, index) gives the same problem."""
        ...

    def eval_problems(self) -> list[Problem]:
        """The held-out problems: the same in every call, and never among the training problems."""
        ...

    def reward(self, problem: Problem, response: str) -> float:
        """What ``response`` (text without the end-of-sequence token) is worth.

        Raises:
            RewardError: the reward function raised, or returned something that is not a finite number.
        """
        ...

    def correct(self, problem: Problem, response: str, reward: float) -> bool:
        """Whether ``response``, which was worth ``reward``, counts as right in an evaluation."""
        ...

    def demonstration(self, problem: Problem) -> str | None:
        """A right response to imitate in the supervised warm-up, or ``None`` if the task has none."""
        ...
