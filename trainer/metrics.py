"""Means, sums and extremes of a training step, gathered over its micro-batches and ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlbridge.trainer.parallel import all_reduce


class Statistics:
    """Accumulates named means, sums and maxima on this rank; ``reduce`` joins the ranks.

    Every rank must add the same names in the same order.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._maxima: dict[str, Tensor] = {}

    def add_mean(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Count the kept entries of ``values`` towards the mean ``name``."""
        kept = torch.stack([torch.where(mask, values.detach(), 0.0).sum(dtype=torch.float64), mask.sum().double()])
        self._sums[name] = self._sums.get(name, torch.zeros(2, dtype=torch.float64)) + kept

    def add_sum(self, name: str, share: Tensor) -> None:
        """Add ``share`` (one number) to the sum ``name``."""
        own = torch.stack([share.detach().double(), torch.zeros((), dtype=torch.float64)])
        self._sums[name] = self._sums.get(name, torch.zeros(2, dtype=torch.float64)) + own

    def add_max(self, name: str, values: Tensor, mask: Tensor) -> None:
        """Let the kept entries of ``values`` raise the maximum ``name``; it is 0 where nothing was kept."""
        largest = torch.where(mask, values.detach(), -torch.inf).amax() if mask.numel() else torch.tensor(-torch.inf)
        self._maxima[name] = torch.maximum(self._maxima.get(name, torch.tensor(-torch.inf)), largest)

    def reduce(self) -> dict[str, float]:
        """Every statistic over all trainer ranks. Collective."""
        result: dict[str, float] = {}
        if self._sums:
            sums = all_reduce(torch.stack(list(self._sums.values())), dist.ReduceOp.SUM)
            means = (sums[:, 0] / sums[:, 1].clamp(min=1)).tolist()
            result.update(zip(self._sums, means, strict=True))
        if self._maxima:
            maxima = all_reduce(torch.stack(list(self._maxima.values())), dist.ReduceOp.MAX)
            result.update(zip(self._maxima, maxima.nan_to_num(neginf=0.0).tolist(), strict=True))
        return result
