"""The proof of what was claimed: random values through the same loader must arrive bit for bit where the claims say.

What does not (x + 1, -exp(x), quantisation and its scales) is no copy. Neither is what is claimed by nobody but changes
with the checkpoint.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import by_tensor
from rlbridge.sync.layout.live import box_of, box_values, flat_elements
from rlbridge.sync.layout.loading import Loader, Values
from rlbridge.sync.layout.probe import Reading
from rlbridge.sync.layout.source_map import Box, Opaque
from rlbridge.sync.layout.values import RandomBits

Mask = NDArray[np.bool_]


@dataclass
class Claims:
    """What is believed of runtime tensors before the proof.

    Attributes:
        boxes: runtime tensor to its copies; a name without any is claimed to have none.
        readings: those whose elements are claimed one by one, as the probe read them; not in ``boxes``.
        opaque: what is known to be no copy.
    """

    boxes: dict[str, list[Box]] = field(default_factory=dict)
    readings: dict[str, Reading] = field(default_factory=dict)
    opaque: dict[str, list[Opaque]] = field(default_factory=dict)

    def only(self, names: Iterable[str]) -> Claims:
        """The claims about the runtime tensors ``names``."""
        names = set(names)
        return Claims(
            {name: boxes for name, boxes in self.boxes.items() if name in names},
            {name: reading for name, reading in self.readings.items() if name in names},
            {name: parts for name, parts in self.opaque.items() if name in names},
        )

    def uncovered(self, name: str, numel: int) -> Mask | None:
        """``[numel]``: elements of a tensor in ``boxes`` of which nothing is claimed; ``None`` if there is none."""
        parts: list[Box | Opaque] = [*self.boxes[name], *self.opaque.get(name, [])]
        if sum(math.prod(part.count) for part in parts) == numel:
            return None
        free = torch.ones(numel, dtype=torch.bool)
        for part in parts:
            box_of(part, free).fill_(False)
        return free.numpy()


@dataclass
class Verdict:
    """What the proof found in one runtime tensor, ``[M]`` each.

    Attributes:
        refuted: elements that are not the copies they were claimed to be.
        computed: elements that change with the values loaded, but are no copies.
        sometimes: elements that were refuted by some of the random values only.
    """

    refuted: Mask
    computed: Mask
    sometimes: Mask


def verify(loader: Loader, claims: Claims, seed: int, names: Sequence[str] | None = None) -> dict[str, Verdict]:
    """Load random values of all checkpoint tensors, or of ``names``, and compare. Overwrites the live tensors.

    Returns:
        verdicts on the runtime tensors in which something is not as claimed.
    """
    bits = [RandomBits(loader.spec, seed), RandomBits(loader.spec, seed, None), RandomBits(loader.spec, seed + 1)]
    trial = _Trial(loader, claims)
    for values in bits[:2]:
        trial.compare(values, loader.load(values, names))
    # What was wrong once may be right by chance elsewhere, so look again.
    if loader.any_rank(trial.found_anything):
        trial.compare(bits[2], loader.load(bits[2], names))
    return trial.verdicts()


class _Trial:
    """Comparisons of several loads."""

    def __init__(self, loader: Loader, claims: Claims) -> None:
        self._loader, self._claims = loader, claims
        self._wrong: dict[str, NDArray[np.int8]] = {}  # how often
        self._varying: dict[str, Mask] = {}
        self._before: dict[str, torch.Tensor] = {}
        self._loads = 0
        self._free: dict[str, Mask] = {}  # claimed by nobody
        for name in claims.boxes:
            free = claims.uncovered(name, math.prod(loader.runtime[name].shape))
            if free is not None:
                self._free[name] = free

    @property
    def found_anything(self) -> bool:
        return bool(self._wrong) or any(
            (mask & self._free[name]).any() for name, mask in self._varying.items() if name in self._free
        )

    def compare(self, values: Values, live: dict[str, torch.Tensor]) -> None:
        self._loads += 1
        for name, differs in differing(self._claims.boxes, values, live).items():
            self._count(name, differs)
        for name, reading in self._claims.readings.items():
            differs = self._differing_ids(name, reading, values, live[name])
            if differs.any():
                self._count(name, differs)
        for name in {*self._wrong, *self._free}:
            now = live[name].reshape(-1)
            if name in self._before:
                moved = different_bits(now, self._before[name])
                self._varying[name] = self._varying.get(name, np.zeros_like(moved)) | moved
            self._before[name] = now.clone()

    def _count(self, name: str, differs: Mask) -> None:
        self._wrong.setdefault(name, np.zeros(differs.size, np.int8))
        self._wrong[name] += differs

    def _differing_ids(self, name: str, reading: Reading, values: Values, live: torch.Tensor) -> Mask:
        ids, flat = reading.ids(), live.reshape(-1).cpu()
        if name not in self._free and not ids.all():
            self._free[name] = ids == 0
        differs = np.zeros(ids.size, np.bool_)
        for tensor, elements, places in by_tensor(self._loader.spec, ids):
            loaded = values(tensor).reshape(-1)[torch.from_numpy(elements)].to(live.dtype)
            differs[places] = different_bits(loaded, flat[torch.from_numpy(places)])
        return differs

    def verdicts(self) -> dict[str, Verdict]:
        found: dict[str, Verdict] = {}
        for name in {*self._wrong, *self._free}:
            size = math.prod(self._loader.runtime[name].shape)
            wrong = self._wrong.get(name, np.zeros(size, np.int8))
            # Without an earlier load to compare with, the element was right then and is wrong now: it did change.
            varying = self._varying.get(name, np.ones(size, np.bool_))
            computed = ((wrong > 0) | self._free.get(name, np.zeros(size, np.bool_))) & varying
            if computed.any() or wrong.any():
                found[name] = Verdict(wrong > 0, computed, (wrong > 0) & (wrong < self._loads))
        return dict(sorted(found.items()))


def by_source(boxes: Iterable[list[Box]]) -> dict[str, list[Box]]:
    """Checkpoint tensor to its boxes, so that one set of values exists at a time."""
    found: dict[str, list[Box]] = defaultdict(list)
    for its in boxes:
        for box in its:
            found[box.tensor].append(box)
    return found


def differing(boxes: dict[str, list[Box]], values: Values, live: dict[str, torch.Tensor]) -> dict[str, Mask]:
    """Runtime tensors of which not all of ``boxes`` hold ``values`` after a cast, and which elements do not."""
    found: dict[str, Mask] = {}
    for source, its in by_source(boxes.values()).items():
        loaded = values(source)
        for box in its:
            tensor = live[box.runtime]
            expected = bit_view(box_values(box, loaded).to(tensor.dtype))
            there = box_of(box, bit_view(flat_elements(tensor).cpu()))
            if not torch.equal(expected, there):
                mask = found.setdefault(box.runtime, np.zeros(tensor.numel(), np.bool_))
                box_of(box, torch.from_numpy(mask)).copy_(expected != there)
    return found


def different_bits(a: torch.Tensor, b: torch.Tensor) -> Mask:
    """``[M]``: where two tensors ``[M]`` of one dtype differ."""
    differs = bit_view(a) != bit_view(b)
    return (differs.any(-1) if differs.dim() > 1 else differs).cpu().numpy()
