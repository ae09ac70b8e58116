"""The usual layouts without an id per element: rectangles are guessed from few elements and compared as a whole.

Runtime tensors are cut along each axis where the ids along its edge stop being equally far apart; each cell is then
taken for one rectangle of one checkpoint tensor, and every element of it is compared with the digits that the guess
says. A tensor with a wrong guess in it is no rectangle, and is left to :mod:`~rlbridge.sync.layout.recover`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import Ids, row_major_strides
from rlbridge.sync.layout.live import box_of, box_values
from rlbridge.sync.layout.probe import Reading
from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

_MAX_CELLS = 4096


@dataclass(frozen=True)
class _Cell:
    """A rectangle of a runtime tensor.

    Attributes:
        offset: its first element, row-major.
        count, strides: per runtime dimension.
        first: id of its first element, 0 for none.
        deltas: per runtime dimension, how much the id grows from one element to the next.
    """

    offset: int
    count: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    deltas: tuple[int, ...]


def guess_boxes(
    spec: CheckpointSpec, runtime: Mapping[str, TensorSpec], readings: Mapping[str, Reading]
) -> dict[str, list[Box]]:
    """Runtime tensor to its boxes, for those of ``readings`` that consist of rectangles and constants."""
    names = [name for name in spec.tensors if 0 not in spec.tensors[name].shape]
    guesses: dict[str, list[Box]] = {}
    for runtime_name, reading in readings.items():
        starts = np.array([reading.digits.firsts[name] for name in names], np.int64)
        boxes = _guess(spec, names, starts, runtime_name, runtime[runtime_name].shape, reading)
        if boxes is not None:
            guesses[runtime_name] = boxes
    wrong = _wrong_guesses(guesses, readings)
    return {name: boxes for name, boxes in guesses.items() if name not in wrong}


def _guess(
    spec: CheckpointSpec, names: Sequence[str], starts: Ids, runtime: str, shape: tuple[int, ...], reading: Reading
) -> list[Box] | None:
    boxes = []
    cells = _cells(shape, reading, starts)
    if cells is None:
        return None
    for cell in cells:
        if cell.first == 0:
            if not _is_constant(reading, cell):
                return None
            continue
        name = names[int(np.searchsorted(starts, cell.first, side="right")) - 1]
        box = _as_box(runtime, name, spec.tensors[name].shape, cell.first - reading.digits.firsts[name], cell)
        if box is None:
            return None
        boxes.append(box)
    return boxes


def _cells(shape: tuple[int, ...], reading: Reading, starts: Ids) -> list[_Cell] | None:
    strides = row_major_strides(shape)
    lines = [reading.at(np.arange(n, dtype=np.int64) * stride) for n, stride in zip(shape, strides, strict=True)]
    cuts = [_runs(line, starts) for line in lines]
    if any(cut is None for cut in cuts) or math.prod(len(cut or ()) for cut in cuts) > _MAX_CELLS:
        return None
    areas = list(itertools.product(*(cut for cut in cuts if cut is not None)))
    offsets = np.array([sum(a * s for (a, _), s in zip(area, strides, strict=True)) for area in areas], np.int64)
    first = reading.at(offsets)
    nexts = []
    for d, stride in enumerate(strides):
        longer = np.array([area[d][1] - area[d][0] > 1 for area in areas])
        nexts.append(np.where(longer, reading.at(offsets + longer * stride) - first, 0))
    return [
        _Cell(
            int(offsets[i]),
            tuple(stop - start for start, stop in area),
            strides,
            int(first[i]),
            tuple(int(delta[i]) for delta in nexts),
        )
        for i, area in enumerate(areas)
    ]


def _runs(line: Ids, starts: Ids) -> list[tuple[int, int]] | None:
    """Cut a line of ids into runs of one tensor that are equally far apart, or of no ids; ``None``: too many."""
    owner = np.where(line > 0, np.searchsorted(starts, line, side="right"), 0)
    steps, together = np.diff(line), owner[1:] == owner[:-1]
    ends = np.append(np.flatnonzero((steps[1:] != steps[:-1]) | ~together[1:]) + 1, len(steps))
    runs, at = [], 0
    while at < line.size:
        stop = at + 1
        if at < len(steps) and together[at]:
            stop = int(ends[np.searchsorted(ends, at, side="right")]) + 1
        runs.append((at, stop))
        if len(runs) > _MAX_CELLS:
            return None
        at = stop
    return runs


def _is_constant(reading: Reading, cell: _Cell) -> bool:
    for plane in reading.planes:
        part = torch.as_strided(plane, cell.count, cell.strides, cell.offset)
        if not bool((part == plane[cell.offset]).all()):
            return False
    return True


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


def _wrong_guesses(guesses: Mapping[str, list[Box]], readings: Mapping[str, Reading]) -> set[str]:
    """Runtime tensors that some element says otherwise of; one checkpoint tensor exists at a time."""
    by_tensor: dict[str, list[Box]] = {}
    for box in itertools.chain.from_iterable(guesses.values()):
        by_tensor.setdefault(box.tensor, []).append(box)
    wrong: set[str] = set()
    for name, boxes in by_tensor.items():
        for index in range(max(len(readings[box.runtime].planes) for box in boxes)):
            waiting = [box for box in boxes if box.runtime not in wrong]
            values = readings[boxes[0].runtime].digits.tensor(name, index) if waiting else None
            wrong |= {box.runtime for box in waiting if not _fits(box, values, readings[box.runtime], index)}
    return wrong


def _fits(box: Box, values: torch.Tensor | None, reading: Reading, index: int) -> bool:
    if values is None:
        return True
    expected = reading.digits.alphabet.read(box_values(box, values).to(reading.dtype)).view(box.count)
    return torch.equal(bit_view(expected), bit_view(box_of(box, reading.planes[index])))
