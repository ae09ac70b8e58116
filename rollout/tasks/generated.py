"""Built-in tasks with exact answers: sort, reverse and addition of digits.

Every problem has a number in ``[0, size)``. A hash of that number alone, not of the seed, decides whether it is held
out, so that training and evaluation never meet and runs of different seeds answer the same evaluation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from math import gcd

import xxhash

from rlbridge.rollout.tasks.base import Problem
from rlbridge.transport.errors import ConfigError

_HELD_OUT_OF = 8
"""One problem in 8 is held out."""


class GeneratedTask(ABC):
    """A task whose problems are numbered.

    Args:
        digits: length of the problem.
        size: how many problems there are.
        longest_answer: characters of the longest answer.
        seed: chooses the order of training problems.
        partial_credit: reward the share of right positions instead of an exact match.
        max_new_tokens: cut of a response, checked against the longest answer and its end of sequence.
        eval_prompts: how many held-out problems are wanted; small tasks give all that they have.

    Raises:
        ConfigError: a setting is out of range.
    """

    def __init__(
        self,
        *,
        digits: int,
        size: int,
        longest_answer: int,
        seed: int,
        partial_credit: bool,
        max_new_tokens: int,
        eval_prompts: int,
    ) -> None:
        if max_new_tokens <= longest_answer:
            raise ConfigError(
                f"task.max_new_tokens={max_new_tokens} cuts the longest answer of task.digits={digits} "
                f"({longest_answer} characters and the end of sequence); set it to {longest_answer + 1}"
            )
        self.digits = digits
        self._size = size
        self._seed = seed
        self._partial_credit = partial_credit
        self._held_out = self._choose_held_out(eval_prompts)
        if eval_prompts and not self._held_out:
            raise ConfigError(f"task.digits={digits} leaves no problem to hold out; raise it")

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """Problem ``number`` of ``[0, size)``."""

    def train_prompt(self, index: int) -> Problem:
        """The first problem of this index's own pseudo-random sequence that is not held out."""
        draws = (_hash(f"train {self._seed} {index} {attempt}") % self._size for attempt in count())
        return self.problem(next(number for number in draws if not _is_held_out(number)))

    def eval_problems(self) -> list[Problem]:
        """Distinct held-out problems, spread evenly over all problems."""
        return [self.problem(number) for number in self._held_out]

    def reward(self, problem: Problem, response: str) -> float:
        """1 for the exact answer, else 0 or the share of positions that are right (of the longer of the two texts)."""
        if not self._partial_credit:
            return float(response == problem.answer)
        answer = problem.answer or ""
        right = sum(a == b for a, b in zip(answer, response, strict=False))
        return right / max(len(answer), len(response))

    def correct(self, problem: Problem, response: str, reward: float) -> bool:
        """Whether the response is the answer, character by character."""
        return response == problem.answer

    def demonstration(self, problem: Problem) -> str | None:
        """The answer."""
        return problem.answer

    def _choose_held_out(self, wanted: int) -> list[int]:
        """Walk over all problems once, in strides near the golden section of ``size``, and keep the held-out ones."""
        stride = next(s for s in count(int(self._size * 0.618) or 1) if gcd(s, self._size) == 1)
        chosen: list[int] = []
        for step in range(self._size):
            if len(chosen) == wanted:
                break
            if _is_held_out(number := step * stride % self._size):
                chosen.append(number)
        return chosen


class SortTask(GeneratedTask):
    """``40213=`` is answered by ``01234``."""

    def problem(self, number: int) -> Problem:
        """The number's digits, with leading zeros."""
        text = f"{number:0{self.digits}d}"
        return Problem(f"{text}=", "".join(sorted(text)))


class ReverseTask(GeneratedTask):
    """``40213=`` is answered by ``31204``."""

    def problem(self, number: int) -> Problem:
        """The number's digits, with leading zeros."""
        text = f"{number:0{self.digits}d}"
        return Problem(f"{text}=", text[::-1])


class AdditionTask(GeneratedTask):
    """``12+34=`` is answered by ``46``."""

    def problem(self, number: int) -> Problem:
        """Two numbers of ``digits`` digits, without leading zeros."""
        lowest = addend_range(self.digits).start
        first, second = divmod(number, len(addend_range(self.digits)))
        first, second = first + lowest, second + lowest
        return Problem(f"{first}+{second}=", str(first + second))


def addend_range(digits: int) -> range:
    """The numbers of exactly ``digits`` digits; 0 has one digit."""
    return range(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _is_held_out(number: int) -> bool:
    return _hash(f"held out {number}") % _HELD_OUT_OF == 0


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())
