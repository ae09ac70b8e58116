"""The probe: load numbers that say which element they are through the backend's own loader and read where they land.

An element's id travels as digits, one per pass. Before the first pass the live tensors are filled with a value that is
no digit, so what the loader leaves alone is told from data. What was read is kept as it is, a few bytes per element,
and turned into ids only for the tensors that are no plain rectangles.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.alphabet import Alphabet, can_carry_digits
from rlbridge.sync.layout.digits import Digits
from rlbridge.sync.layout.dtypes import bit_view, torch_dtype
from rlbridge.sync.layout.elements import Ids
from rlbridge.sync.layout.loading import Loader
from rlbridge.sync.layout.spec import CheckpointSpec

_CHUNK = 2**20
"""Elements decoded at a time, which bounds the temporary memory."""


@dataclass(frozen=True)
class Reading:
    """What the passes left in one runtime tensor.

    Attributes:
        dtype: of the runtime tensor.
        planes: pass to what was kept of it, ``[M]`` each.
    """

    dtype: torch.dtype
    digits: Digits
    planes: list[torch.Tensor]

    def at(self, places: NDArray[np.int64]) -> Ids:
        """Ids of the elements at ``places`` (``[n]``): 0 where there is none, arbitrary for what is no copy."""
        index = torch.from_numpy(np.ascontiguousarray(places))
        return self._decode([plane[index] for plane in self.planes])

    def ids(self) -> Ids:
        """Ids of all elements, ``[M]``."""
        found = np.empty(self.planes[0].numel(), np.int64)
        for at in range(0, found.size, _CHUNK):
            found[at : at + _CHUNK] = self._decode([plane[at : at + _CHUNK] for plane in self.planes])
        return found

    def _decode(self, planes: list[torch.Tensor]) -> Ids:
        alphabet = self.digits.alphabet
        ids = np.zeros(planes[0].numel(), np.int64)
        none = np.zeros(ids.size, np.bool_)
        for index, plane in enumerate(planes):
            digits = alphabet.decode(self.dtype, plane)
            none |= digits < 0
            ids += digits << (alphabet.bits * index)
        ids[none | (ids > self.digits.total)] = 0
        return ids


def probe(loader: Loader, wanted: Iterable[str], names: Iterable[str] | None = None) -> dict[str, Reading]:
    """Load digits for all checkpoint tensors, or for ``names``, and read the runtime tensors ``wanted``.

    Overwrites the live tensors. Runtime tensors that cannot hold digits are left out.
    """
    names = list(loader.spec.tensors if names is None else names)
    live = can_be_probed(loader.spec, loader.live())
    digits = Digits(loader.spec, Alphabet.of(_dtypes_on_the_way(loader, live)))
    readings = {name: Reading(live[name].dtype, digits, []) for name in wanted if name in live}
    fill_poison(live, digits.alphabet)
    index = 0
    # Ranks may need different numbers of passes, since they may hold tensors of different dtypes.
    while loader.any_rank(index < digits.passes):
        read_pass(loader, digits, index, readings, names)
        index += 1
    return readings


def read_pass(
    loader: Loader, digits: Digits, index: int, readings: dict[str, Reading], names: Iterable[str] | None = None
) -> None:
    """Load one digit of every id and keep what lands in the tensors of ``readings``."""
    live = loader.load(lambda name: digits.tensor(name, index), names)
    for name, reading in readings.items():
        reading.planes.append(digits.alphabet.read(live[name]))


def fill_poison(live: dict[str, torch.Tensor], alphabet: Alphabet) -> None:
    """Set every element to a value that is no digit."""
    for tensor in live.values():
        if tensor.dtype.is_floating_point:
            tensor.fill_(alphabet.poison(tensor.dtype))
        else:
            bit_view(tensor).fill_(255 if tensor.element_size() == 1 else -1)


def can_be_probed(spec: CheckpointSpec, live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The live tensors that the checkpoint could fill and that can hold digits.

    Integer tensors count only if the checkpoint has some: otherwise they are a backend's own tables, which its loader
    may read, so they must not be poisoned.
    """
    integers = any(
        can_carry_digits(dtype) and not dtype.is_floating_point
        for dtype in (torch_dtype(tensor.dtype) for tensor in spec.tensors.values())
    )
    return {
        name: tensor
        for name, tensor in live.items()
        if can_carry_digits(tensor.dtype) and (tensor.dtype.is_floating_point or integers)
    }


def _dtypes_on_the_way(loader: Loader, live: dict[str, torch.Tensor]) -> set[torch.dtype]:
    return {torch_dtype(tensor.dtype) for tensor in loader.spec.tensors.values()} | {t.dtype for t in live.values()}
