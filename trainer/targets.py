"""What one training step pulls the policy towards, computed once before its first update. Pure.

Notation: ``B`` responses (rows), ``T`` tokens of the longest response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlbridge.trainer.advantages import (
    batch_normalized_advantages,
    generalized_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
)
from rlbridge.trainer.batch import Batch
from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.correction import importance_weights, rejects
from rlbridge.trainer.losses.divergence import kl_estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the weights of the step's start, and the reference model, say of every row; 0 where nobody asks.

    Attributes:
        logprobs: ``[B, T]``. values: ``[B, T + 1]`` of the critic. reference: ``[B, T]`` log probabilities.
    """

    logprobs: Tensor
    values: Tensor
    reference: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the policy is pulled towards, ``[b, T]`` each; the old policy is that of the step's start.

    ``returns`` and ``old_values`` matter with a critic only, ``reference_logprobs`` with a reference model.
    ``kept``: the tokens that count, in losses and in what they are divided by.
    """

    advantages: Tensor
    returns: Tensor
    old_logprobs: Tensor
    old_values: Tensor
    reference_logprobs: Tensor
    kept: Tensor

    def select(self, rows: Sequence[int]) -> Targets:
        """The targets of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        return replace(self, **{field.name: getattr(self, field.name)[index] for field in fields(self)})


def asks_first(algorithm: AlgorithmConfig) -> bool:
    """Whether the step's first mini-batch too needs the old policy's opinion before its own forward.

    Without a critic, a penalty in the reward or a correction that leaves tokens out, the first forward of the step
    tells it as well, since no update has moved the weights yet.
    """
    return algorithm.has_critic or rejects(algorithm) or (wants_reference(algorithm) and algorithm.kl_in == "reward")


def wants_reference(algorithm: AlgorithmConfig) -> bool:
    """Whether any coefficient asks for the reference model."""
    return algorithm.kl_coef > 0


def make_targets(batch: Batch, snapshot: Snapshot, algorithm: AlgorithmConfig) -> Targets:
    """Advantages, and which tokens count.

    Args:
        snapshot: of all rows if ``asks_first(algorithm)``; otherwise rows of the first mini-batch may be 0.
    """
    advantages, returns = advantages_and_returns(batch, snapshot, algorithm)
    kept = batch.mask
    if rejects(algorithm):
        weights = importance_weights(snapshot.logprobs, batch.behaviour_logprobs, batch.mask, algorithm)
        kept = kept & (weights > 0)
    return Targets(
        advantages=advantages,
        returns=returns,
        old_logprobs=snapshot.logprobs,
        old_values=snapshot.values[:, :-1],
        reference_logprobs=snapshot.reference,
        kept=kept,
    )


def advantages_and_returns(batch: Batch, snapshot: Snapshot, algorithm: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """Advantages ``[B, T]`` as ``algorithm.advantage`` names them, and the critic's targets ``[B, T]`` (0 without)."""
    zeros, penalty = torch.zeros_like(snapshot.logprobs), None
    if wants_reference(algorithm) and algorithm.kl_in == "reward":
        estimate = kl_estimate(snapshot.logprobs, snapshot.reference, batch.mask, algorithm.kl_estimator)
        penalty = algorithm.kl_coef * estimate
    if algorithm.advantage in ("group", "rloo"):
        rewards = batch.rewards if penalty is None else batch.rewards - penalty.sum(1)
        if algorithm.advantage == "rloo":
            relative = leave_one_out_advantages(rewards, batch.groups)
        else:
            relative = group_relative_advantages(rewards, batch.groups, normalize_std=algorithm.normalize_std)
        return relative[:, None].expand_as(zeros), zeros
    per_token = rewards_at_the_end(batch)
    if penalty is not None:
        per_token = per_token - penalty
    if algorithm.advantage == "reinforce_pp":
        return batch_normalized_advantages(per_token, batch.mask, gamma=algorithm.gamma), zeros
    return generalized_advantages(
        per_token,
        snapshot.values[:, :-1],
        # A response that hit the token limit was scored as it stands, so its episode is over; one that the engine
        # gave back unfinished would have gone on.
        torch.where(batch.interrupted, snapshot.values.gather(1, batch.lengths[:, None]).squeeze(1), 0.0),
        batch.mask,
        gamma=algorithm.gamma,
        gae_lambda=algorithm.gae_lambda,
    )


def rewards_at_the_end(batch: Batch) -> Tensor:
    """``[B, T]``: the reward of a response arrives with the last token that the policy chose."""
    chosen_from_here = batch.mask.long().flip(1).cumsum(1).flip(1)
    return torch.where(batch.mask & (chosen_from_here == 1), batch.rewards[:, None], 0.0)
