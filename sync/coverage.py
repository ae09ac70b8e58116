"""Which part of every worker's weights the bridge accounts for, and how: a report for people. Pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import msgspec

from rlbridge.sync.correspondence import Correspondence
from rlbridge.sync.layout.algebra import Region, partition, region, size
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.opaque import EXPORT, is_virtual

_LISTED = 20
"""Computed tensors that the report names for one worker."""


class Computed(msgspec.Struct, frozen=True):
    """A runtime tensor with elements that the loader computes."""

    runtime: str
    elements: int
    inputs: tuple[str, ...]
    reason: str


class ReceiverCoverage(msgspec.Struct, frozen=True):
    """One receiver's runtime elements; ``copied + computed + constant`` are all that it has.

    Attributes:
        worker: its name.
        tensors: runtime tensors.
        copied: elements that are copies of checkpoint elements, written by the bridge.
        replicated: of those, how many hold a checkpoint element that the worker has somewhere else too.
        computed: elements that the loader computes.
        constant: the rest: padding, tables, elements that the loader sets without the checkpoint.
        computed_tensors: runtime tensors with computed elements; ``parts`` describes at most 20 of them.
        whole: checkpoint tensors that travel whole, since the computed elements depend on them.
    """

    worker: str
    tensors: int
    copied: int
    replicated: int
    computed: int
    constant: int
    computed_tensors: int
    whole: int
    parts: list[Computed]


class SenderCoverage(msgspec.Struct, frozen=True):
    """One sender's runtime tensors.

    Attributes:
        worker: its name.
        tensors: runtime tensors. held: those of a checkpoint tensor that some receiver needs. computed: those that its
            loader computes, so that it cannot be sent. unused: the others.
        exported: checkpoint tensors that the trainer exports, because its loader computes with them.
    """

    worker: str
    tensors: int
    held: int
    computed: int
    unused: int
    exported: int


class Coverage(msgspec.Struct, frozen=True):
    """All workers' coverage, by name. ``str()`` is a table."""

    receivers: list[ReceiverCoverage]
    senders: list[SenderCoverage]

    def __str__(self) -> str:
        columns = ["receiver", "tensors", "copied", "replicated", "computed", "constant", "whole tensors"]
        rows: list[Sequence[object]] = [
            [r.worker, r.tensors, r.copied, r.replicated, r.computed, r.constant, r.whole] for r in self.receivers
        ]
        lines = _table(columns, rows)
        for receiver in self.receivers:
            for part in receiver.parts:
                inputs = ", ".join(part.inputs)
                lines.append(
                    f"{receiver.worker}: {part.runtime}: {part.elements} elements from {inputs} ({part.reason})"
                )
            if receiver.computed_tensors > len(receiver.parts):
                lines.append(f"{receiver.worker}: ... and {receiver.computed_tensors - len(receiver.parts)} more")
        senders: list[Sequence[object]] = [
            [s.worker, s.tensors, s.held, s.computed, s.unused, s.exported] for s in self.senders
        ]
        return "\n".join(
            [*lines, "", *_table(["sender", "tensors", "held", "computed", "unused", "exported"], senders)]
        )


def coverage(correspondence: Correspondence) -> Coverage:
    """Count what every worker's elements are."""
    needed = {box.tensor for layout in correspondence.receivers.values() for box in layout.boxes}
    return Coverage(
        [_receiver(worker, layout) for worker, layout in sorted(correspondence.receivers.items())],
        [_sender(worker, layout, needed) for worker, layout in sorted(correspondence.senders.items())],
    )


def _receiver(worker: str, layout: SourceMap) -> ReceiverCoverage:
    own = {name: tensor for name, tensor in layout.runtime.items() if not is_virtual(name)}
    boxes = [box for box in layout.boxes if not is_virtual(box.runtime)]
    copied = sum(math.prod(box.count) for box in boxes)
    computed = sum(math.prod(part.count) for part in layout.opaque)
    parts = _computed(layout.opaque)
    return ReceiverCoverage(
        worker=worker,
        tensors=len(own),
        copied=copied,
        replicated=copied - _distinct(boxes),
        computed=computed,
        constant=sum(math.prod(tensor.shape) for tensor in own.values()) - copied - computed,
        computed_tensors=len(parts),
        whole=len(layout.opaque_inputs),
        parts=parts[:_LISTED],
    )


def _sender(worker: str, layout: SourceMap, needed: set[str]) -> SenderCoverage:
    own = [name for name in layout.runtime if not is_virtual(name)]
    held = {box.runtime for box in [*layout.boxes, *layout.aliases] if box.tensor in needed}
    exported = sum(name.startswith(EXPORT) for name in layout.runtime)
    return SenderCoverage(
        worker=worker,
        tensors=len(own),
        held=len(held.intersection(own)),
        computed=len({part.runtime for part in layout.opaque}),
        unused=len(set(own) - held - {part.runtime for part in layout.opaque}),
        exported=exported,
    )


def _computed(opaque: Iterable[Opaque]) -> list[Computed]:
    by_runtime: dict[str, list[Opaque]] = defaultdict(list)
    for part in opaque:
        by_runtime[part.runtime].append(part)
    return [
        Computed(
            runtime=runtime,
            elements=sum(math.prod(part.count) for part in parts),
            inputs=tuple(dict.fromkeys(name for part in parts for name in part.inputs)),
            reason=", ".join(dict.fromkeys(part.reason for part in parts)),
        )
        for runtime, parts in by_runtime.items()
    ]


def _distinct(boxes: Iterable[Box]) -> int:
    """Checkpoint elements that are in at least one of ``boxes``."""
    regions: dict[str, set[Region]] = defaultdict(set)
    for box in boxes:
        regions[box.tensor].add(region(box))
    return sum(size(cell) for its in regions.values() for cell, _ in partition(list(its)))


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [list(columns), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
