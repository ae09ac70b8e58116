"""The live tensors of a transformers model, by checkpoint name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

import torch

from rlbridge.transport.errors import LayoutError


class LiveWeights:
    """What a checkpoint can fill in ``model``: parameters and persistent buffers.

    Tied tensors have several names and one storage: writing through any of the names changes all.
    """

    def __init__(self, model: Any) -> None:
        model.requires_grad_(False)
        self._by_name: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor into its live one, casting to its dtype; any subset, in any order.

        Raises:
            LayoutError: an unknown name (the nearest one is suggested), or a shape that does not fit.
        """
        with torch.no_grad():
            for name, tensor in weights:
                self._target(name, tensor.shape).copy_(tensor)

    def live(self) -> dict[str, torch.Tensor]:
        """Every live tensor, tied ones under all of their names."""
        return {name: tensor.detach() for name, tensor in self._by_name.items()}

    def _target(self, name: str, shape: torch.Size) -> torch.Tensor:
        target = self._by_name.get(name)
        if target is None:
            near = difflib.get_close_matches(name, self._by_name, n=1, cutoff=0.0)
            raise LayoutError(f"the engine's model has no tensor {name!r}; the nearest name is {near[0]!r}")
        if target.shape != shape:
            raise LayoutError(f"{name}: the checkpoint has shape {tuple(shape)}, the engine {tuple(target.shape)}")
        return target
