"""Proof of what a receiver does at each update: copies are written directly, and the loader runs on opaque inputs only.

So a load of just those must leave every copy and every opaque element with the right bits. A step after loading that
swaps halves on each call, for instance, breaks copies that are not loaded along: they become opaque too.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from rlbridge.sync.layout.depend import Group
from rlbridge.sync.layout.live import box_of, box_values, flat_elements
from rlbridge.sync.layout.loading import Loader, Values
from rlbridge.sync.layout.opaque import pieces
from rlbridge.sync.layout.recover import boxes_without
from rlbridge.sync.layout.source_map import Box, Opaque
from rlbridge.sync.layout.values import RandomBits
from rlbridge.sync.layout.verify import Claims, Mask, by_source, different_bits, differing
from rlbridge.transport.errors import LayoutError, LoaderFailedError

_ROUNDS = 4
"""Rounds in which single inputs are added; then all tensors are."""


def close_over_reload(loader: Loader, claims: Claims, seed: int) -> Claims:
    """Make opaque what a load of the opaque inputs alone would spoil, and add inputs until it does not.

    Called on all ranks together. Loads nothing if no rank has opaque elements. Overwrites the live tensors.

    Raises:
        LayoutError: loading the same values twice gives different results.
    """
    for turn in range(_ROUNDS + 2):
        if not loader.any_rank(any(claims.opaque.values())):
            return claims
        inputs = loader.on_any_rank({name for its in claims.opaque.values() for part in its for name in part.inputs})
        spoilt, error = _spoilt(loader, claims, inputs, seed)
        if loader.any_rank(error is not None):
            if len(inputs) == len(loader.spec.tensors):
                raise error or LayoutError("the loader failed on another rank")
            why = f"the loader wants the whole checkpoint: {error or 'on another rank'}"
            claims = _everything(loader, claims, why)
        elif not loader.any_rank(bool(spoilt)):
            return claims
        elif len(inputs) == len(loader.spec.tensors):
            raise LayoutError(
                "loading the same weights twice gives different results in these runtime tensors, so they cannot be "
                f"updated: {', '.join(sorted(spoilt)[:20]) or 'on another rank'}; make the loader repeatable"
            )
        else:
            claims = _widened(loader, claims, spoilt)
            if turn >= _ROUNDS - 1:
                claims = _everything(loader, claims, "a load of some tensors changes others")
    return claims


def _spoilt(loader: Loader, claims: Claims, inputs: list[str], seed: int) -> tuple[dict[str, Mask], Exception | None]:
    """Runtime tensors in which claimed elements are wrong after an update, and which."""
    bits = RandomBits(loader.spec, seed)
    whole = loader.load(bits)
    opaque = {name: its for name, its in claims.opaque.items() if its}
    before = {name: whole[name].reshape(-1).clone() for name in opaque}
    # The update of a receiver that holds other weights: a loader that skips what is incomplete must show.
    _write_copies(claims.boxes, bits, loader.load(RandomBits(loader.spec, seed, None)))
    try:
        live = loader.load(bits, inputs)
    except LoaderFailedError as error:  # it wants more than this subset; the caller keeps its text
        return {}, error
    spoilt = differing(claims.boxes, bits, live)
    for name, its in opaque.items():
        moved = torch.from_numpy(different_bits(live[name].reshape(-1), before[name]))
        mask = torch.zeros_like(moved)
        for part in its:
            box_of(part, mask).copy_(box_of(part, moved))
        if mask.any():
            spoilt[name] = spoilt.get(name, np.zeros(mask.numel(), np.bool_)) | mask.numpy()
    return spoilt, None


def _write_copies(boxes: Mapping[str, list[Box]], values: Values, live: Mapping[str, torch.Tensor]) -> None:
    for source, its in by_source(boxes.values()).items():
        loaded = values(source)
        for box in its:
            tensor = live[box.runtime]
            flat = flat_elements(tensor)
            part = box_values(box, loaded).to(device=tensor.device, dtype=tensor.dtype)
            box_of(box, flat).copy_(part)
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))


def _widened(loader: Loader, claims: Claims, spoilt: Mapping[str, Mask]) -> Claims:
    """Spoilt copies become opaque; spoilt opaque elements get all that the rest of their tensor depends on."""
    boxes, opaque = dict(claims.boxes), {name: list(its) for name, its in claims.opaque.items()}
    for name, mask in spoilt.items():
        kept: list[Box] = []
        fresh: list[Opaque] = []
        for box in boxes.get(name, []):
            removed = box_of(box, torch.from_numpy(mask)).numpy()
            if not removed.any():
                kept.append(box)
                continue
            kept += boxes_without(box, removed)
            places = torch.zeros(mask.size, dtype=torch.bool)
            box_of(box, places).copy_(torch.from_numpy(removed))
            group = Group(name, np.flatnonzero(places.numpy()))
            why = "a load of other tensors changes these elements"
            fresh += pieces(group, loader.runtime[name].shape, (box.tensor,), why)
        every = {box.tensor for box in boxes.get(name, [])} | {n for part in opaque.get(name, []) for n in part.inputs}
        boxes[name] = kept
        opaque[name] = [_with_inputs(loader, part, every) for part in opaque.get(name, [])] + fresh
    return Claims(boxes, {}, opaque)


def _everything(loader: Loader, claims: Claims, reason: str) -> Claims:
    """All checkpoint tensors are inputs of all opaque elements."""
    names = tuple(loader.spec.tensors)
    return Claims(
        claims.boxes,
        {},
        {
            name: [Opaque(p.runtime, p.offset, p.count, p.strides, names, f"{p.reason}; {reason}") for p in its]
            for name, its in claims.opaque.items()
        },
    )


def _with_inputs(loader: Loader, part: Opaque, more: set[str]) -> Opaque:
    inputs = tuple(name for name in loader.spec.tensors if name in more or name in part.inputs)
    return Opaque(part.runtime, part.offset, part.count, part.strides, inputs, part.reason)
