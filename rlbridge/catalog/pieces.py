"""Runtime tensors as concatenations of rectangles of checkpoint tensors: all that a catalog's layouts need. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import ConfigError

Piece = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Checkpoint tensor, first element and number of elements along each of its dimensions."""


class MapBuilder:
    """Collects the runtime tensors of one rank.

    Args:
        tensors: the checkpoint's tensors.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec]) -> None:
        self._tensors = tensors
        self._runtime: dict[str, TensorSpec] = {}
        self._boxes: list[Box] = []

    def add(self, runtime: str, shape: tuple[int, ...], like: str, pieces: Iterable[Piece]) -> None:
        """A runtime tensor whose elements are those of ``pieces``, one behind the other, and then padding.

        Its dtype is that of the checkpoint tensor ``like``.
        """
        self._runtime[runtime] = _interned(shape, self._tensors[like].dtype)
        offset = 0
        for tensor, start, count in pieces:
            steps, strides, size = _row_major(count)
            self._boxes.append(Box(runtime, tensor, start, count, steps, offset, strides))
            offset += size

    def rows(self, runtime: str, *tensors: str) -> None:
        """Whole checkpoint tensors on top of each other."""
        shapes = [self._tensors[tensor].shape for tensor in tensors]
        shape = (sum(rows for rows, *_ in shapes), *shapes[0][1:])
        pieces = [(tensor, (0,) * len(size), size) for tensor, size in zip(tensors, shapes, strict=True)]
        self.add(runtime, shape, tensors[0], pieces)

    def source_map(self) -> SourceMap:
        """What was collected."""
        return SourceMap(self._runtime, self._boxes)


@lru_cache(maxsize=4096)
def _row_major(count: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Steps, canonical strides and size of a contiguous rectangle; equal ones are one object in all maps."""
    strides = tuple(math.prod(count[d + 1 :]) if n > 1 else 0 for d, n in enumerate(count))
    return (1,) * len(count), strides, math.prod(count)


@lru_cache(maxsize=4096)
def _interned(shape: tuple[int, ...], dtype: str) -> TensorSpec:
    return TensorSpec(shape, dtype)


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of a part as ``torch.chunk`` cuts: equal ones, then a shorter one, then empty ones."""
    each = -(-size // parts)
    first = min(index * each, size)
    return first, min(each, size - first)


def spread(size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of a part as even as possible: the first ones are one longer."""
    each, longer = divmod(size, parts)
    return index * each + min(index, longer), each + (index < longer)


def even(parallel: str, what: str, size: int, parts: int, index: int) -> tuple[int, int]:
    """First element and length of one of ``parts`` equal parts.

    Raises:
        ConfigError: ``size`` cannot be cut so; the text names ``parallel`` and ``what``.
    """
    if size % parts:
        raise ConfigError(f"{parallel}: {size} {what} cannot be divided by {parts}")
    return index * (size // parts), size // parts
