"""Atoms as columns: the bytes of all classes laid out on one axis, without an object for each atom. Pure.

An *atom* is a rectangle of one checkpoint tensor that every holder and every needer treats as a whole. A *class* is all
atoms with the same holders, needers and element width. Most tensors of a model are cut in the same way, so a class is
stored as *blocks*: the cells of one tensor, repeated over many tensors. ``AtomTable`` gives every byte of every atom a
position on one axis: class after class, block after block, tensor after tensor, cell after cell, each row-major.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from rlbridge.sync.layout.algebra import Region, size
from rlbridge.sync.layout.dtypes import item_bytes

Ints = NDArray[np.int64]


class AtomClass(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Atoms that may travel together.

    Attributes:
        item_bytes: width of an element on the wire.
        holders, needers: workers, sorted.
    """

    item_bytes: int
    holders: tuple[str, ...]
    needers: tuple[str, ...]


class AtomBlock(msgspec.Struct, frozen=True, array_like=True):
    """The same cells (``areas``) of each of ``tensors``; ``dtype`` is the wire's."""

    tensors: tuple[str, ...]
    dtype: str
    areas: tuple[Region, ...]

    @property
    def period_bytes(self) -> int:
        """Bytes of the cells of one tensor."""
        return sum(map(size, self.areas)) * item_bytes(self.dtype)


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Some elements of one checkpoint tensor: ``area`` row-major, in the wire dtype."""

    tensor: str
    area: Region
    dtype: str

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return size(self.area) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class AtomTable:
    """All atoms. ``C`` classes, ``B`` blocks, ``K`` cells.

    Attributes:
        classes: wide elements first, so that any run of positions packs aligned.
        blocks: ordered as on the axis.
        class_begin: ``[C + 1]`` positions; class ``c`` has ``class_begin[c] .. class_begin[c + 1]``.
        block_begin: ``[B + 1]`` positions.
        cell_begin: ``[K + 1]`` positions on a second axis, on which each block's cells appear for one tensor only.
        block_cell: ``[B]`` first cell of each block.
    """

    classes: tuple[AtomClass, ...]
    blocks: tuple[AtomBlock, ...]
    class_begin: Ints
    block_begin: Ints
    cell_begin: Ints
    block_cell: Ints

    @classmethod
    def of(cls, content: Sequence[tuple[AtomClass, Sequence[AtomBlock]]]) -> AtomTable:
        """Lay out the blocks of each class."""
        ordered = sorted(content, key=lambda item: (-item[0].item_bytes, item[0]))
        blocks = tuple(block for _, its in ordered for block in its)
        sizes = [block.period_bytes * len(block.tensors) for block in blocks]
        cells = [size(area) * item_bytes(block.dtype) for block in blocks for area in block.areas]
        block_begin = _cumulated(sizes)
        first_block = _cumulated([len(its) for _, its in ordered])
        return cls(
            classes=tuple(key for key, _ in ordered),
            blocks=blocks,
            class_begin=block_begin[first_block],
            block_begin=block_begin,
            cell_begin=_cumulated(cells),
            block_cell=_cumulated([len(block.areas) for block in blocks])[:-1],
        )

    @property
    def class_bytes(self) -> Ints:
        """``[C]`` bytes of each class."""
        return np.diff(self.class_begin)

    @property
    def atoms(self) -> int:
        """Number of atoms."""
        return sum(len(block.tensors) * len(block.areas) for block in self.blocks)

    def units(self, grain_bytes: int) -> Ints:
        """``[K]`` bytes of the largest run of each cell's trailing dimensions that is within ``grain_bytes``."""
        units: list[int] = []
        for block in self.blocks:
            width = item_bytes(block.dtype)
            units += [_unit(area.count, width, grain_bytes) for area in block.areas]
        return np.array(units, np.int64)

    def snapped(self, positions: Ints, units: Ints, *, nearest: bool = False) -> Ints:
        """Each of ``positions`` moved to where a cut is simple: a multiple of its cell's unit (see ``units``).

        A cut falls between elements, between rows where rows are smaller than the grain, between atoms where those are.
        It is the last such place that is not behind the position, or the nearest one.
        """
        if not positions.size:
            return positions
        inner = np.minimum(positions, self.block_begin[-1] - 1)
        block = np.searchsorted(self.block_begin, inner, side="right") - 1
        first_cell = self.block_cell[block]
        start = self.cell_begin[first_cell]
        # A block's cells on the second axis end where those of the next block begin.
        period = self.cell_begin[np.append(self.block_cell, len(self.cell_begin) - 1)[block + 1]] - start
        at = start + (inner - self.block_begin[block]) % period
        cell = np.searchsorted(self.cell_begin, at, side="right") - 1
        over = (at - self.cell_begin[cell]) % units[cell]
        up = np.where(nearest & (2 * over >= units[cell]), units[cell], 0)
        return np.where(positions > inner, positions, inner - over + up)

    def digest(self) -> str:
        """Equal for equal tables."""
        names: dict[int, str] = {}
        content: list[object] = [self.classes, self.class_begin.tolist()]
        for block in self.blocks:
            # Blocks of the same tensors share one tuple, which may be long.
            mine = names.get(id(block.tensors))
            if mine is None:
                mine = names[id(block.tensors)] = _hashed(block.tensors)
            content.append((mine, block.dtype, block.areas))
        return _hashed(content)

    def parts(self, begin: int, end: int) -> Iterator[Part]:
        """What lies between two positions, in order: whole atoms and, at the ends, rectangles of atoms."""
        index = bisect_right(self.block_begin, begin) - 1
        while begin < end:
            block, first = self.blocks[index], int(self.block_begin[index])
            stop = min(end, int(self.block_begin[index + 1]))
            yield from self._block_parts(index, block, begin - first, stop - first)
            begin, index = stop, index + 1

    def _block_parts(self, index: int, block: AtomBlock, begin: int, end: int) -> Iterator[Part]:
        first_cell = int(self.block_cell[index])
        edges = (self.cell_begin[first_cell : first_cell + len(block.areas) + 1] - self.cell_begin[first_cell]).tolist()
        period, width = edges[-1], item_bytes(block.dtype)
        while begin < end:
            turn, at = divmod(begin, period)
            cell = bisect_right(edges, at) - 1
            stop = min(end - turn * period, edges[cell + 1])
            for area in row_major_range(block.areas[cell], (at - edges[cell]) // width, (stop - edges[cell]) // width):
                yield Part(block.tensors[turn], area, block.dtype)
            begin = turn * period + stop


def row_major_range(area: Region, begin: int, end: int) -> list[Region]:
    """Elements ``begin .. end`` of ``area``, counted row-major, as rectangles whose concatenation keeps the order."""
    total = size(area)
    if begin >= end:
        return []
    if begin == 0 and end == total:
        return [area]
    d = next(i for i, n in enumerate(area.count) if n > 1)
    inner = total // area.count[d]
    first, last = -(-begin // inner), end // inner
    if first > last:  # within one row
        row = begin // inner
        return row_major_range(_rows(area, d, row, 1), begin - row * inner, end - row * inner)
    found: list[Region] = []
    if begin < first * inner:
        found += row_major_range(_rows(area, d, first - 1, 1), begin - (first - 1) * inner, inner)
    if first < last:
        found.append(_rows(area, d, first, last - first))
    if last * inner < end:
        found += row_major_range(_rows(area, d, last, 1), 0, end - last * inner)
    return found


def _rows(area: Region, d: int, first: int, count: int) -> Region:
    start, counts, steps = list(area.start), list(area.count), list(area.step)
    start[d] += first * steps[d]
    counts[d] = count
    if count == 1:
        steps[d] = 1
    return Region(tuple(start), tuple(counts), tuple(steps))


def _hashed(content: object) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(content))


def _unit(count: tuple[int, ...], width: int, grain_bytes: int) -> int:
    unit = width
    for n in reversed(count):
        if unit * n > grain_bytes:
            break
        unit *= n
    return unit


def _cumulated(sizes: Sequence[int]) -> Ints:
    return np.concatenate([[0], np.cumsum(np.array(sizes, np.int64))]).astype(np.int64)
