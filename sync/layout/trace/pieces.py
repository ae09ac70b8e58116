"""Affine maps between two storages, and where two of them meet. Pure integers: no tensors here.

A *piece* says that destination address ``at + sum(k[d] * at_stride[d])`` holds what source address
``of + sum(k[d] * of_stride[d])`` holds. To intersect two sets of addresses, both are cut into *cells*, rectangles in
one mixed-radix number system, which is chosen from the strides themselves: regular layouts need no cut at all.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rlbridge.sync.layout.algebra import Region, intersect, subtract
from rlbridge.sync.layout.elements import row_major_strides

Dim = tuple[int, int, int]
"""Count, stride there (destination), stride here (source)."""

MAX_CELLS = 1 << 16


class TooIrregularError(Exception):
    """A map would need more than ``MAX_CELLS`` pieces."""


class Piece(NamedTuple):
    """See the module. ``dims`` are coalesced, by ascending destination stride; all counts exceed 1."""

    at: int
    of: int
    dims: tuple[Dim, ...]


class _Cell(NamedTuple):
    """A rectangle in digits, and the affine address on the other side; ``free`` dimensions do not move here."""

    region: Region
    other: int
    strides: tuple[int, ...]
    free: tuple[tuple[int, int], ...]


def piece(at: int, of: int, dims: Iterable[Dim]) -> Piece:
    """The piece with these dimensions, in its shortest form."""
    short: list[Dim] = []
    for count, there, here in sorted((d for d in dims if d[0] > 1), key=lambda d: (d[1], d[2])):
        if short:
            inner = short[-1]
            if there == inner[0] * inner[1] and here == inner[0] * inner[2]:
                short[-1] = (inner[0] * count, inner[1], inner[2])
                continue
        short.append((count, there, here))
    return Piece(at, of, tuple(short))


def flat(count: int) -> Piece:
    """The identity on the first ``count`` addresses."""
    return Piece(0, 0, ((count, 1, 1),) if count > 1 else ())


def reach(part: Piece) -> int:
    """From the first to the last destination."""
    return sum((n - 1) * there for n, there, _ in part.dims)


def compose(read: Piece, written: Piece) -> list[Piece]:
    """What ``read`` (destination from X) gets of what was ``written`` (X from source): destination from source."""
    low, high = _span(read.of, [(d[0], d[2]) for d in read.dims])
    first, last = _span(written.at, [(d[0], d[1]) for d in written.dims])
    if high < first or last < low:
        return []
    if _is_run(written) and first <= low and high <= last:
        stride = written.dims[0][2] if written.dims else 0
        dims = [(n, there, here * stride) for n, there, here in read.dims]
        return [piece(read.at, written.of + (low - first) * stride, dims)]
    chain = _chain([d[2] for d in read.dims] + [d[1] for d in written.dims])
    origin = read.of if len(read.dims) > len(written.dims) else written.at
    ours = list(_cells(read.of, read.at, [(n, here, there) for n, there, here in read.dims], chain, origin))
    theirs = list(_cells(written.at, written.of, written.dims, chain, origin))
    found = []
    for a, b in itertools.product(ours, theirs):
        common = intersect(a.region, b.region)
        if common is not None:
            (at, there), (of, here) = _within(a, common), _within(b, common)
            dims = [*zip(common.count, there, here, strict=True), *((n, stride, 0) for n, stride in a.free)]
            found.append(piece(at, of, dims))
    return found


def without(written: Piece, hole: Piece) -> list[Piece]:
    """``written`` where its destination is not one of ``hole``'s destinations."""
    low, high = _span(hole.at, [(d[0], d[1]) for d in hole.dims])
    first, last = _span(written.at, [(d[0], d[1]) for d in written.dims])
    if high < first or last < low:
        return [written]
    if _is_run(hole) and low <= first and last <= high:
        return []
    chain = _chain([d[1] for d in written.dims] + [d[1] for d in hole.dims])
    origin = hole.at if len(hole.dims) > len(written.dims) else written.at
    holes = [cell.region for cell in _cells(hole.at, 0, [(n, s, 0) for n, s, _ in hole.dims], chain, origin)]
    cells = list(_cells(written.at, written.of, written.dims, chain, origin))
    if not any(intersect(cell.region, area) for cell in cells for area in holes):
        return [written]
    left = []
    for cell in cells:
        regions = [cell.region]
        for area in holes:
            regions = [rest for region in regions for rest in subtract(region, area)]
            if len(regions) > MAX_CELLS:
                raise TooIrregularError
        left += [_piece_of(cell, region, chain, origin) for region in regions]
    return left


def rectangles(
    of: int, at: int, dims: Sequence[Dim], shape: tuple[int, ...]
) -> Iterator[tuple[Region, int, tuple[int, ...]]]:
    """Cut a piece (``dims`` as in ``Piece``) into rectangles of the source, which is row-major of ``shape`` (``[N]``).

    Yields the region, the destination of its first element, and the destination strides, ``[N]``.
    """
    chain = row_major_strides(shape)[::-1]
    for cell in _cells(of, at, [(n, here, there) for n, there, here in dims], chain, 0):
        region = Region(cell.region.start[::-1], cell.region.count[::-1], cell.region.step[::-1])
        for copy in itertools.product(*(range(n) for n, _ in cell.free)):
            shift = sum(k * stride for k, (_, stride) in zip(copy, cell.free, strict=True))
            yield region, cell.other + shift, cell.strides[::-1]


