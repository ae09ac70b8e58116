"""From what the proof refuted to boxes without it, and to opaque pieces that name their inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from rlbridge.sync.layout.depend import Group, find_inputs
from rlbridge.sync.layout.live import box_of
from rlbridge.sync.layout.loading import Loader
from rlbridge.sync.layout.recover import boxes_without, recover, rectangles
from rlbridge.sync.layout.source_map import Box, Opaque
from rlbridge.sync.layout.verify import Claims, Mask, Verdict

CHANGED = "values differ from the checkpoint's"
_DENSE = 4
"""A set of elements that fills one part in this many of its rows and columns is taken to be all of them."""


def settle(loader: Loader, claims: Claims, verdicts: Mapping[str, Verdict], seed: int) -> Claims:
    """Boxes of what was proved, opaque pieces of what was refuted; element claims become boxes.

    Called on all ranks together: finding the inputs of computed elements runs the loader again.
    """
    boxes, groups = settle_copies(loader, claims, verdicts)
    opaque = {name: list(parts) for name, parts in claims.opaque.items()}
    if loader.any_rank(bool(groups)):
        inputs = find_inputs(loader, dict(enumerate(groups)), seed)
        for index, group in enumerate(groups):
            if inputs[index]:  # else a table of the backend's own
                opaque.setdefault(group.runtime, []).extend(
                    pieces(group, loader.runtime[group.runtime].shape, tuple(inputs[index]), CHANGED)
                )
    return Claims(boxes, {}, opaque)


def settle_copies(
    loader: Loader, claims: Claims, verdicts: Mapping[str, Verdict]
) -> tuple[dict[str, list[Box]], list[Group]]:
    """The proved boxes of each runtime tensor, and the computed elements in groups. Loads nothing."""
    boxes: dict[str, list[Box]] = {}
    groups: list[Group] = []
    for name, listed in claims.boxes.items():
        boxes[name], more = _settle_boxes(name, listed, verdicts.get(name))
        groups += more
    for name, reading in claims.readings.items():
        ids = reading.ids()
        if name in verdicts:
            verdict = verdicts[name]
            computed = _closed(verdict.computed, verdict.sometimes, loader.runtime[name].shape)
            ids[verdict.refuted | computed] = 0
            groups += _group(name, computed)
        boxes[name] = recover(loader.spec, loader.runtime, {name: ids})
    return boxes, groups


def _settle_boxes(name: str, boxes: list[Box], verdict: Verdict | None) -> tuple[list[Box], list[Group]]:
    """What stays of the boxes of one runtime tensor, and the computed elements: a group for each box, and the rest."""
    if verdict is None:
        return boxes, []
    kept: list[Box] = []
    groups: list[Group] = []
    rest = verdict.computed.copy()
    for box in boxes:
        refuted = box_of(box, torch.from_numpy(verdict.refuted)).numpy()
        if not refuted.any():
            kept.append(box)
            continue
        computed = box_of(box, torch.from_numpy(verdict.computed)).numpy()
        sometimes = box_of(box, torch.from_numpy(verdict.sometimes)).numpy()
        closed = _closed(computed.reshape(-1), sometimes.reshape(-1), box.count).reshape(box.count)
        mask = np.zeros(rest.size, np.bool_)
        box_of(box, torch.from_numpy(mask)).copy_(torch.from_numpy(closed))
        groups += _group(name, mask)
        rest &= ~mask
        kept += boxes_without(box, refuted | closed)
    return kept, groups + _group(name, rest)


def _group(runtime: str, mask: Mask) -> list[Group]:
    places = np.flatnonzero(mask)
    return [Group(runtime, places)] if places.size else []


def _closed(mask: Mask, sometimes: Mask, shape: tuple[int, ...]) -> Mask:
    """``mask`` (flat, of ``shape``) and what is in the same rows and columns, if some values escaped the proof.

    An operation such as ``x * 0.997`` leaves many bfloat16 values as they are: those are no copies either.
    """
    if not sometimes.any() or not shape:
        return mask
    area = mask.reshape(shape)
    others = (tuple(e for e in range(area.ndim) if e != d) for d in range(area.ndim))
    index = np.ix_(*(np.flatnonzero(area.any(axis=axes)) for axes in others))
    if area.sum() * _DENSE < math.prod(axis.size for axis in index):
        return mask
    closed = area.copy()
    closed[index] = True
    return closed.reshape(-1)


def pieces(group: Group, shape: tuple[int, ...], inputs: tuple[str, ...], reason: str) -> list[Opaque]:
    """Few rectangles that are exactly the elements of ``group``, in a runtime tensor of ``shape``."""
    return [
        Opaque(group.runtime, box.offset, box.count, box.strides, inputs, reason)
        for box in rectangles(group.runtime, "", shape, group.places, group.places)
    ]
