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
    _, index = groups.unique(return_inverse=True)
    count = int(index.max()) + 1 if index.numel() else 0
    exact = rewards.double()

    def per_group(values: Tensor, reduction: str) -> Tensor:
        out = values.new_zeros(count).scatter_reduce(0, index, values, reduction, include_self=False)
        return out[index]

    centred = exact - per_group(exact, "mean")
    equal = per_group(exact, "amax") == per_group(exact, "amin")
    if normalize_std:
        centred = centred / per_group(centred.square(), "mean").sqrt().masked_fill(equal, 1.0)
    return centred.masked_fill(equal, 0.0).to(rewards.dtype)


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