def _span(offset: int, dims: Iterable[tuple[int, int]]) -> tuple[int, int]:
    return offset, offset + sum((n - 1) * stride for n, stride in dims)


def _is_run(written: Piece) -> bool:
    """Whether the destination is an interval, filled in order."""
    return not written.dims or (len(written.dims) == 1 and written.dims[0][1] == 1)


def _chain(strides: Iterable[int]) -> tuple[int, ...]:
    """Radices of a number system, ascending from 1, each dividing the next: as many of ``strides`` as fit."""
    kept: list[int] = []
    for stride in sorted(set(strides), reverse=True):
        if stride > 0 and (not kept or kept[-1] % stride == 0):
            kept.append(stride)
    if not kept or kept[-1] != 1:
        kept.append(1)
    return tuple(reversed(kept))


def _cells(at: int, other: int, dims: Iterable[Dim], chain: tuple[int, ...], origin: int) -> Iterator[_Cell]:
    """Cut addresses ``at + sum(k[d] * dims[d][1])`` into rectangles of digits in ``chain``, counted from ``origin``.

    Raises:
        TooIrregularError: there are too many.
    """
    moving, free = [], []
    for dim in dims:
        if dim[1]:
            moving.append(dim)
        else:
            free.append((dim[0], dim[2]))
    work = [(at - origin, other, sorted(moving, key=lambda d: d[1]))]
    made = 0
    while work:
        address, there, left = work.pop()
        cell = _place(address, there, left, chain, work)
        if cell is not None:
            yield cell._replace(free=tuple(free))
        made += 1
        if made + len(work) > MAX_CELLS:
            raise TooIrregularError


_Work = list[tuple[int, int, list[Dim]]]


def _place(address: int, other: int, dims: list[Dim], chain: tuple[int, ...], work: _Work) -> _Cell | None:
    """Give each dimension a digit; where one does not fit, put the parts that do onto ``work`` instead."""
    start = [0] * len(chain)
    rest = address
    for j in range(len(chain) - 1, -1, -1):
        start[j], rest = divmod(rest, chain[j])
    count, step, strides = [1] * len(chain), [1] * len(chain), [0] * len(chain)
    for i, (n, stride, along) in enumerate(dims):
        j = max(j for j in range(len(chain)) if stride % chain[j] == 0)
        each = stride // chain[j]
        radix = chain[j + 1] // chain[j] if j + 1 < len(chain) else None
        if count[j] > 1:
            parts = [(k, list[Dim]()) for k in range(n)]
        elif radix is not None and start[j] + (n - 1) * each >= radix:
            parts = _carried(dims[i], start[j], each, radix)
        else:
            start[j], count[j], step[j], strides[j] = start[j], n, each, along
            continue
        if len(parts) > MAX_CELLS:
            raise TooIrregularError
        for k, new in parts:
            others = sorted([*dims[:i], *dims[i + 1 :], *new], key=lambda d: d[1])
            work.append((address + k * stride, other + k * along, others))
        return None
    return _Cell(Region(tuple(start), tuple(count), tuple(step)), other, tuple(strides), ())


def _carried(dim: Dim, start: int, each: int, radix: int) -> list[tuple[int, list[Dim]]]:
    """Cut a dimension that overflows its digit: the rest of the first row, whole rows, the beginning of the last."""
    n, stride, along = dim
    head = -(-(radix - start) // each)
    if radix % each:
        parts = [(0, [(head, stride, along)]), (head, [(n - head, stride, along)])]
    else:
        row = radix // each
        head = 0 if start < each else head
        rows, tail = divmod(n - head, row)
        parts = [
            (0, [(head, stride, along)]),
            (head, [(row, stride, along), (rows, stride * row, along * row)]),
            (n - tail, [(tail, stride, along)]),
        ]
    return [(k, [d for d in dims if d[0] > 1]) for k, dims in parts if all(d[0] > 0 for d in dims)]


def _within(cell: _Cell, part: Region) -> tuple[int, list[int]]:
    """Other-side offset and strides of ``part`` of ``cell``."""
    whole, other, strides = cell.region, cell.other, []
    for d, along in enumerate(cell.strides):
        other += (part.start[d] - whole.start[d]) // whole.step[d] * along
        strides.append(part.step[d] // whole.step[d] * along if part.count[d] > 1 else 0)
    return other, strides


def _piece_of(cell: _Cell, part: Region, chain: tuple[int, ...], origin: int) -> Piece:
    of, here = _within(cell, part)
    at = origin + sum(start * radix for start, radix in zip(part.start, chain, strict=True))
    there = [step * radix for step, radix in zip(part.step, chain, strict=True)]
    return piece(at, of, zip(part.count, there, here, strict=True))
