"""The loss of some rows: the terms of ``losses`` put together as the algorithm says, and what is worth logging.

Notation: ``b`` rows, ``T`` tokens of the longest response, ``V`` words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from rlbridge.trainer.batch import Batch
from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses import (
    PolicyLoss,
    TokenStatistics,
    approximate_kl,
    clipped_policy_loss,
    clipped_value_loss,
    masked_mean,
    token_statistics,
    truncated_importance_weights,
)
from rlbridge.trainer.metrics import Statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """What the policy is pulled towards, ``[b, T]`` each; the old policy is that of the step's start.

    ``returns`` and ``old_values`` matter to PPO only.
    """

    advantages: Tensor
    returns: Tensor
    old_logprobs: Tensor
    old_values: Tensor

    def select(self, rows: Sequence[int]) -> Targets:
        """The targets of these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        return replace(self, **{field.name: getattr(self, field.name)[index] for field in fields(self)})


def objective(
    logits: Tensor,
    values: Tensor | None,
    batch: Batch,
    targets: Targets,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    mini_batch_tokens: int,
    old_is_current: bool,
    statistics: Statistics,
) -> Tensor:
    """These rows' share of the mini-batch's mean loss per token; shares of all micro-batches and ranks add up to it.

    Args:
        logits: ``[b, T, V]``. values: ``[b, T + 1]`` of the critic, or ``None``.
        mini_batch_tokens: trained tokens of the whole mini-batch, on all ranks.
        old_is_current: the weights are still those of the step's start, so this very forward tells the old log
            probabilities; ``targets.old_logprobs`` is not read.
        statistics: collects what is logged.
    """
    mask = batch.mask
    current = token_statistics(logits, batch.response_ids, temperature)
    old = current.logprobs.detach() if old_is_current else targets.old_logprobs
    weights = torch.ones_like(old)
    if algorithm.correction == "tis":
        weights = truncated_importance_weights(old, batch.behaviour_logprobs, mask, cap=algorithm.tis_cap)
    policy = clipped_policy_loss(
        current.logprobs,
        old,
        targets.advantages,
        weights,
        mask,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
    )
    loss = masked_mean(policy.loss, mask, mini_batch_tokens)
    statistics.add_mean("policy_loss", policy.loss, mask)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * masked_mean(current.entropy, mask, mini_batch_tokens)
    if values is not None:
        value_loss = clipped_value_loss(
            values[:, :-1], targets.old_values, targets.returns, mask, clip=algorithm.value_clip
        )
        loss = loss + algorithm.value_coef * masked_mean(value_loss, mask, mini_batch_tokens)
        statistics.add_mean("value_loss", value_loss, mask)
    _log_tokens(statistics, current, policy, old, weights, batch, targets)
    return loss


def _log_tokens(
    statistics: Statistics,
    current: TokenStatistics,
    policy: PolicyLoss,
    old: Tensor,
    weights: Tensor,
    batch: Batch,
    targets: Targets,
) -> None:
    """What is logged of the trained tokens and of the rows that teach nothing."""
    mask = batch.mask
    for name, tokens in (
        ("entropy", current.entropy),
        ("clip_fraction", policy.clipped.float()),
        ("approx_kl", approximate_kl(current.logprobs, old, mask)),
        ("ratio_mean", policy.ratio),
        ("is_weight_mean", weights),
        ("logprob_gap", (old - batch.behaviour_logprobs).abs()),
        ("advantage_mean", targets.advantages),
        ("advantage_square", targets.advantages.square()),
    ):
        statistics.add_mean(name, tokens, mask)
    statistics.add_max("ratio_max", policy.ratio, mask)
    statistics.add_max("is_weight_max", weights, mask)
    silent = (torch.where(mask, targets.advantages, 0.0) == 0).all(dim=1)
    statistics.add_mean("zero_advantage_fraction", silent.float(), mask.any(dim=1))
