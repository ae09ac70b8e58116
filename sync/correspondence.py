"""Who has which checkpoint elements and who needs them: the intersection of all workers' layouts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import msgspec

from rlbridge.sync.layout.algebra import Region, partition, region, size
from rlbridge.sync.layout.dtypes import is_floating, item_bytes, torch_dtype
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
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


class Correspondence(msgspec.Struct, frozen=True):
    """All atoms, in checkpoint order, and the layouts that they were cut from."""

    atoms: list[Atom]
    senders: dict[str, SourceMap]
    receivers: dict[str, SourceMap]


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
    held = {worker: [*layout.boxes, *layout.aliases] for worker, layout in senders.items()}
    needed = {worker: layout.boxes for worker, layout in receivers.items()}
    _check_names(spec, {**held, **needed})
    _check_filled(receivers)
    _check_kinds(senders, wire)
    atoms = _atoms(spec, held, needed, wire)
    _check_held(atoms, needed)
    return Correspondence(atoms, dict(senders), dict(receivers))


def _atoms(
    spec: CheckpointSpec, held: Mapping[str, list[Box]], needed: Mapping[str, list[Box]], wire: Mapping[str, str]
) -> list[Atom]:
    """Atoms of what is needed; ``holders`` may still be empty."""
    holders, needers = _by_tensor(held), _by_tensor(needed)
    atoms: list[Atom] = []
    for tensor in spec.tensors:
        if tensor not in needers:
            continue
        # Equal regions of many replicas count once, so that the cutting depends on distinct layouts only.
        distinct = {*needers[tensor], *holders.get(tensor, {})}
        areas = sorted(distinct, key=lambda area: (area.start, area.count, area.step))
        for cell, members in partition(areas):
            touched = [areas[i] for i in members]
            wanted = {worker for area in touched for worker in needers[tensor].get(area, ())}
            owners = {worker for area in touched for worker in holders.get(tensor, {}).get(area, ())}
            if wanted:
                atoms.append(Atom(tensor, cell, wire[tensor], tuple(sorted(owners)), tuple(sorted(wanted))))
    return atoms


def _by_tensor(boxes: Mapping[str, list[Box]]) -> dict[str, dict[Region, set[str]]]:
    """Checkpoint tensor to region to the workers that have a box of exactly that region."""
    found: dict[str, dict[Region, set[str]]] = defaultdict(lambda: defaultdict(set))
    for worker, its_boxes in boxes.items():
        for box in its_boxes:
            found[box.tensor][region(box)].add(worker)
    return found


def _check_names(spec: CheckpointSpec, boxes: Mapping[str, list[Box]]) -> None:
    unknown = {
        f"{worker}: {box.tensor}" for worker, its in boxes.items() for box in its if box.tensor not in spec.tensors
    }
    if unknown:
        raise LayoutError("layouts name tensors that the checkpoint does not have:" + _listing(unknown))


def _check_filled(receivers: Mapping[str, SourceMap]) -> None:
    empty: set[str] = set()
    for worker, layout in receivers.items():
        filled = {box.runtime for box in layout.boxes} | {part.runtime for part in layout.opaque}
        empty |= {
            f"{worker}: {name} {list(tensor.shape)} {tensor.dtype}"
            for name, tensor in layout.runtime.items()
            if name not in filled and is_floating(tensor.dtype) and 0 not in tensor.shape
        }
    if empty:
        raise LayoutError(
            "no checkpoint tensor fills these tensors of the receivers, so an update would leave them stale:"
            + _listing(empty)
            + "\nLeave them out of the live tensors if they are not weights, or fix the loader."
        )


def _check_kinds(senders: Mapping[str, SourceMap], wire: Mapping[str, str]) -> None:
    """Packing casts to the wire dtype; between integers and floating numbers that would change values silently."""
    other = {
        f"{worker}: {box.runtime} is {layout.runtime[box.runtime].dtype}, {box.tensor} travels as {wire[box.tensor]}"
        for worker, layout in senders.items()
        for box in [*layout.boxes, *layout.aliases]
        if is_floating(layout.runtime[box.runtime].dtype) != is_floating(wire[box.tensor])
    }
    if other:
        raise LayoutError(
            "senders hold tensors in another kind of numbers than the checkpoint's:"
            + _listing(other)
            + "\nGive the trainer a checkpoint in its own format, or keep these tensors in the checkpoint's."
        )


def _check_held(atoms: Iterable[Atom], needed: Mapping[str, list[Box]]) -> None:
    missing: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for atom in atoms:
        if not atom.holders:
            missing[atom.tensor, atom.needers] += size(atom.area)
    if not missing:
        return
    lines = set()
    for (tensor, needers), count in missing.items():
        runtime = sorted({box.runtime for box in needed[needers[0]] if box.tensor == tensor})
        lines.add(f"{tensor}: {count} elements needed by {', '.join(needers)} (in {', '.join(runtime)})")
    raise LayoutError("no sender holds these checkpoint elements:" + _listing(lines))


def _listing(lines: Iterable[str]) -> str:
    ordered = sorted(lines)
    more = [f"... and {len(ordered) - _LISTED} more"] if len(ordered) > _LISTED else []
    return "".join(f"\n  {line}" for line in [*ordered[:_LISTED], *more])
