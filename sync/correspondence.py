"""Who has which checkpoint elements and who needs them: the intersection of all workers' layouts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import xxhash

from rlbridge.sync.layout.algebra import Region, partition, region, size
from rlbridge.sync.layout.dtypes import is_floating, item_bytes, torch_dtype
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.plan.atoms import AtomBlock, AtomClass, AtomTable
from rlbridge.transport.errors import LayoutError, PlanError

_LISTED = 20
"""Names that one error message lists before it only counts."""


class Atom(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of one checkpoint tensor that every holder and every needer treats as a whole.

    Attributes:
        tensor, area: the checkpoint elements; inside one box of each holder, and inside each box of a needer that
            it touches (a needer may keep an element in several places).
        dtype: wire dtype.
        holders, needers: workers, sorted. Both are non-empty.
    """

    tensor: str
    area: Region
    dtype: str
    holders: tuple[str, ...]
    needers: tuple[str, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes on the wire."""
        return size(self.area) * item_bytes(self.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class Correspondence:
    """All atoms, as columns, and the layouts that they were cut from.

    Attributes:
        table: the atoms.
        senders, receivers: worker to layout; equal layouts are one object.
        digests: worker to a digest of its layout.
    """

    table: AtomTable
    senders: dict[str, SourceMap]
    receivers: dict[str, SourceMap]
    digests: dict[str, str]

    def atoms(self) -> Iterator[Atom]:
        """One object for each atom, for small jobs and messages: a large model has millions."""
        of_class = np.searchsorted(self.table.class_begin, self.table.block_begin[:-1], side="right") - 1
        for block, c in zip(self.table.blocks, of_class, strict=True):
            key = self.table.classes[c]
            for tensor in block.tensors:
                for area in block.areas:
                    yield Atom(tensor, area, block.dtype, key.holders, key.needers)


def export_dtypes(spec: CheckpointSpec, export_dtype: str | None) -> dict[str, str]:
    """Wire dtypes: ``export_dtype`` for floating tensors if it is given, else the checkpoint's own."""
    if export_dtype is not None and not is_floating(export_dtype):
        raise LayoutError(f"export dtype {export_dtype!r} is not a floating one")
    return {
        name: export_dtype if export_dtype is not None and is_floating(tensor.dtype) else tensor.dtype
        for name, tensor in spec.tensors.items()
    }


def correspond(
    spec: CheckpointSpec,
    senders: Mapping[str, SourceMap],
    receivers: Mapping[str, SourceMap],
    wire_dtypes: Mapping[str, str] | None = None,
) -> Correspondence:
    """Cut the checkpoint into atoms and prove that every receiver can be served.

    Args:
        spec: the coordinates.
        senders, receivers: worker to layout; no worker is both.
        wire_dtypes: checkpoint tensor to dtype on the wire; those not named travel in the checkpoint's.

    Raises:
        LayoutError: a receiver has elements that no sender holds, or a floating tensor that no checkpoint tensor
            fills or enters; a sender holds a tensor in another kind of numbers than it travels in; the text lists them.
        PlanError: a worker is on both sides.
    """
    both = sorted(set(senders) & set(receivers))
    if both:
        raise PlanError(f"workers are both sender and receiver: {', '.join(both)}; give each side its own name")
    wire = {name: tensor.dtype for name, tensor in spec.tensors.items()} | dict(wire_dtypes or {})
    for name in {wire[name] for name in spec.tensors}:
        torch_dtype(name)
    known: dict[int, str] = {}  # by identity: replicas often share one object
    digests = {
        worker: known.get(id(layout)) or known.setdefault(id(layout), _digest(layout))
        for worker, layout in [*senders.items(), *receivers.items()]
    }
    sending, receiving = _distinct(senders, digests), _distinct(receivers, digests)
    held = {workers: [*layout.boxes, *layout.aliases] for workers, layout in sending.items()}
    needed = {workers: layout.boxes for workers, layout in receiving.items()}
    _check_names(spec, {**held, **needed})
    _check_filled(spec, receiving)
    _check_kinds(sending, wire)
    table = _cut(spec, held, needed, wire)
    _check_held(table, needed)
    return Correspondence(
        table,
        {worker: layout for workers, layout in sending.items() for worker in workers},
        {worker: layout for workers, layout in receiving.items() for worker in workers},
        dict(sorted(digests.items())),
    )


_Replicas = tuple[str, ...]
"""The workers that have equal layouts, sorted."""


def _digest(layout: SourceMap) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(layout, order="deterministic"))


