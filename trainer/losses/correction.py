"""Corrections for tokens that another policy sampled than the one whose ratio is clipped.

The sampler may be some versions behind, and computes in another precision with other kernels. The old policy, the
trainer's own weights when the step begins, is the *proximal* policy: ratios are clipped around it, and the weight
``pi_old / pi_behaviour`` accounts for who sampled the token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.tokens import bounded_exp, log_ratio, row_mean


def importance_weights(old: Tensor, behaviour: Tensor, mask: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    """The weight of each token's loss that ``algorithm.correction`` names, ``[B, T]``; 1 where masked, no gradient.

    Args:
        old, behaviour: ``[B, T]`` log probabilities. mask: ``[B, T]``.
    """
    old = old.detach()
    bounds = {"floor": algorithm.is_floor, "cap": algorithm.is_cap}
    match algorithm.correction:
        case "none":
            return torch.ones_like(old)
        case "tis":
            return truncated_weights(old, behaviour, mask, cap=algorithm.is_cap)
        case "decoupled":
            return decoupled_weights(old, behaviour, mask)
        case "masked_token":
            return masked_token_weights(old, behaviour, mask, **bounds)
        case "masked_sequence":
            return masked_sequence_weights(old, behaviour, mask, **bounds)
        case "masked_geometric":
            return masked_geometric_weights(old, behaviour, mask, **bounds)


def rejects(algorithm: AlgorithmConfig) -> bool:
    """Whether the correction leaves tokens out, which then do not count in the mean either: their weight is 0."""
    return algorithm.correction.startswith("masked_")


def decoupled_weights(old: Tensor, behaviour: Tensor, mask: Tensor) -> Tensor:
    """``w = pi_old / pi_behaviour``: the decoupled objective in full (Hilton et al., arXiv:2110.00641, equation 4).

    The proximal policy is that of the step's start, as in AReaL (arXiv:2505.24298, equation 5).
    """
    return bounded_exp(log_ratio(old, behaviour, mask))


def truncated_weights(old: Tensor, behaviour: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """``w = min(pi_old / pi_behaviour, cap)``: bounded variance for a little bias.

    Truncated importance sampling (Ionides 2008, equation 3), used between sampler and trainer as in "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training" (Yao et al. 2025).
    """
    return decoupled_weights(old, behaviour, mask).clamp(max=cap)


def masked_token_weights(old: Tensor, behaviour: Tensor, mask: Tensor, *, floor: float, cap: float) -> Tensor:
    """``w 1[floor <= w <= cap]`` of each token: a token that the two policies see too differently is left out.

    Masked importance sampling, as in IcePop (Ling Team 2025, "Small Leak Can Sink a Great Ship").
    """
    return _within(decoupled_weights(old, behaviour, mask), mask, floor, cap)


def masked_sequence_weights(old: Tensor, behaviour: Tensor, mask: Tensor, *, floor: float, cap: float) -> Tensor:
    """``w 1[floor <= w <= cap]`` with the weight ``w = prod_t pi_old / pi_behaviour`` of the whole response.

    Sequence-level masked importance sampling (Liu et al. 2025, "When Speed Kills Stability"). The weight spreads
    exponentially with the response's length: meant for short ones.
    """
    whole = log_ratio(old, behaviour, mask).sum(1, keepdim=True)
    return _within(bounded_exp(whole).expand_as(old), mask, floor, cap)


def masked_geometric_weights(old: Tensor, behaviour: Tensor, mask: Tensor, *, floor: float, cap: float) -> Tensor:
    """``w 1[floor <= w <= cap]`` with the geometric mean ``w = (prod_t pi_old / pi_behaviour)^(1 / |y|)``.

    The sequence weight without its dependence on length (Liu et al. 2025, as above; the ratio of GSPO).
    """
    mean = row_mean(log_ratio(old, behaviour, mask), mask)
    return _within(bounded_exp(mean).expand_as(old), mask, floor, cap)


def _within(weights: Tensor, mask: Tensor, floor: float, cap: float) -> Tensor:
    inside = (weights >= floor) & (weights <= cap)
    return torch.where(mask, torch.where(inside, weights, 0.0), 1.0)
