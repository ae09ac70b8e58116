"""The critic's loss."""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float) -> Tensor:
    """``max((V - R)^2, (V_clipped - R)^2) / 2`` per token, ``V_clipped`` within ``clip`` of the old value.

    The value loss of the PPO implementation by Schulman et al. (openai/baselines), as written down in "The 37
    Implementation Details of PPO" (Huang et al. 2022), detail 9.

    Args:
        values, old_values, returns: ``[B, T]``, in units of reward; only the first carries gradient. mask: ``[B, T]``.

    Returns:
        ``[B, T]``, 0 where masked.
    """
    near = old_values + (values - old_values).clamp(-clip, clip)
    # Masked before squaring: the gradient of 0 * NaN would be NaN.
    far, close = (torch.where(mask, estimate - returns, 0.0).square() for estimate in (values, near))
    return 0.5 * torch.maximum(far, close)
