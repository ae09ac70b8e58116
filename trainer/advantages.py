"""Advantages: how much better a token did than expected. Pure functions of tensors.

Notation: ``B`` responses (rows), ``T`` tokens of the longest response.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_relative_advantages(rewards: Tensor, groups: Tensor, *, normalize_std: bool) -> Tensor:
    """Advantage of each response relative to its group: ``A_i = (r_i - mean(r)) / std(r)``.

    DeepSeekMath (arXiv:2402.03300), section 4.1.2; without the division: Dr. GRPO (arXiv:2503.20783), equation 3. The
    standard deviation is the population's. A group whose rewards are all equal (one of a single response too) says
    nothing about its responses: its advantages are exactly 0, whatever rounding leaves of ``r_i - mean(r)``.

    Args:
        rewards: ``[B]``.
        groups: ``[B]`` integers; rows with equal numbers share a prompt. Groups may differ in size.
        normalize_std: divide by the group's standard deviation.

    Returns:
        ``[B]``, of the dtype of ``rewards``.
    """
    exact = rewards.double()
    centred = exact - _per_group(exact, groups, "mean")
    equal = _equal(exact, groups)
    if normalize_std:
        centred = centred / _per_group(centred.square(), groups, "mean").sqrt().masked_fill(equal, 1.0)
    return centred.masked_fill(equal, 0.0).to(rewards.dtype)


def leave_one_out_advantages(rewards: Tensor, groups: Tensor) -> Tensor:
    """Advantage of each response over the mean of its group's *others*: ``A_i = r_i - mean_{j != i}(r_j)``.

    RLOO (Ahmadian et al., arXiv:2402.14740, section 2.2; Kool et al. 2019). Where no other response exists, or all
    rewards of the group are equal, it is exactly 0.

    Args:
        rewards: ``[B]``. groups: ``[B]``, as in ``group_relative_advantages``.

    Returns:
        ``[B]``, of the dtype of ``rewards``.
    """
    exact = rewards.double()
    size = _per_group(torch.ones_like(exact), groups, "sum")
    others = (_per_group(exact, groups, "sum") - exact) / (size - 1.0).clamp(min=1.0)
    return (exact - others).masked_fill(_equal(exact, groups), 0.0).to(rewards.dtype)


def batch_normalized_advantages(rewards: Tensor, mask: Tensor, *, gamma: float) -> Tensor:
    """Rewards to go, normalised over all chosen tokens of the batch: ``A_t = (G_t - mean(G)) / std(G)``.

    REINFORCE++ (Hu et al., arXiv:2501.03262, section 3): ``G_t = sum_{k >= t} gamma^(k - t) r_k``, where ``r_k`` holds
    the penalty for divergence from the reference model, if any, and the response's reward at its last token; no
    critic and no groups. The standard deviation is the population's; if all ``G_t`` are equal, advantages are 0.

    Args:
        rewards: ``[B, T]`` reward received after token ``t``, of the whole batch, whichever rank computes which row.
        mask: ``[B, T]`` true where the policy chose the token. gamma: discount per chosen token.

    Returns:
        ``[B, T]``, 0 where masked, of the dtype of ``rewards``.
    """
    exact, zeros = rewards.double(), torch.zeros(rewards.shape, dtype=torch.float64)
    # Without a critic, values of 0 and lambda 1 make the estimate the discounted sum of what follows.
    returns, _ = generalized_advantages(
        exact, zeros, zeros.new_zeros(rewards.shape[0]), mask, gamma=gamma, gae_lambda=1.0
    )
    kept = returns[mask]
    if kept.numel() == 0 or kept.min() == kept.max():
        return torch.zeros_like(rewards)
    normalized = (returns - kept.mean()) / kept.std(correction=0)
    return torch.where(mask, normalized, 0.0).to(rewards.dtype)


def generalized_advantages(
    rewards: Tensor, values: Tensor, bootstrap: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., arXiv:1506.02438, equations 11 and 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t`` and ``A_t = delta_t + gamma lambda A_{t+1}``, where ``t + 1`` is the next
    token *that the policy chose*: masked tokens (padding, observations) are neither read nor written, in the middle of
    a response as well as at its end.

    Args:
        rewards: ``[B, T]`` reward received after token ``t``.
        values: ``[B, T]`` value of the state before token ``t``.
        bootstrap: ``[B]`` value of the state after the last token: 0 where the episode ended, the critic's estimate
            where it was merely cut off (Pardo et al., arXiv:1712.00378, equation 5).
        mask: ``[B, T]`` true where the policy chose the token.
        gamma: discount per chosen token. gae_lambda: decay of the mixture of n-step estimates.

    Returns:
        ``(advantages, returns)``, each ``[B, T]``; ``returns = advantages + values``; both 0 where masked.
    """
    advantages = torch.zeros_like(values)
    next_value = bootstrap.to(values.dtype)
    next_advantage = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        chosen = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(chosen, advantage, 0.0)
        next_value = torch.where(chosen, values[:, t], next_value)
        next_advantage = torch.where(chosen, advantage, next_advantage)
    returns = torch.where(mask, advantages + values, 0.0)
    return advantages, returns


def _per_group(values: Tensor, groups: Tensor, reduction: str) -> Tensor:
    """``values`` ``[B]`` reduced over each group, at every one of its rows ``[B]``."""
    _, index = groups.unique(return_inverse=True)
    count = int(index.max()) + 1 if index.numel() else 0
    return values.new_zeros(count).scatter_reduce(0, index, values, reduction, include_self=False)[index]


def _equal(values: Tensor, groups: Tensor) -> Tensor:
    """``[B]`` true where all values of the row's group are one number."""
    return _per_group(values, groups, "amax") == _per_group(values, groups, "amin")
