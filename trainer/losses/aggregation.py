"""From losses per token to one number, the same however a mini-batch is split over micro-batches and ranks.

Each share is divided by a denominator of the *whole mini-batch*, so that shares add up to its loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.tokens import row_mean


def masked_mean(values: Tensor, mask: Tensor, denominator: float | None = None) -> Tensor:
    """``sum(values[mask]) / denominator``; what is masked is not read, not even if it is NaN.

    Args:
        values, mask: of one shape, which may be empty.
        denominator: number of kept tokens; by default those of this very mask. With none kept the result is 0.
    """
    count = int(mask.sum()) if denominator is None else denominator
    return torch.where(mask, values, 0.0).sum() / max(1, count)


def aggregate(values: Tensor, mask: Tensor, denominator: float, algorithm: AlgorithmConfig) -> Tensor:
    """These rows' share of the mini-batch's loss.

    ``token_mean``: ``sum_i sum_t l_it / sum_i |y_i|`` (DAPO, arXiv:2503.14476, section 3.3): each token counts alike.
    ``sequence_mean``: ``1/N sum_i 1/|y_i| sum_t l_it`` (DeepSeekMath, arXiv:2402.03300, equation 3): each response
    counts alike. ``constant``: ``1/N sum_i sum_t l_it / C`` (Dr. GRPO, arXiv:2503.20783, appendix A): no length
    anywhere.

    Args:
        values: ``[b, T]``. mask: ``[b, T]`` tokens that count.
        denominator: of the whole mini-batch, see ``denominator_of``.
    """
    if algorithm.aggregation == "sequence_mean":
        return row_mean(values, mask).sum() / max(1, denominator)
    return masked_mean(values, mask, denominator)


def denominator_of(mask: Tensor, algorithm: AlgorithmConfig) -> int:
    """What the losses of a mini-batch are divided by: kept tokens, responses that keep any, or rows times a constant.

    Args:
        mask: ``[N, T]`` kept tokens of every row of the mini-batch, on all ranks.
    """
    match algorithm.aggregation:
        case "token_mean":
            return int(mask.sum())
        case "sequence_mean":
            return int(mask.any(dim=1).sum())
        case "constant":
            return mask.shape[0] * (algorithm.constant_tokens or 1)
