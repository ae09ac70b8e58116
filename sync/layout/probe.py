"""The probe: load numbers that say which element they are through the backend's own loader and read where they land.

An element's id travels as digits, one per pass. Before the first pass the live tensors are filled with a value that is
no digit, so what the loader leaves alone is told from data. Usually few elements are read
(:mod:`~rlbridge.sync.layout.guess`); where that is not enough, all are kept as they were read, a few bytes each, and
turned into ids one runtime tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rlbridge.sync.layout.alphabet import CARRIERS, Alphabet, can_carry_digits
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

    def ids(self) -> Ids:
        """Ids of all elements, ``[M]``: 0 where there is none, arbitrary for what is no copy."""
        found = np.empty(self.planes[0].numel(), np.int64)
        alphabet = self.digits.alphabet
        for at in range(0, found.size, _CHUNK):
            part = slice(at, at + _CHUNK)
            found[part] = self.digits.ids([alphabet.decode(self.dtype, plane[part]) for plane in self.planes])
        return found


class Reader(Protocol):
    """Takes what it needs of one runtime tensor after each pass."""

    def read(self, tensor: torch.Tensor) -> None: ...


class _WholeReader:
    def __init__(self, dtype: torch.dtype, digits: Digits) -> None:
        self.reading = Reading(dtype, digits, [])

    def read(self, tensor: torch.Tensor) -> None:
        self.reading.planes.append(self.reading.digits.alphabet.read(tensor))


def probe(loader: Loader, wanted: Iterable[str], names: Iterable[str] | None = None) -> dict[str, Reading]:
    """Load digits for all checkpoint tensors, or for ``names``, and read all of the runtime tensors ``wanted``.

    Overwrites the live tensors. Runtime tensors that cannot hold digits are left out.
    """
    live, digits = can_be_probed(loader.spec, loader.live()), digits_for(loader)
    readers = {name: _WholeReader(live[name].dtype, digits) for name in wanted if name in live}
    run_passes(loader, digits, readers, names)
    return {name: reader.reading for name, reader in readers.items()}


def digits_for(loader: Loader) -> Digits:
    """Digits that every dtype on the way holds, on every rank: one may send its tensors to the others."""
    dtypes = {torch_dtype(tensor.dtype) for tensor in loader.spec.tensors.values()}
    dtypes |= {tensor.dtype for tensor in can_be_probed(loader.spec, loader.live()).values()}
    return Digits(loader.spec, Alphabet.of(dtype for dtype in CARRIERS if loader.any_rank(dtype in dtypes)))


def run_passes(
    loader: Loader, digits: Digits, readers: Mapping[str, Reader], names: Iterable[str] | None = None
) -> None:
    """Load all digits of all ids, one after the other; ``readers``: runtime tensor to its reader."""
    names = list(loader.spec.tensors if names is None else names)
    index = 0
    # Ranks may need different numbers of passes, since they may hold tensors of different dtypes.
    while loader.any_rank(index < digits.passes):
        run_pass(loader, digits, index, readers, names)
        index += 1


def run_pass(
    loader: Loader, digits: Digits, index: int, readers: Mapping[str, Reader], names: Iterable[str] | None = None
) -> None:
    """One pass. What the loader leaves alone still holds the poison in later passes, so it is filled in once."""
    if index == 0:
        fill_poison(can_be_probed(loader.spec, loader.live()), digits.alphabet)
    live = loader.load(lambda name: digits.tensor(name, index), names)
    for name, reader in readers.items():
        reader.read(live[name])


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