def _distinct(layouts: Mapping[str, SourceMap], digests: Mapping[str, str]) -> dict[_Replicas, SourceMap]:
    """Each layout once: replicas cost no more than one of them."""
    replicas: dict[str, list[str]] = defaultdict(list)
    for worker in sorted(layouts):
        replicas[digests[worker]].append(worker)
    return {tuple(workers): layouts[workers[0]] for workers in replicas.values()}


def _cut(
    spec: CheckpointSpec,
    held: Mapping[_Replicas, list[Box]],
    needed: Mapping[_Replicas, list[Box]],
    wire: Mapping[str, str],
) -> AtomTable:
    """Atoms of what is needed; the holders of a class may still be none.

    Tensors that everybody cuts in the same way are cut once.
    """
    shapes = _Shapes([*held], [*needed])
    holders, needers = shapes.by_tensor(held.values()), shapes.by_tensor(needed.values())
    alike: dict[Any, list[str]] = defaultdict(list)
    for tensor in spec.tensors:
        if tensor in needers:
            cut = (wire[tensor], _sorted_items(holders.get(tensor, {})), _sorted_items(needers[tensor]))
            alike[cut].append(tensor)
    blocks: dict[AtomClass, list[AtomBlock]] = defaultdict(list)
    for (dtype, owners, users), tensors in alike.items():
        names = tuple(tensors)
        for key, areas in shapes.cells(item_bytes(dtype), owners, users).items():
            blocks[key].append(AtomBlock(names, dtype, tuple(areas)))
    return AtomTable.of(list(blocks.items()))


_Regions = tuple[tuple[int, tuple[int, ...]], ...]
"""(number of a region, numbers of the layouts that have exactly that region)."""


def _sorted_items(regions: Mapping[int, list[int]]) -> _Regions:
    return tuple((number, tuple(regions[number])) for number in sorted(regions))


