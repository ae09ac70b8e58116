"""Evaluation: greedy answers to the held-out problems, by whatever version the replicas hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from rlbridge.controller.buffer import ScoredTrajectory
from rlbridge.rollout.tasks.base import Problem
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams

EVAL_GROUP = -1
"""Group number of evaluation requests: they belong to no batch and no count."""


@dataclass(slots=True)
class Evaluation:
    """One pass over the held-out set, spread over the replicas and kept apart from training requests."""

    problems: list[Problem]
    requests: dict[int, GenerationRequest] = field(default_factory=dict)
    done: anyio.Event = field(default_factory=anyio.Event)
    _problem_of: dict[int, Problem] = field(default_factory=dict)
    _placed: dict[int, int] = field(default_factory=dict)
    _correct: int = 0
    _reward: float = 0.0
    _answered: int = 0

    @classmethod
    def of(
        cls,
        problems: list[Problem],
        encode_all: Callable[[list[str]], list[list[int]]],
        next_request_id: Callable[[], int],
        max_new_tokens: int,
    ) -> Evaluation:
        """Prepare one greedy request per problem."""
        evaluation = cls(problems)
        sampling = SamplingParams(max_new_tokens=max_new_tokens, greedy=True)
        prompts = encode_all([problem.prompt for problem in problems])
        for index, (problem, prompt_ids) in enumerate(zip(problems, prompts, strict=True)):
            request_id = next_request_id()
            evaluation.requests[request_id] = GenerationRequest(request_id, EVAL_GROUP, index, prompt_ids, 0, sampling)
            evaluation._problem_of[request_id] = problem
        if not evaluation.requests:
            evaluation.done.set()
        return evaluation

    def asks(self, request_id: int) -> bool:
        """Whether the request belongs to this evaluation and is still open."""
        return request_id in self.requests

    def problem_of(self, request_id: int) -> Problem:
        """The problem that an open request asks."""
        return self._problem_of[request_id]

    def accept(self, scored: ScoredTrajectory) -> None:
        """Enter one answer; the last one sets ``done``."""
        if self.requests.pop(scored.trajectory.request_id, None) is None:
            return
        self._correct += scored.correct
        self._reward += scored.reward
        self._answered += 1
        if not self.requests:
            self.done.set()

    def again(self, request_id: int) -> None:
        """The sequence was given back unfinished: the next ``deal`` hands its request out once more."""
        self._placed.pop(request_id, None)

    def deal(self, replicas: list[int]) -> dict[int, list[GenerationRequest]]:
        """The open requests that no live replica holds, dealt out evenly over ``replicas``."""
        homeless = [request for i, request in self.requests.items() if self._placed.get(i) not in replicas]
        shares = {replica: homeless[i :: len(replicas)] for i, replica in enumerate(replicas)}
        self._placed.update((request.request_id, replica) for replica, share in shares.items() for request in share)
        return {replica: share for replica, share in shares.items() if share}

    @property
    def accuracy(self) -> float:
        """Share of correct answers."""
        return self._correct / max(1, self._answered)

    @property
    def reward(self) -> float:
        """Mean reward."""
        return self._reward / max(1, self._answered)
