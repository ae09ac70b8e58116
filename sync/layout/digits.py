"""Checkpoint tensors made of digits: each pass loads one digit of every element's id.

A digit has a pattern: the lowest one runs through the alphabet again and again, higher ones are constant over blocks.
So a tensor is made by repeating few values, without arithmetic on its elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.alphabet import Alphabet, can_carry_digits
from rlbridge.sync.layout.dtypes import bits_dtype, torch_dtype
from rlbridge.sync.layout.elements import Ids, count_ids, first_ids
from rlbridge.sync.layout.scratch import Scratch
from rlbridge.sync.layout.spec import CheckpointSpec


class Digits:
    """Makes the tensors of each pass."""

    def __init__(self, spec: CheckpointSpec, alphabet: Alphabet) -> None:
        self.spec, self.alphabet = spec, alphabet
        self.firsts, self.total = first_ids(spec), count_ids(spec)
        self.passes = max(1, -(-self.total.bit_length() // alphabet.bits))
        self._scratch = Scratch()
        self._cycles: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, name: str, index: int) -> torch.Tensor:
        """Checkpoint tensor ``name`` in pass ``index``; zeros if its dtype carries no digits."""
        spec = self.spec.tensors[name]
        dtype, numel = torch_dtype(spec.dtype), math.prod(spec.shape)
        if not can_carry_digits(dtype):
            return torch.zeros(spec.shape, dtype=dtype)
        bits = torch.from_numpy(self._scratch.bytes(numel * dtype.itemsize)).view(bits_dtype(dtype.itemsize))
        if index == 0:
            self._fill_cycle(bits, dtype, self.firsts[name])
        else:
            self._fill_blocks(bits, dtype, self.firsts[name], index)
        return bits.view(dtype).view(spec.shape)

    def ids(self, digits: Sequence[NDArray[np.int64]]) -> Ids:
        """The ids that have these ``digits``, lowest first and -1 for none: 0 where there is no such id."""
        ids, none = np.zeros_like(digits[0]), np.zeros(digits[0].shape, np.bool_)
        for index, values in enumerate(digits):
            none |= values < 0
            if index < self.passes:
                ids += values << (self.alphabet.bits * index)
        ids[none | (ids > self.total)] = 0
        return ids

    def _fill_cycle(self, bits: torch.Tensor, dtype: torch.dtype, first: int) -> None:
        base = self.alphabet.base
        if dtype not in self._cycles:
            self._cycles[dtype] = self.alphabet.encode(dtype, self.alphabet.all_digits)
        cycle = self._cycles[dtype]
        begin = first % base
        head = min(bits.numel(), base - begin) if begin else 0
        bits[:head] = cycle[begin : begin + head]
        whole = (bits.numel() - head) // base
        bits[head : head + whole * base].view(whole, base).copy_(cycle)
        rest = bits[head + whole * base :]
        rest.copy_(cycle[: rest.numel()])

    def _fill_blocks(self, bits: torch.Tensor, dtype: torch.dtype, first: int, index: int) -> None:
        shift = self.alphabet.bits * index
        block, end = 1 << shift, first + bits.numel()
        if bits.numel() == 0:
            return
        numbers = np.arange(first >> shift, ((end - 1) >> shift) + 1, dtype=np.int64)
        values = self.alphabet.encode(dtype, numbers & (self.alphabet.base - 1))
        head = min(bits.numel(), -first % block)
        if head:
            bits[:head] = values[0]
            values = values[1:]
        whole = (bits.numel() - head) // block
        bits[head : head + whole * block].view(whole, block).copy_(values[:whole, None])
        if head + whole * block < bits.numel():
            bits[head + whole * block :] = values[whole]
