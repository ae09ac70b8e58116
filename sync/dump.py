"""Keeping what a worker held at each version, so that a doubt about delivery can be settled bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


class WeightDump:
    """Writes ``<folder>/<worker>/version-<v>.safetensors`` for one worker; does nothing without a folder.

    Args:
        folder: ``None`` switches it off.
        worker: the worker's name.
    """

    def __init__(self, folder: str | None, worker: str) -> None:
        self._folder = Path(folder) / worker if folder is not None else None

    def write(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Keep ``tensors`` as the weights of ``version``."""
        if self._folder is None:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        # Tensors that share memory are refused by the format: each is written on its own.
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(own, self._folder / f"version-{version}.safetensors")
