"""From the content of a live tensor's storage to boxes of the source map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rlbridge.sync.layout.recover import _merged
from rlbridge.sync.layout.source_map import Box, Opaque
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.layout.trace.casts import no_copy
from rlbridge.sync.layout.trace.content import Entry, Made, WidthError, read
from rlbridge.sync.layout.trace.pieces import MAX_CELLS, Piece, TooIrregularError, rectangles
from rlbridge.sync.layout.trace.store import Store


@dataclass(frozen=True, slots=True)
class Found:
    """All that is known of one runtime tensor."""

    boxes: list[Box] = field(default_factory=list)
    opaque: list[Opaque] = field(default_factory=list)


def boxes_of(
    store: Store, spec: CheckpointSpec, position: Mapping[str, int], name: str, tensor: torch.Tensor
) -> Found | str:
    """Boxes of the runtime tensor ``name``; a text instead if they cannot be had.

    Args:
        store: the contents after the load.
        spec: the checkpoint.
        position: place of each checkpoint tensor in it.
        name: of the runtime tensor.
        tensor: the live tensor as it is after the load.
    """
    content = store.of(tensor)
    if content is None:
        return Found()
    row_major = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    try:
        entries = read(content, row_major, tensor)
        lost = [origin.reason for _, origin in entries if isinstance(origin, Made) and origin.lost]
        return lost[0] if lost else _expressed(entries, spec, position, name)
    except WidthError:
        return "elements of another width were written into it"
    except TooIrregularError:
        return "its layout is too irregular"


def _expressed(entries: list[Entry], spec: CheckpointSpec, position: Mapping[str, int], name: str) -> Found:
    by_tensor: dict[str, list[Box]] = defaultdict(list)
    opaque = []
    for part, origin in entries:
        if isinstance(origin, Made):
            opaque.append(_opaque(name, part, origin.inputs, origin.reason, position))
        elif reason := no_copy(origin.chain):
            opaque.append(_opaque(name, part, {origin.tensor}, reason, position))
        else:
            found = by_tensor[origin.tensor]
            for area, offset, strides in rectangles(part.of, part.at, part.dims, spec.tensors[origin.tensor].shape):
                found.append(Box(name, origin.tensor, area.start, area.count, area.step, offset, strides))
                if len(found) > MAX_CELLS:
                    raise TooIrregularError
    boxes = []
    for tensor in sorted(by_tensor, key=position.__getitem__):
        merged = by_tensor[tensor] if len(by_tensor[tensor]) == 1 else _merged(by_tensor[tensor])
        boxes += sorted(merged, key=lambda box: (box.start, box.offset))
    return Found(boxes, sorted(opaque, key=lambda part: part.offset))


def _opaque(
    name: str, part: Piece, inputs: frozenset[str] | set[str], reason: str, position: Mapping[str, int]
) -> Opaque:
    count = tuple(n for n, _, _ in reversed(part.dims))
    strides = tuple(there for _, there, _ in reversed(part.dims))
    return Opaque(name, part.at, count, strides, tuple(sorted(inputs, key=position.__getitem__)), reason)
