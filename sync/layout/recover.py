"""From element ids back to boxes: few affine rectangles that say the same, found by whole-array operations. Pure.

One runtime tensor and one checkpoint tensor at a time, as a grid: entry ``[i, j, ...]`` is the runtime element that
checkpoint element ``(i, j, ...)`` went to, or -1. Along each axis the grid is cut where neighbouring slices stop being
the same distance apart; the cells between the cuts are affine for all regular layouts, and are cut again if not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from rlbridge.sync.layout.elements import Ids, by_tensor, paint
from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError

_Grid = NDArray[np.int64]
_Line = NDArray[np.int64]
_Coordinates = list[_Line]
"""Per axis, the checkpoint coordinate of each grid line: lines that nothing uses are left out of the grid."""


def recover(spec: CheckpointSpec, runtime: Mapping[str, TensorSpec], ids: Mapping[str, Ids]) -> list[Box]:
    """Boxes that say exactly what ``ids`` say (runtime tensor to ids ``[M]``, 0 for elements of no tensor).

    Sorted by runtime tensor, in the order of ``ids``, then by checkpoint tensor and position.

    Raises:
        LayoutError: the boxes do not rebuild ``ids`` (a bug here, found before it can do harm).
    """
    return [box for name, found in ids.items() for box in _recover(spec, name, runtime[name], found)]


def _recover(spec: CheckpointSpec, runtime: str, shape: TensorSpec, ids: Ids) -> list[Box]:
    boxes = [
        box
        for name, elements, places in by_tensor(spec, ids)
        for box in rectangles(runtime, name, spec.tensors[name].shape, elements, places)
    ]
    if not np.array_equal(paint(spec, {runtime: shape}, boxes)[runtime], ids):
        raise LayoutError(f"the layout of runtime tensor {runtime!r} could not be expressed in boxes")
    return boxes


def rectangles(runtime: str, name: str, shape: tuple[int, ...], elements: Ids, places: Ids) -> list[Box]:
    """Boxes for the ``elements`` (``[n]``, row-major) of tensor ``name`` of ``shape`` that lie at ``places``."""
    found = [box for layer in _layers(elements, places) for box in _layer_boxes(runtime, name, shape, *layer)]
    return _merged(found)


def boxes_without(box: Box, removed: NDArray[np.bool_]) -> list[Box]:
    """What is left of ``box`` without the elements that are set in ``removed`` (``[count[0], ..., count[N-1]]``)."""
    elements = np.flatnonzero(~removed)
    if elements.size == 0:
        return []
    places = np.full(1, box.offset)
    for count, stride in zip(box.count, box.strides, strict=True):
        places = (places[:, None] + np.arange(count) * stride).reshape(-1)
    parts = rectangles(box.runtime, box.tensor, box.count, elements, places[elements])
    return [_within(box, part) for part in parts]


def _within(box: Box, part: Box) -> Box:
    """``part``, whose coordinates count the elements of ``box``, in the checkpoint's coordinates."""
    start = tuple(a + k * s for a, k, s in zip(box.start, part.start, box.step, strict=True))
    step = tuple(s * t if n > 1 else 1 for s, t, n in zip(box.step, part.step, part.count, strict=True))
    return Box(box.runtime, box.tensor, start, part.count, step, part.offset, part.strides)


def _layers(elements: Ids, places: Ids) -> Iterator[tuple[Ids, Ids]]:
    """Split replicated elements so that within each layer every checkpoint element has one place."""
    if (np.diff(elements) > 0).all():
        yield elements, places
        return
    low = int(elements.min())
    while elements.size:
        place_of = np.full(int(elements.max()) - low + 1, -1, np.int64)
        place_of[elements[::-1] - low] = places[::-1]
        chosen = place_of[elements - low] == places
        yield elements[chosen], places[chosen]
        elements, places = elements[~chosen], places[~chosen]


