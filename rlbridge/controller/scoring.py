"""Scoring: from token ids back to text, and from text to rewards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import anyio
import anyio.from_thread
from anyio.lowlevel import current_token

from rlbridge.controller.buffer import ScoredTrajectory
from rlbridge.rollout.tasks.base import Problem, Task
from rlbridge.rollout.trajectory import Trajectory
from rlbridge.trainer.messages import Example
from rlbridge.transport.errors import RewardError, TaskError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

P = ParamSpec("P")
T = TypeVar("T")


async def in_daemon_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``function`` in a thread that cannot keep the process alive.

    anyio's own worker threads are joined at exit: a reward function that never returns would hold up Ctrl-C for ever.
    """
    token, done, outcome = current_token(), anyio.Event(), Future[T]()

    def body() -> None:
        try:
            outcome.set_result(function(*args, **kwargs))
        except BaseException as error:
            outcome.set_exception(error)
        try:
            anyio.from_thread.run_sync(done.set, token=token)
        except anyio.RunFinishedError:
            return  # the run is over; nobody waits for this result any more

    threading.Thread(target=body, name="reward", daemon=True).start()
    await done.wait()
    return outcome.result()


@dataclass(frozen=True, slots=True)
class Scorer:
    """Turns text into tokens and trajectories into rewards with the run's task and the model's own tokenizer."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    vocabulary: int
    timeout_s: float

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """Token ids of texts, much faster than one by one.

        Raises:
            TaskError: a text gives no token, or one that the model has no embedding for.
        """
        if not texts:
            return []
        rows: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        unknown = self.tokenizer.unk_token_id
        for text, ids in zip(texts, rows, strict=True):
            if not ids:
                raise TaskError(f"the prompt {text!r} gives no token; give a prompt that is not empty")
            if max(ids) >= self.vocabulary or (unknown is not None and unknown in ids):
                raise TaskError(f"the tokenizer does not know all of {text!r}; use characters of its vocabulary")
        return rows

    def demonstrations(self, first: int, count: int) -> list[Example]:
        """Supervised pairs of ``count`` training problems from index ``first`` on; answers end with end-of-sequence."""
        problems = [self.task.train_prompt(first + i) for i in range(count)]
        pairs = [(problem.prompt, answer) for problem in problems if (answer := self.task.demonstration(problem))]
        prompts = self.encode_all([prompt for prompt, _ in pairs])
        answers = self.encode_all([answer for _, answer in pairs])
        end = self.tokenizer.eos_token_id
        return [Example(prompt, [*answer, end]) for prompt, answer in zip(prompts, answers, strict=True)]

    def decode(self, trajectories: list[Trajectory]) -> list[str]:
        """Responses as text, special tokens left out."""
        texts: list[str] = self.tokenizer.batch_decode([t.response_ids for t in trajectories], skip_special_tokens=True)
        return texts

    async def score(self, trajectories: list[Trajectory], problems: list[Problem]) -> list[ScoredTrajectory]:
        """Rewards of trajectories, computed in a thread so that a slow reward function holds up no message.

        Raises:
            RewardError: the reward function raised, took too long, or gave something that is no finite number.
        """
        with anyio.move_on_after(self.timeout_s):
            return await in_daemon_thread(self._score, trajectories, problems)
        raise RewardError(
            f"the reward function took more than {self.timeout_s:g} s for {len(trajectories)} responses; "
            "make it faster or raise task.reward_timeout_s"
        )

    def _score(self, trajectories: list[Trajectory], problems: list[Problem]) -> list[ScoredTrajectory]:
        texts = self.decode(trajectories)
        scored = []
        for trajectory, problem, text in zip(trajectories, problems, texts, strict=True):
            reward = self.task.reward(problem, text)
            scored.append(ScoredTrajectory(trajectory, reward, self.task.correct(problem, text, reward)))
        return scored
