"""The checkpoint as common coordinate system: names, shapes and dtypes, never values."""

from __future__ import annotations

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    """Shape and dtype of one tensor. ``dtype`` is torch's name without the prefix, e.g. ``"bfloat16"``."""

    shape: tuple[int, ...]
    dtype: str


class CheckpointSpec(msgspec.Struct, frozen=True):
    """All tensors of a checkpoint, by name, in file order. A *checkpoint element* is (name, row-major index)."""

    tensors: dict[str, TensorSpec]