def _layer_boxes(runtime: str, name: str, shape: tuple[int, ...], elements: Ids, places: Ids) -> Iterator[Box]:
    """Boxes of one layer: ``elements`` (row-major in ``shape``) lie at ``places``."""
    inner = _inner_axis(shape, elements, places) if shape else None
    if inner is not None:
        low, count, stride = inner
        for box in _layer_boxes(runtime, name, shape[:-1], elements[::count] // shape[-1], places[::count]):
            area = ((*box.start, low), (*box.count, count), (*box.step, 1))
            yield Box(runtime, name, *area, box.offset, (*box.strides, stride))
        return
    index = np.unravel_index(elements, shape) if shape else ()
    lines: _Coordinates = [np.unique(axis) for axis in index]
    grid = np.full([line.size for line in lines], -1, np.int64)
    grid[tuple(np.searchsorted(line, axis) for line, axis in zip(lines, index, strict=True))] = (
        places if shape else places[0]
    )
    for cell, cell_lines in _affine_cells(grid, lines):
        yield _box(runtime, name, cell, cell_lines)


def _inner_axis(shape: tuple[int, ...], elements: Ids, places: Ids) -> tuple[int, int, int] | None:
    """First column, number of columns and stride if all rows lie alike: most layouts, and they need no grid for it."""
    low = int(elements[0]) % shape[-1]
    longest = min(elements.size, shape[-1] - low)
    ends = np.flatnonzero(elements[:longest] != elements[0] + np.arange(longest))
    count = int(ends[0]) if ends.size else longest
    if elements.size % count:
        return None
    stride = int(places[1] - places[0]) if count > 1 else 0
    rows, there = elements.reshape(-1, count), places.reshape(-1, count)
    alike = (
        (rows[:, 0] % shape[-1] == low).all()
        and (np.diff(rows, axis=1) == 1).all()
        and (np.diff(there, axis=1) == stride).all()
    )
    return (low, count, stride) if alike else None


def _affine_cells(grid: _Grid, lines: _Coordinates) -> Iterator[tuple[_Grid, _Coordinates]]:
    """Cut ``grid`` into cells that are full and affine; holes are dropped."""
    waiting = [(grid, lines)]
    while waiting:
        grid, lines = waiting.pop()
        cuts = [_segments(grid, lines[axis], axis) for axis in range(grid.ndim)]
        for cell in itertools.product(*cuts):
            inside = grid[np.ix_(*cell)] if cell else grid
            inside_lines = [line[part] for line, part in zip(lines, cell, strict=True)]
            if (inside < 0).all():
                continue
            if _is_affine(inside):
                yield inside, inside_lines
            elif inside.shape == grid.shape:
                waiting += _halves(inside, inside_lines)
            else:
                waiting.append((inside, inside_lines))


def _segments(grid: _Grid, line: _Line, axis: int) -> list[_Line]:
    """Cut ``axis`` into runs of slices (as positions) that are equally far apart, at run time and in the checkpoint.

    Slices are taken in checkpoint order, or in the order in which they lie at run time if that needs fewer runs
    (odd and even columns that a loader put side by side).
    """
    slices = np.moveaxis(grid, axis, 0).reshape(line.size, -1)
    lowest = np.where(slices < 0, np.iinfo(np.int64).max, slices).min(axis=1)
    orders = [np.arange(line.size), np.argsort(lowest, kind="stable")]
    return min(([order[run] for run in _runs(slices[order], line[order])] for order in orders), key=len)


def _runs(slices: _Grid, line: _Line) -> Iterator[slice]:
    """Runs of consecutive ``slices`` (``[n, ...]``) with equal distances; ``line`` has their coordinates."""
    steps, gaps = np.diff(slices, axis=0), np.diff(line)
    # Two neighbours can be in one run if they have the same holes and go forward both here and there.
    joins = ((slices[1:] < 0) == (slices[:-1] < 0)).all(axis=1) & (steps >= 0).all(axis=1) & (gaps > 0)
    alike = (steps[1:] == steps[:-1]).all(axis=1) & (gaps[1:] == gaps[:-1]) & joins[1:] & joins[:-1]
    # last[k]: the last gap of the longest run of equal gaps that begins at gap k.
    ends = np.append(np.flatnonzero(~alike), len(alike))
    last = ends[np.searchsorted(ends, np.arange(len(joins)))]
    k = 0
    while k < line.size:
        stop = k + 1
        if k < len(joins) and joins[k]:
            single_before_run = last[k] == k and k + 1 < len(joins) and joins[k + 1] and last[k + 1] > k + 1
            stop = k + 1 if single_before_run else int(last[k]) + 2
        yield slice(k, stop)
        k = stop


def _is_affine(cell: _Grid) -> bool:
    if (cell < 0).any():
        return False
    for axis in range(cell.ndim):
        steps = np.diff(cell, axis=axis)
        if steps.size and ((steps != steps.flat[0]).any() or steps.flat[0] <= 0):
            return False
    return True


def _halves(cell: _Grid, lines: _Coordinates) -> Iterator[tuple[_Grid, _Coordinates]]:
    """Cut along the longest axis: for what is neither affine nor shows where to cut it."""
    axis = int(np.argmax(cell.shape))
    middle = cell.shape[axis] // 2
    for part in (slice(0, middle), slice(middle, None)):
        index = tuple(part if d == axis else slice(None) for d in range(cell.ndim))
        yield cell[index], [line[i] for line, i in zip(lines, index, strict=True)]


def _box(runtime: str, name: str, cell: _Grid, lines: _Coordinates) -> Box:
    origin = (0,) * cell.ndim
    steps, strides = [], []
    for axis, line in enumerate(lines):
        second = tuple(int(d == axis) for d in range(cell.ndim))
        steps.append(int(line[1] - line[0]) if line.size > 1 else 1)
        strides.append(int(cell[second] - cell[origin]) if line.size > 1 else 0)
    start = tuple(int(line[0]) for line in lines)
    return Box(runtime, name, start, cell.shape, tuple(steps), int(cell[origin]), tuple(strides))


def _merged(boxes: Iterable[Box]) -> list[Box]:
    """Join neighbours that together are one box, until none is left; sorted by position.

    All are of one runtime and one checkpoint tensor.
    """
    found = list(boxes)
    before = len(found) + 1
    while found and len(found) < before:
        before = len(found)
        for axis in range(len(found[0].start)):
            found = _merged_along(found, axis)
    return sorted(found, key=lambda box: (box.start, box.offset))


def _merged_along(boxes: list[Box], axis: int) -> list[Box]:
    """Join boxes of one runtime and one checkpoint tensor that continue each other along ``axis``."""

    def across(values: tuple[int, ...]) -> tuple[int, ...]:
        return values[:axis] + values[axis + 1 :]

    groups: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
    for box in sorted(boxes, key=lambda box: (box.start[axis], box.offset)):
        key = (across(box.start), across(box.count), across(box.step), across(box.strides))
        groups.setdefault(key, []).append(box)
    merged: list[Box] = []
    for group in groups.values():
        open_boxes = [group[0]]
        for box in group[1:]:
            joined = _joined(open_boxes[-1], box, axis)
            if joined is None:
                open_boxes.append(box)
            else:
                open_boxes[-1] = joined
        merged += open_boxes
    return merged


def _joined(a: Box, b: Box, axis: int) -> Box | None:
    """``a`` continued by ``b`` along ``axis``, or ``None``. Two single lines are left alone unless they touch."""
    count_a, count_b = a.count[axis], b.count[axis]
    if count_a > 1:
        step, stride = a.step[axis], a.strides[axis]
    elif count_b > 1:
        step, stride = b.step[axis], b.strides[axis]
    else:
        step, stride = 1, b.offset - a.offset
    fits = (
        stride > 0
        and (count_b == 1 or (b.step[axis], b.strides[axis]) == (step, stride))
        and b.start[axis] == a.start[axis] + count_a * step
        and b.offset == a.offset + count_a * stride
    )
    if not fits:
        return None

    def replaced(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    return Box(
        a.runtime,
        a.tensor,
        a.start,
        replaced(a.count, count_a + count_b),
        replaced(a.step, step),
        a.offset,
        replaced(a.strides, stride),
    )
