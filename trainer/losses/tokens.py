"""What the model says of each token, and how two policies' opinions of it compare."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LOG_RATIO_LIMIT = 20.0
"""``exp`` of more overflows soon; no clip range comes near it, so no gradient that matters is cut."""


class TokenStatistics(NamedTuple):
    """Log probability ``[B, T]`` of each token, and entropy ``[B, T]`` of the distribution it was drawn from (nats)."""

    logprobs: Tensor
    entropy: Tensor


def token_statistics(logits: Tensor, token_ids: Tensor, temperature: float) -> TokenStatistics:
    """Log probabilities and entropies under ``softmax(logits / temperature)``, the sampler's own distribution.

    Args:
        logits: ``[B, T, V]``. token_ids: ``[B, T]``. temperature: > 0.
    """
    log_distribution = torch.log_softmax(logits.float() / temperature, dim=-1)
    logprobs = log_distribution.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    return TokenStatistics(logprobs, entropy)


def log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """``log(p / q)`` ``[B, T]`` of two policies' log probabilities; 0, and without gradient, where masked."""
    return torch.where(mask, numerator - denominator, 0.0)


def bounded_exp(log_values: Tensor) -> Tensor:
    """``exp``, finite whatever the argument."""
    return log_values.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean ``[B, 1]`` of the kept entries of each row of ``values`` ``[B, T]``; 0 for a row that keeps none."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