class _Shapes:
    """Regions as numbers, and what partitioning a set of them gives, worked out once for each set.

    Layouts are numbers too: the index in ``sending`` or ``receiving``.
    """

    def __init__(self, sending: list[_Replicas], receiving: list[_Replicas]) -> None:
        self._sending, self._receiving = sending, receiving
        self._by_number: list[Region] = []
        self._numbers: dict[Any, int] = {}
        self._regions: dict[Region, int] = {}
        self._partitions: dict[tuple[int, ...], list[tuple[Region, list[int]]]] = {}
        self._classes: dict[Any, AtomClass] = {}

    def by_tensor(self, boxes: Iterable[list[Box]]) -> dict[str, dict[int, list[int]]]:
        """Checkpoint tensor to region to the layouts that have a box of exactly that region."""
        found: dict[str, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        for layout, its_boxes in enumerate(boxes):
            for box in its_boxes:
                having = found[box.tensor][self._number(box)]
                if not having or having[-1] != layout:
                    having.append(layout)
        return found

    def _number(self, box: Box) -> int:
        key = (box.start, box.count, box.step)
        number = self._numbers.get(key)
        if number is None:
            area = region(box)
            number = self._numbers[key] = self._regions.setdefault(area, len(self._regions))
            if number == len(self._by_number):
                self._by_number.append(area)
        return number

    def cells(self, width: int, owners: _Regions, users: _Regions) -> dict[AtomClass, list[Region]]:
        """The needed cells of a tensor with these regions, by class."""
        found: dict[AtomClass, list[Region]] = defaultdict(list)
        owning, using = dict(owners), dict(users)
        for cell, numbers in self._partition(tuple(sorted({*owning, *using}))):
            wanted = frozenset(layout for number in numbers for layout in using.get(number, ()))
            if wanted:
                having = frozenset(layout for number in numbers for layout in owning.get(number, ()))
                found[self._class(width, having, wanted)].append(cell)
        return found

    def _partition(self, numbers: tuple[int, ...]) -> list[tuple[Region, list[int]]]:
        cells = self._partitions.get(numbers)
        if cells is None:
            ordered = sorted(numbers, key=lambda n: msgspec.structs.astuple(self._by_number[n]))
            found = partition([self._by_number[n] for n in ordered])
            cells = self._partitions[numbers] = [(cell, [ordered[i] for i in sorted(inside)]) for cell, inside in found]
        return cells

    def _class(self, width: int, holders: frozenset[int], needers: frozenset[int]) -> AtomClass:
        key = (width, holders, needers)
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = AtomClass(
                width, _union(self._sending[i] for i in holders), _union(self._receiving[i] for i in needers)
            )
        return found


def _union(layouts: Iterable[_Replicas]) -> tuple[str, ...]:
    return tuple(sorted(worker for workers in layouts for worker in workers))


def _check_names(spec: CheckpointSpec, boxes: Mapping[_Replicas, list[Box]]) -> None:
    unknown = {
        f"{worker}: {box.tensor}"
        for workers, its in boxes.items()
        for box in its
        if box.tensor not in spec.tensors
        for worker in workers
    }
    if unknown:
        raise LayoutError("layouts name tensors that the checkpoint does not have:" + _listing(unknown))


def _check_filled(spec: CheckpointSpec, receivers: Mapping[_Replicas, SourceMap]) -> None:
    """Every weight gets values. Integers are weights if the checkpoint has the very tensor, else an engine's tables."""
    empty: set[str] = set()
    for workers, layout in receivers.items():
        filled = {box.runtime for box in layout.boxes} | {part.runtime for part in layout.opaque}
        empty |= {
            f"{worker}: {name} {list(tensor.shape)} {tensor.dtype}"
            for name, tensor in layout.runtime.items()
            if name not in filled and (is_floating(tensor.dtype) or spec.tensors.get(name) == tensor)
            if 0 not in tensor.shape
            for worker in workers
        }
    if empty:
        raise LayoutError(
            "no checkpoint tensor fills these tensors of the receivers, so an update would leave them stale:"
            + _listing(empty)
            + "\nLeave them out of the live tensors if they are not weights, or fix the loader."
        )


def _check_kinds(senders: Mapping[_Replicas, SourceMap], wire: Mapping[str, str]) -> None:
    """Packing casts to the wire dtype; between integers and floating numbers that would change values silently."""
    kinds = {name: is_floating(dtype) for name, dtype in wire.items()}
    other: set[str] = set()
    for workers, layout in senders.items():
        held = {name: is_floating(tensor.dtype) for name, tensor in layout.runtime.items()}
        other |= {
            f"{worker}: {box.runtime} is {layout.runtime[box.runtime].dtype}, "
            f"{box.tensor} travels as {wire[box.tensor]}"
            for box in [*layout.boxes, *layout.aliases]
            if held[box.runtime] != kinds[box.tensor]
            for worker in workers
        }
    if other:
        raise LayoutError(
            "senders hold tensors in another kind of numbers than the checkpoint's:"
            + _listing(other)
            + "\nGive the trainer a checkpoint in its own format, or keep these tensors in the checkpoint's."
        )


def _check_held(table: AtomTable, needed: Mapping[_Replicas, list[Box]]) -> None:
    missing: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for c, key in enumerate(table.classes):
        if not key.holders:
            for part in table.parts(int(table.class_begin[c]), int(table.class_begin[c + 1])):
                missing[part.tensor, key.needers] += size(part.area)
    lines = set()
    for (tensor, needers), count in missing.items():
        boxes = next(its for workers, its in needed.items() if needers[0] in workers)
        runtime = sorted({box.runtime for box in boxes if box.tensor == tensor})
        lines.add(f"{tensor}: {count} elements needed by {', '.join(needers)} (in {', '.join(runtime)})")
    if lines:
        raise LayoutError("no sender holds these checkpoint elements:" + _listing(lines))


def _listing(lines: Iterable[str]) -> str:
    ordered = sorted(lines)
    more = [f"... and {len(ordered) - _LISTED} more"] if len(ordered) > _LISTED else []
    return "".join(f"\n  {line}" for line in [*ordered[:_LISTED], *more])
