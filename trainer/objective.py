"""The loss of some rows: the terms of ``losses`` put together as the algorithm says, and what is worth logging.

Notation: ``b`` rows, ``T`` tokens of the longest response, ``V`` words.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbridge.trainer.batch import Batch
from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.aggregation import aggregate
from rlbridge.trainer.losses.correction import importance_weights
from rlbridge.trainer.losses.divergence import kl_estimate
from rlbridge.trainer.losses.policy import PolicyLoss, policy_loss
from rlbridge.trainer.losses.tokens import TokenStatistics, token_statistics
from rlbridge.trainer.losses.value import clipped_value_loss
from rlbridge.trainer.metrics import Statistics
from rlbridge.trainer.targets import Targets, wants_reference


def objective(
    logits: Tensor,
    values: Tensor | None,
    batch: Batch,
    targets: Targets,
    algorithm: AlgorithmConfig,
    *,
    temperature: float,
    denominator: float,
    old_is_current: bool,
    statistics: Statistics,
) -> Tensor:
    """These rows' share of the mini-batch's loss; shares of all micro-batches and ranks add up to it.

    Args:
        logits: ``[b, T, V]``. values: ``[b, T + 1]`` of the critic, or ``None``.
        denominator: of the whole mini-batch, on all ranks; see ``denominator_of``.
        old_is_current: the weights are still those of the step's start, so this very forward tells the old log
            probabilities; ``targets.old_logprobs`` is not read.
        statistics: collects what is logged.
    """
    kept = batch.mask & targets.kept
    current = token_statistics(logits, batch.response_ids, temperature)
    old = current.logprobs.detach() if old_is_current else targets.old_logprobs
    weights = importance_weights(old, batch.behaviour_logprobs, batch.mask, algorithm)
    policy = policy_loss(current.logprobs, old, targets.advantages, batch.mask, algorithm)
    per_token = weights * policy.loss

    def share(term: Tensor) -> Tensor:
        return aggregate(term, kept, denominator, algorithm)

    loss = share(per_token)
    statistics.add_mean("policy_loss", per_token, kept)
    if algorithm.entropy_coef:
        loss = loss - algorithm.entropy_coef * share(current.entropy)
    if values is not None:
        value_loss = clipped_value_loss(
            values[:, :-1], targets.old_values, targets.returns, batch.mask, clip=algorithm.value_clip
        )
        loss = loss + algorithm.value_coef * share(value_loss)
        statistics.add_mean("value_loss", value_loss, kept)
    if wants_reference(algorithm):
        divergence = kl_estimate(current.logprobs, targets.reference_logprobs, batch.mask, algorithm.kl_estimator)
        statistics.add_mean("reference_kl", divergence, kept)
        if algorithm.kl_in == "loss":
            loss = loss + algorithm.kl_coef * share(divergence)
    statistics.add_sum("loss", loss)
    _log_tokens(statistics, current, policy, old, batch, targets, kept)
    _log_weights(statistics, weights, kept, batch.mask)
    return loss


def _log_tokens(
    statistics: Statistics,
    current: TokenStatistics,
    policy: PolicyLoss,
    old: Tensor,
    batch: Batch,
    targets: Targets,
    kept: Tensor,
) -> None:
    """What is logged of the trained tokens and of the rows that teach nothing."""
    for name, tokens in (
        ("entropy", current.entropy),
        ("clip_fraction", (policy.clipped_low | policy.clipped_high).float()),
        ("clip_fraction_low", policy.clipped_low.float()),
        ("clip_fraction_high", policy.clipped_high.float()),
        ("approx_kl", kl_estimate(old, current.logprobs.detach(), batch.mask, "k3")),
        ("ratio_mean", policy.ratio),
        ("logprob_gap", (old - batch.behaviour_logprobs).abs()),
        ("advantage_mean", targets.advantages),
        ("advantage_square", targets.advantages.square()),
    ):
        statistics.add_mean(name, tokens, kept)
    statistics.add_max("ratio_max", policy.ratio, kept)
    silent = (torch.where(kept, targets.advantages, 0.0) == 0).all(dim=1)
    statistics.add_mean("zero_advantage_fraction", silent.float(), kept.any(dim=1))


def _log_weights(statistics: Statistics, weights: Tensor, kept: Tensor, mask: Tensor) -> None:
    """What is logged of the importance weights; a token that the correction left out counts with weight 0."""
    statistics.add_mean("is_weight_mean", weights, mask)
    statistics.add_mean("is_weight_square", weights.square(), mask)
    statistics.add_max("is_weight_max", weights, mask)
    statistics.add_mean("rejected_fraction", (~kept).float(), mask)
