"""From trajectories to tensors, and which rows are computed when and by whom. Pure.

Notation: ``B`` responses (rows), ``T`` tokens of the longest response, ``S`` tokens of the longest prompt plus
response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rlbridge.rollout.trajectory import Trajectory
from rlbridge.transport.errors import TrainingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Prompts and responses, padded on the right, with everything that the loss asks of them.

    Padding follows the real tokens, and attention is causal, so no real token ever sees it: no attention mask is
    needed. Which tokens count is known from lengths alone; a pad token that is also the end-of-sequence token keeps
    its loss where it was sampled.

    Attributes:
        input_ids: ``[B, S]`` prompt, response, padding.
        positions: ``[B, T + 1]`` column of ``input_ids`` whose output is the state *before* response token ``t`` (it
            predicts that token); one entry after the last token is the state in which the response ended.
        response_ids: ``[B, T]``.
        mask: ``[B, T]`` true on response tokens, the end-of-sequence token included.
        behaviour_logprobs: ``[B, T]`` as reported by the sampler; 0 in padding.
        lengths: ``[B]`` response tokens.
        rewards: ``[B]``.
        groups: ``[B]`` rows of one prompt share a number.
        truncated: ``[B]`` true where generation reached the token limit.
        interrupted: ``[B]`` true where the engine gave the response back unfinished.
    """

    input_ids: Tensor
    positions: Tensor
    response_ids: Tensor
    mask: Tensor
    behaviour_logprobs: Tensor
    lengths: Tensor
    rewards: Tensor
    groups: Tensor
    truncated: Tensor
    interrupted: Tensor

    @property
    def rows(self) -> int:
        """``B``."""
        return int(self.input_ids.shape[0])

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return int(self.mask.sum())

    def select(self, rows: Sequence[int]) -> Batch:
        """The batch of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        return replace(self, **{field.name: getattr(self, field.name)[index] for field in fields(self)})

    def without(self, rows: Tensor) -> Batch:
        """The batch in which no token of the marked rows ``[B]`` counts; lengths stay what was generated."""
        return replace(self, mask=self.mask & ~rows[:, None])

    def filler(self) -> Batch:
        """One row in which no token counts: lets a rank without work take part in a collective forward."""
        row = self.select([0])
        return replace(row, mask=torch.zeros_like(row.mask), lengths=torch.zeros_like(row.lengths))


def collate(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Batch:
    """Tensors of prompts and their responses; rewards, logprobs and flags are zero, each row is its own group.

    Raises:
        TrainingError: no rows, or an empty prompt (nothing would predict the first response token).
    """
    if not prompts:
        raise TrainingError("a training batch has no rows; it needs at least one trajectory")
    for row, prompt in enumerate(prompts):
        if not prompt:
            raise TrainingError(f"row {row} of the training batch has an empty prompt; it needs at least one token")
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    lengths = torch.tensor([len(response) for response in responses])
    rows, longest = len(prompts), int(lengths.max())
    token = torch.arange(longest + 1)
    return Batch(
        input_ids=_padded([[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]),
        positions=prompt_lengths[:, None] - 1 + torch.minimum(token, lengths[:, None]),
        response_ids=_padded(responses),
        mask=token[:-1] < lengths[:, None],
        behaviour_logprobs=torch.zeros(rows, longest),
        lengths=lengths,
        rewards=torch.zeros(rows),
        groups=torch.arange(rows),
        truncated=torch.zeros(rows, dtype=torch.bool),
        interrupted=torch.zeros(rows, dtype=torch.bool),
    )


def collate_trajectories(trajectories: Sequence[Trajectory], rewards: Sequence[float]) -> Batch:
    """Tensors of one training step, rows ordered by (group, sample) whatever the order of arrival.

    Raises:
        TrainingError: no rows; rewards, logprobs or tokens that do not match; a number that is not finite.
    """
    if len(trajectories) != len(rewards):
        raise TrainingError(f"{len(trajectories)} trajectories came with {len(rewards)} rewards")
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        _check(trajectory, reward)
    order = sorted(range(len(rewards)), key=lambda row: (trajectories[row].group, trajectories[row].sample))
    ordered = [trajectories[row] for row in order]
    batch = collate([item.prompt_ids for item in ordered], [item.response_ids for item in ordered])
    return replace(
        batch,
        behaviour_logprobs=_padded([item.logprobs for item in ordered], torch.float32),
        rewards=torch.tensor([rewards[row] for row in order], dtype=torch.float32),
        groups=torch.tensor([item.group for item in ordered]),
        truncated=torch.tensor([item.finish_reason == "length" for item in ordered]),
        interrupted=torch.tensor([item.finish_reason == "abort" for item in ordered]),
    )


class MiniBatchPlan(NamedTuple):
    """Rows of one optimiser update: those of all ranks, and this rank's own by micro-batch."""

    rows: list[int]
    micro_batches: list[list[int]]


def plan_rows(
    rows: int, *, mini_batches: int, micro_batch_rows: int | None, rank: int, world: int
) -> list[MiniBatchPlan]:
    """Which rows ``rank`` computes, in which update and which forward.

    Mini-batches are contiguous and as equal as can be; ranks take every ``world``-th row of each. All ranks get equally
    many micro-batches, since their forwards are collective: an empty one stands where a rank has no row left.

    Raises:
        TrainingError: fewer rows than mini-batches.
    """
    if rows < mini_batches:
        raise TrainingError(f"{rows} rows cannot be split into trainer.mini_batches={mini_batches}; lower it")
    bounds = [rows * part // mini_batches for part in range(mini_batches + 1)]
    plan = []
    for start, stop in pairwise(bounds):
        own = list(range(start + rank, stop, world))
        most = math.ceil((stop - start) / world)
        size = min(micro_batch_rows or most, most)
        micro_batches = [own[first : first + size] for first in range(0, most, size)]
        plan.append(MiniBatchPlan(list(range(start, stop)), micro_batches))
    return plan


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.long) -> Tensor:
    """``[B, longest]``, zeros on the right."""
    longest = max(len(row) for row in rows)
    return torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], dtype=dtype)


def _check(trajectory: Trajectory, reward: float) -> None:
    name = f"trajectory {trajectory.request_id}"
    if len(trajectory.logprobs) != len(trajectory.response_ids):
        raise TrainingError(
            f"{name} has {len(trajectory.response_ids)} tokens but {len(trajectory.logprobs)} log probabilities"
        )
    if not all(map(math.isfinite, trajectory.logprobs)):
        raise TrainingError(f"{name}: the sampler reported a log probability that is not finite")
    if not math.isfinite(reward):
        raise TrainingError(f"{name}: its reward is {reward}; rewards must be finite")
