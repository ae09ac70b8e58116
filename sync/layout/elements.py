"""Checkpoint elements as numbers: one id for each, so that layouts can be compared as arrays. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

Ids = NDArray[np.int64]
"""Element ids, 0 where an element is not from the checkpoint."""


def first_ids(spec: CheckpointSpec) -> dict[str, int]:
    """The id of each tensor's first element; ids count from 1, row-major, in the spec's order."""
    firsts: dict[str, int] = {}
    following = 1
    for name, tensor in spec.tensors.items():
        firsts[name] = following
        following += math.prod(tensor.shape)
    return firsts


def count_ids(spec: CheckpointSpec) -> int:
    """Number of checkpoint elements, which is the largest id."""
    return sum(math.prod(tensor.shape) for tensor in spec.tensors.values())


def by_tensor(spec: CheckpointSpec, ids: Ids) -> Iterator[tuple[str, Ids, Ids]]:
    """Take ``ids`` (``[M]``) apart: checkpoint tensor, its element indices, and the places that have them."""
    firsts = first_ids(spec)
    names = [name for name, tensor in spec.tensors.items() if 0 not in tensor.shape]
    starts = np.array([firsts[name] for name in names], np.int64)
    if ids.size and ids.min() > 0:
        first, last = np.searchsorted(starts, (ids.min(), ids.max()), side="right") - 1
        if first == last:  # the usual case, for which the arrays below would be large for nothing
            yield names[first], ids - firsts[names[first]], np.arange(ids.size)
            return
    places = np.flatnonzero(ids)
    owner = np.searchsorted(starts, ids[places], side="right") - 1
    for index in np.unique(owner):
        mine = places[owner == index]
        yield names[index], ids[mine] - firsts[names[index]], mine


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements per step of each dimension."""
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def strided(flat: Ids, offset: int, count: tuple[int, ...], strides: tuple[int, ...]) -> Ids:
    """A writable view of ``flat`` (``[M]``), as ``torch.as_strided`` would give it."""
    steps = tuple(stride * flat.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(flat[offset:], count, steps)


def box_ids(spec: CheckpointSpec, firsts: Mapping[str, int], box: Box) -> Ids:
    """Ids of the checkpoint elements of ``box``, ``[count[0], ..., count[N-1]]``."""
    ids = np.array(firsts[box.tensor], np.int64)
    per_dim = row_major_strides(spec.tensors[box.tensor].shape)
    for start, count, step, stride in zip(box.start, box.count, box.step, per_dim, strict=True):
        ids = ids[..., None] + (start + np.arange(count, dtype=np.int64) * step) * stride
    return ids


def paint(spec: CheckpointSpec, runtime: Mapping[str, TensorSpec], boxes: Iterable[Box]) -> dict[str, Ids]:
    """What ``boxes`` say of every runtime tensor: ids by row-major runtime element, ``[M]`` each."""
    firsts = first_ids(spec)
    painted = {name: np.zeros(math.prod(tensor.shape), np.int64) for name, tensor in runtime.items()}
    for box in boxes:
        strided(painted[box.runtime], box.offset, box.count, box.strides)[...] = box_ids(spec, firsts, box)
    return painted
