"""Exact operations on boxes. Pure integers: nothing here knows tensors, workers or bytes.

A *region* is a box's set of checkpoint elements: one arithmetic progression per dimension.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from rlbridge.sync.layout.source_map import Box
from rlbridge.transport.errors import LayoutError


class Region(msgspec.Struct, frozen=True, array_like=True):
    """Elements ``start[d] + k * step[d]``, ``0 <= k < count[d]``, of one checkpoint tensor; ``[N]`` each.

    Canonical, so that equal sets are equal values: ``step`` is 1 where ``count`` is 1. Never empty.
    """

    start: tuple[int, ...]
    count: tuple[int, ...]
    step: tuple[int, ...]


def region(box: Box) -> Region:
    """The checkpoint elements of ``box``."""
    return _canonical(zip(box.start, box.count, box.step, strict=True))


def size(area: Region) -> int:
    """Number of elements."""
    return math.prod(area.count)


def intersect(a: Region, b: Region) -> Region | None:
    """The common elements, or ``None``."""
    axes = []
    for one, other in zip(_axes(a), _axes(b), strict=True):
        common = _intersect_axis(one, other)
        if common is None:
            return None
        axes.append(common)
    return _canonical(axes)


def subtract(a: Region, b: Region) -> list[Region]:
    """Disjoint regions that together are ``a`` without ``b``."""
    common = intersect(a, b)
    if common is None:
        return [a]
    left: list[Region] = []
    axes, inner = list(_axes(a)), list(_axes(common))
    for d in range(len(axes)):
        # Everything that differs from the common part first in dimension d.
        left += [_canonical([*inner[:d], rest, *axes[d + 1 :]]) for rest in _subtract_axis(axes[d], inner[d])]
    return left


def contains(outer: Region, inner: Region) -> bool:
    """Whether every element of ``inner`` is one of ``outer``."""
    return intersect(outer, inner) == inner


def restrict(box: Box, area: Region) -> Box:
    """The part of ``box`` that holds ``area``, in the same runtime tensor.

    Raises:
        LayoutError: ``area`` is not inside ``box``.
    """
    if not contains(region(box), area):
        raise LayoutError(f"{area} is not inside the box of {box.runtime!r} from {box.tensor!r}")
    offset, strides = box.offset, []
    for d, (start, count, step) in enumerate(_axes(area)):
        offset += (start - box.start[d]) // box.step[d] * box.strides[d]
        strides.append(box.strides[d] * (step // box.step[d]) if count > 1 else 0)
    return Box(box.runtime, box.tensor, area.start, area.count, area.step, offset, tuple(strides))


def split(area: Region, max_elements: int) -> list[Region]:
    """Cut into regions of at most ``max_elements`` whose row-major concatenation is ``area``'s row-major order."""
    if max_elements < 1:
        raise LayoutError(f"cannot split a region into parts of {max_elements} elements")
    if size(area) <= max_elements:
        return [area]
    axes = list(_axes(area))
    d = next(i for i, n in enumerate(area.count) if n > 1)
    start, count, step = axes[d]
    parts_needed = -(-count // max(1, max_elements // (size(area) // count)))
    per_part = -(-count // parts_needed)
    parts: list[Region] = []
    for k in range(0, count, per_part):
        part = _canonical([*axes[:d], (start + k * step, min(per_part, count - k), step), *axes[d + 1 :]])
        parts += split(part, max_elements)
    return parts


def partition(regions: Sequence[Region]) -> list[tuple[Region, frozenset[int]]]:
    """Few cells found by cutting ``regions`` at each other, each with the indices of the regions it lies in.

    Cells are disjoint, together they are the union, and each is wholly inside or wholly outside every region. Regions
    without steps take time in proportion to the cells; others are cut pair by pair.
    """
    if all(step == 1 for area in regions for step in area.step):
        cells = _Slabs(regions).cells(frozenset(range(len(regions))), 0) if regions else []
        found = [(Region(*_columns(axes), (1,) * len(axes)), members) for axes, members in cells]
    else:
        found = _partition_pairwise(regions)
    return sorted(found, key=lambda item: item[0].start)


class _Slabs:
    """Cuts regions without steps along the first axis into slabs, and each slab along the next one."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = regions
        self._known: dict[tuple[frozenset[int], int], list[tuple[_Ranges, frozenset[int]]]] = {}

    def cells(self, members: frozenset[int], d: int) -> list[tuple[_Ranges, frozenset[int]]]:
        """Start and count of each cell along the axes from ``d`` on; all ``members`` are alike along those before."""
        if d == len(self._regions[0].start):
            return [((), members)]
        key = (members, d)
        if key not in self._known:
            self._known[key] = [
                (((start, count), *rest), inside)
                for start, count, crossing in self._cut(members, d)
                for rest, inside in self.cells(crossing, d + 1)
            ]
        return self._known[key]

    def _cut(self, members: frozenset[int], d: int) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Ranges along axis ``d``, each with those of ``members`` that cross it."""
        opening: dict[int, set[int]] = defaultdict(set)
        closing: dict[int, set[int]] = defaultdict(set)
        for i in members:
            begin, count = self._regions[i].start[d], self._regions[i].count[d]
            opening[begin].add(i)
            closing[begin + count].add(i)
        crossing: frozenset[int] = frozenset()
        cuts = sorted({*opening, *closing})
        for begin, end in itertools.pairwise(cuts):
            crossing = (crossing - closing[begin]) | opening[begin]
            if crossing:
                yield begin, end - begin, crossing


_Ranges = tuple[tuple[int, int], ...]
"""start, count per axis."""


def _columns(axes: _Ranges) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(start for start, _ in axes), tuple(count for _, count in axes)


def _partition_pairwise(regions: Sequence[Region]) -> list[tuple[Region, frozenset[int]]]:
    cells: list[tuple[Region, frozenset[int]]] = []
    for index, area in enumerate(regions):
        refined: list[tuple[Region, frozenset[int]]] = []
        left = [area]
        for cell, members in cells:
            common = intersect(cell, area) if left else None
            if common is None:
                refined.append((cell, members))
                continue
            refined.append((common, members | {index}))
            refined += [(rest, members) for rest in subtract(cell, common)]
            left = [rest for part in left for rest in subtract(part, common)]
        cells = refined + [(rest, frozenset({index})) for rest in left]
    return cells


_Axis = tuple[int, int, int]
"""start, count, step."""


def _axes(area: Region) -> Iterator[_Axis]:
    return zip(area.start, area.count, area.step, strict=True)


def _canonical(axes: Iterable[_Axis]) -> Region:
    fixed = [(start, count, step if count > 1 else 1) for start, count, step in axes]
    return Region(tuple(a[0] for a in fixed), tuple(a[1] for a in fixed), tuple(a[2] for a in fixed))


def _intersect_axis(a: _Axis, b: _Axis) -> _Axis | None:
    """Common members of two progressions; the Chinese remainder theorem finds the first candidate."""
    (a0, an, da), (b0, bn, db) = a, b
    gcd = math.gcd(da, db)
    if (b0 - a0) % gcd:
        return None
    period = da // gcd * db
    modulus = db // gcd
    k = (b0 - a0) // gcd * pow(da // gcd, -1, modulus) % modulus
    first, low = a0 + k * da, max(a0, b0)
    if first < low:
        first += (low - first + period - 1) // period * period
    last = min(a0 + (an - 1) * da, b0 + (bn - 1) * db)
    if first > last:
        return None
    return first, (last - first) // period + 1, period


def _subtract_axis(a: _Axis, inner: _Axis) -> list[_Axis]:
    """``a`` without ``inner``, a progression inside it."""
    start, count, step = a
    first = (inner[0] - start) // step
    stride = inner[2] // step if inner[1] > 1 else 1
    behind = first + (inner[1] - 1) * stride + 1
    parts = [(0, first, 1), (behind, count - behind, 1)]
    parts += [(first + residue, inner[1] - 1, stride) for residue in range(1, stride)]
    return [(start + k * step, n, s * step) for k, n, s in parts if n > 0]
