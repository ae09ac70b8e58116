"""The terms of the RL objective, token by token. Pure functions of tensors.

Notation: ``B`` responses (rows), ``T`` response tokens, ``V`` words of the vocabulary. Three policies have an opinion
on each token: the *behaviour* policy that sampled it (the engine, maybe some versions ago), the *old* policy (the
trainer's own weights when the step began) and the *current* one, which the updates within the step move away from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0
"""``exp`` of more overflows soon; no clip range comes near it, so no gradient that matters is cut."""


class TokenStatistics(NamedTuple):
    """Log probability ``[B, T]`` of each token, and entropy ``[B, T]`` of the distribution it was drawn from."""

    logprobs: Tensor
    entropy: Tensor


class PolicyLoss(NamedTuple):
    """Per token ``[B, T]``, 0 where masked: the loss, the ratio current/old, and where the clip took the gradient."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


def token_statistics(logits: Tensor, token_ids: Tensor, temperature: float) -> TokenStatistics:
    """Log probabilities and entropies under ``softmax(logits / temperature)``, the sampler's own distribution.

    Args:
        logits: ``[B, T, V]``. token_ids: ``[B, T]``. temperature: > 0.
    """
    log_distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_distribution.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    return TokenStatistics(logprobs, entropy)


def masked_mean(values: Tensor, mask: Tensor, denominator: float | Tensor | None = None) -> Tensor:
    """``sum(values[mask]) / denominator``; what is masked is not read, not even if it is NaN.

    Args:
        values, mask: of one shape, which may be empty.
        denominator: number of kept tokens; by default those of this very mask. Micro-batches and ranks pass the count
            of the whole mini-batch, so that their losses add up to its token mean. With none kept the result is 0.
    """
    count = mask.sum() if denominator is None else torch.as_tensor(denominator)
    return torch.where(mask, values, 0.0).sum() / count.clamp(min=1)


def truncated_importance_weights(old: Tensor, behaviour: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """``w = min(pi_old / pi_behaviour, cap)`` per token: corrects for tokens sampled by another policy.

    Truncated importance sampling (Ionides 2008, equation 3), used between sampler and trainer as in "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025) and, as the proximal policy's weight, in the
    decoupled objective of Hilton et al. (arXiv:2110.00641, equation 4). No gradient flows through it.

    Args:
        old, behaviour: ``[B, T]`` log probabilities. mask: ``[B, T]``. cap: largest weight.

    Returns:
        ``[B, T]``; 1 where masked.
    """
    log_weight = torch.where(mask, old.detach() - behaviour, 0.0)
    return log_weight.clamp(max=_LOG_RATIO_LIMIT).exp().clamp(max=cap)


def clipped_policy_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    weights: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """``-w min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` per token, with ``rho = pi_current / pi_old``.

    PPO (arXiv:1707.06347, equation 7), with the two bounds apart as in DAPO (arXiv:2503.14476, equation 8). Its mean
    over all tokens of the mini-batch (DAPO, section 3.3) is ``masked_mean``.

    Args:
        logprobs, old: ``[B, T]``; only the first carries gradient.
        advantages: ``[B, T]`` or ``[B, 1]``. weights: ``[B, T]`` importance weights. mask: ``[B, T]``.
    """
    log_ratio = torch.where(mask, logprobs - old.detach(), 0.0)
    ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    free, clipped = ratio * advantages, bounded * advantages
    loss = torch.where(mask, -weights * torch.minimum(free, clipped), 0.0)
    return PolicyLoss(loss, ratio.detach(), ((clipped < free) & mask).detach())


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> Tensor:
    """``max((V - R)^2, (V_clipped - R)^2) / 2`` per token, ``V_clipped`` within ``clip`` of the old value.

    The value loss of the PPO implementation by Schulman et al. (openai/baselines), as written down in "The 37
    Implementation Details of PPO" (Huang et al. 2022), detail 9.

    Args:
        values, old_values, returns: ``[B, T]``; only the first carries gradient. mask: ``[B, T]``.

    Returns:
        ``[B, T]``, 0 where masked.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    # Masked before squaring: the gradient of 0 * NaN would be NaN.
    far, close = (torch.where(mask, estimate - returns, 0.0).square() for estimate in (values, near))
    return 0.5 * torch.maximum(far, close)


def approximate_kl(logprobs: Tensor, old: Tensor, mask: Tensor) -> Tensor:
    """``(rho - 1) - log rho`` per token: the k3 estimator of ``KL(old || current)`` (Schulman 2020), never negative.

    Returns:
        ``[B, T]``, without gradient, 0 where masked.
    """
    log_ratio = torch.where(mask, (logprobs - old).detach(), 0.0)
    log_ratio = log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    return log_ratio.exp() - 1.0 - log_ratio
