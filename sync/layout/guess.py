"""The usual layouts from few elements: rectangles are guessed, and the proof by random values tells if all fits.

After the first pass a runtime tensor is cut along each of its edges where the digits stop being equally far apart.
Each cell between the cuts is taken for a rectangle, so the ids of its corner and of the corner's neighbours say it all.
What turns out to be no such rectangles is read in full and left to :mod:`~rlbridge.sync.layout.recover`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.digits import Digits
from rlbridge.sync.layout.elements import row_major_strides
from rlbridge.sync.layout.loading import Loader
from rlbridge.sync.layout.probe import can_be_probed, digits_for, run_passes
from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.layout.spec import CheckpointSpec

_MAX_CELLS = 4096


@dataclass(frozen=True)
class _Cell:
    """A rectangle of a runtime tensor.

    Attributes:
        offset: its first element, row-major.
        count, strides: per runtime dimension.
        first: id of its first element.
        deltas: per runtime dimension, how much the id grows from one element to the next.
    """

    offset: int
    count: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    deltas: tuple[int, ...]


def guess_boxes(loader: Loader, wanted: Iterable[str], names: Iterable[str] | None = None) -> dict[str, list[Box]]:
    """Load digits for all checkpoint tensors, or for ``names``, and guess the boxes of the runtime tensors ``wanted``.

    Overwrites the live tensors. Tensors that cannot be rectangles, or cannot hold digits, are left out.
    """
    digits, live = digits_for(loader), can_be_probed(loader.spec, loader.live())
    readers = {name: _EdgeReader(digits) for name in wanted if name in live}
    run_passes(loader, digits, readers, names)
    sources = [name for name in loader.spec.tensors if 0 not in loader.spec.tensors[name].shape]
    starts = np.array([digits.firsts[name] for name in sources], np.int64)
    guesses = {}
    for name, reader in readers.items():
        boxes = _boxes(loader.spec, sources, starts, name, reader.cells())
        if boxes is not None:
            guesses[name] = boxes
    return guesses


class _EdgeReader:
    """Cuts a runtime tensor at the first pass, and reads a corner of each cell and its neighbours at each."""

    def __init__(self, digits: Digits) -> None:
        self._digits = digits
        self._areas: list[tuple[tuple[int, int], ...]] = []
        self._strides: tuple[int, ...] = ()
        self._places: NDArray[np.int64] | None = None  # [cells, 1 + dimensions]
        self._read: list[NDArray[np.int64]] = []

    def read(self, tensor: torch.Tensor) -> None:
        flat = tensor.reshape(-1)
        if self._places is None:
            self._places = self._cut(flat, tuple(tensor.shape))
        self._read.append(self._sample(flat, self._places.reshape(-1)).reshape(self._places.shape))

    def _sample(self, flat: torch.Tensor, places: NDArray[np.int64]) -> NDArray[np.int64]:
        alphabet = self._digits.alphabet
        return alphabet.decode(flat.dtype, alphabet.read(flat[torch.from_numpy(places).to(flat.device)]))

    def _cut(self, flat: torch.Tensor, shape: tuple[int, ...]) -> NDArray[np.int64]:
        self._strides = row_major_strides(shape)
        lines = [np.arange(n, dtype=np.int64) * stride for n, stride in zip(shape, self._strides, strict=True)]
        cuts = [_runs(self._sample(flat, line), self._digits.alphabet.base) for line in lines]
        if math.prod(len(cut) for cut in cuts) <= _MAX_CELLS:
            self._areas = list(itertools.product(*cuts))
        places = np.zeros((len(self._areas), 1 + len(shape)), np.int64)
        for i, area in enumerate(self._areas):
            corner = sum(begin * stride for (begin, _), stride in zip(area, self._strides, strict=True))
            nexts = (stride if end - begin > 1 else 0 for (begin, end), stride in zip(area, self._strides, strict=True))
            places[i] = [corner, *(corner + more for more in nexts)]
        return places

    def cells(self) -> list[_Cell] | None:
        """Those that have ids; ``None``: there are too many cells, or none has any."""
        if self._places is None or not self._areas:
            return None
        ids = self._digits.ids(self._read)
        return [
            _Cell(
                int(places[0]),
                tuple(end - begin for begin, end in area),
                self._strides,
                int(found[0]),
                tuple(int(neighbour - found[0]) for neighbour in found[1:]),
            )
            for area, places, found in zip(self._areas, self._places, ids, strict=True)
            if found[0] > 0
        ] or None


def _runs(line: NDArray[np.int64], base: int) -> list[tuple[int, int]]:
    """Cut a line of digits (-1: none) into runs that are equally far apart, or of none."""
    steps, together = np.diff(line) % base, (line[1:] < 0) == (line[:-1] < 0)
    ends = np.append(np.flatnonzero((steps[1:] != steps[:-1]) | ~together[1:]) + 1, len(steps))
    runs, at = [], 0
    while at < line.size:
        stop = at + 1
        if at < len(steps) and together[at]:
            stop = int(ends[np.searchsorted(ends, at, side="right")]) + 1
        runs.append((at, stop))
        at = stop
    return runs


def _boxes(
    spec: CheckpointSpec, names: Sequence[str], starts: NDArray[np.int64], runtime: str, cells: list[_Cell] | None
) -> list[Box] | None:
    """The cells as boxes, cut where one checkpoint tensor ends and the next one follows."""
    if cells is None:
        return None
    boxes: list[Box] = []
    waiting = cells[::-1]
    while waiting:
        cell = waiting.pop()
        source = int(np.searchsorted(starts, cell.first, side="right")) - 1
        shape, first = spec.tensors[names[source]].shape, int(starts[source])
        parts = _cut_at(cell, first + math.prod(shape))
        if parts is not None:
            waiting += parts
            continue
        if cell.first >= first + math.prod(shape):
            return None  # the digits of what is no copy lead beyond the last tensor
        box = _as_box(runtime, names[source], shape, cell.first - first, cell)
        if box is None or len(boxes) > _MAX_CELLS:
            return None
        boxes.append(box)
    return boxes


def _cut_at(cell: _Cell, end: int) -> list[_Cell] | None:
    """The part of ``cell`` behind id ``end`` and the one before it, if it goes that far and can be cut there."""
    last = cell.first + sum((n - 1) * delta for n, delta in zip(cell.count, cell.deltas, strict=True))
    if last < end or not cell.count:
        return None
    d = max(range(len(cell.count)), key=lambda d: cell.deltas[d])
    keep = -(-(end - cell.first) // max(1, cell.deltas[d]))
    if not 0 < keep < cell.count[d]:
        return None
    before, behind = list(cell.count), list(cell.count)
    before[d], behind[d] = keep, cell.count[d] - keep
    offset, first = cell.offset + keep * cell.strides[d], cell.first + keep * cell.deltas[d]
    return [replace(cell, offset=offset, first=first, count=tuple(behind)), replace(cell, count=tuple(before))]


_Dim = tuple[int, int, int]
"""count, checkpoint elements per step, runtime elements per step."""


def _as_box(runtime: str, name: str, shape: tuple[int, ...], element: int, cell: _Cell) -> Box | None:
    """The cell as a rectangle of a checkpoint tensor of ``shape`` that begins at ``element``, if it can be one."""
    per_dim = row_major_strides(shape)
    start = [int(i) for i in np.unravel_index(element, shape)] if shape else []
    axes: list[list[_Dim]] = [[] for _ in shape]
    waiting = [dim for dim in zip(cell.count, cell.deltas, cell.strides, strict=True) if dim[0] > 1]
    while waiting:
        count, delta, stride = waiting.pop()
        axis = next((d for d, s in enumerate(per_dim) if shape[d] > 1 and 0 < s <= delta), None)
        if axis is None or delta % per_dim[axis]:
            return None
        step = delta // per_dim[axis]
        if start[axis] + (count - 1) * step < shape[axis]:
            axes[axis].append((count, step, stride))
        elif step == 1 and start[axis] == 0 and axis > 0 and count % shape[axis] == 0:
            inner = shape[axis]
            waiting += [(inner, delta, stride), (count // inner, delta * inner, stride * inner)]
        else:
            return None
    joined = [_joined(axis) for axis in axes]
    if any(dim is None for dim in joined):
        return None
    dims = [dim for dim in joined if dim is not None]
    if any(a + (count - 1) * step >= n for a, n, (count, step, _) in zip(start, shape, dims, strict=True)):
        return None
    counts, steps, strides = (tuple(dim[i] for dim in dims) for i in range(3))
    return Box(runtime, name, tuple(start), counts, steps, cell.offset, strides)


def _joined(dims: list[_Dim]) -> _Dim | None:
    """Runtime dimensions that together walk along one checkpoint dimension, as one."""
    if not dims:
        return 1, 1, 0
    count, step, stride = min(dims, key=lambda dim: dim[1])
    for outer in sorted(dims, key=lambda dim: dim[1])[1:]:
        if outer[1:] != (count * step, count * stride):
            return None
        count *= outer[0]
    return count, step, stride
