"""Policy losses: how the probability of a token moves with its advantage.

To add one: a function here, its name in ``AlgorithmConfig.loss`` and a case in ``policy_loss``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.tokens import bounded_exp, log_ratio, row_mean


class PolicyLoss(NamedTuple):
    """Per token ``[B, T]``, 0 (the ratio 1) where masked.

    Attributes:
        loss: to be minimised.
        ratio: current over old policy, as the loss uses it; without gradient.
        clipped_low, clipped_high: true where the ratio had left its range at that end and the clip took effect.
    """

    loss: Tensor
    ratio: Tensor
    clipped_low: Tensor
    clipped_high: Tensor


def policy_loss(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, algorithm: AlgorithmConfig
) -> PolicyLoss:
    """The loss that ``algorithm.loss`` names.

    Args:
        logprobs, old: ``[B, T]`` log probabilities under the current and the old policy; gradient flows through the
            first only.
        advantages: ``[B, T]``. mask: ``[B, T]`` true where the policy chose the token.
    """
    old = old.detach()
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo_clip":
            return ppo_clip(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
        case "dual_clip":
            bound = algorithm.dual_clip_bound
            return dual_clip(logprobs, old, advantages, mask, clip_low=low, clip_high=high, bound=bound)
        case "gspo":
            return gspo(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
        case "cispo":
            return cispo(logprobs, old, advantages, mask, clip_low=low, clip_high=high)
        case "policy_gradient":
            return policy_gradient(logprobs, advantages, mask)


def ppo_clip(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``-min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)`` with ``rho = pi / pi_old`` of the token.

    PPO (Schulman et al., arXiv:1707.06347, equation 7), with the two bounds apart as in DAPO (arXiv:2503.14476,
    equation 8).
    """
    return _clipped(bounded_exp(log_ratio(logprobs, old, mask)), advantages, mask, clip_low, clip_high)


def dual_clip(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    bound: float,
) -> PolicyLoss:
    """``ppo_clip``, but where ``A < 0`` the objective is at least ``c A``: ``-max(min(rho A, clip(rho) A), c A)``.

    A token that became much likelier and turned out badly would otherwise have an unbounded loss. Dual-clip PPO (Ye et
    al., arXiv:1912.09729, equation 5).

    Args:
        bound: ``c > 1``.
    """
    plain = ppo_clip(logprobs, old, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    ceiling = torch.where(mask & (advantages < 0), -bound * advantages, torch.inf)
    bounded = plain.loss > ceiling
    loss = torch.where(bounded, ceiling, plain.loss)
    return plain._replace(loss=loss, clipped_high=plain.clipped_high | bounded.detach())


def gspo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``ppo_clip`` with one ratio for the whole response, ``s = (pi(y) / pi_old(y))^(1 / |y|)``.

    Group sequence policy optimisation (Zheng et al., arXiv:2507.18071), in its token form (equations 13 and 14):
    ``s_t = sg[s] pi_t / sg[pi_t]``, whose value at each token is ``s``. With one advantage per response and the mean
    over each response's tokens, value and gradient are those of equations 5 to 7; advantages may also differ by token.
    """
    per_token = log_ratio(logprobs, old, mask)
    sequence = row_mean(per_token.detach(), mask)
    own = torch.where(mask, per_token - per_token.detach() + sequence, 0.0)
    return _clipped(bounded_exp(own), advantages, mask, clip_low, clip_high)


def cispo(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """``-sg[clip(rho, 1 - clip_low, 1 + clip_high)] A log pi``: the weight is clipped, no token loses its gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585, equations 4 and 5).
    """
    ratio = bounded_exp(log_ratio(logprobs, old, mask)).detach()
    least, most = 1.0 - clip_low, 1.0 + clip_high
    loss = torch.where(mask, -ratio.clamp(least, most) * advantages * torch.where(mask, logprobs, 0.0), 0.0)
    return PolicyLoss(loss, ratio, mask & (ratio < least), mask & (ratio > most))


def policy_gradient(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> PolicyLoss:
    """``-A log pi``: REINFORCE (Williams 1992), without ratio or clip."""
    loss = torch.where(mask, -advantages * torch.where(mask, logprobs, 0.0), 0.0)
    never = torch.zeros_like(mask)
    return PolicyLoss(loss, torch.ones_like(loss).detach(), never, never)


def _clipped(ratio: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    free, bounded = ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.where(mask, -torch.minimum(free, bounded), 0.0)
    taken = ((bounded < free) & mask).detach()
    return PolicyLoss(loss, ratio.detach(), taken & (advantages < 0), taken & (advantages > 0))
