"""Checkpoint tensors made of digits: each pass loads one digit of every element's id.

A digit has a pattern: the lowest one runs through the alphabet again and again, higher ones are constant over blocks.
So a tensor is made by repeating few values, without arithmetic on its elements.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

from rlbridge.sync.layout.alphabet import Alphabet, can_carry_digits
from rlbridge.sync.layout.dtypes import bits_dtype, torch_dtype
from rlbridge.sync.layout.elements import count_ids, first_ids
from rlbridge.sync.layout.spec import CheckpointSpec


class Scratch:
    """Memory for one tensor at a time, used again once nobody holds the tensor before it.

    Fresh memory costs more than the values in it: each page is a fault.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor ``[numel]``."""
        size_bytes = numel * dtype.itemsize
        # A tensor's storage holds a reference to the array; without one the count is this attribute and the argument.
        if sys.getrefcount(self._memory) > 2 or self._memory.nbytes < size_bytes:
            self._memory = np.empty(size_bytes, np.uint8)
        return torch.from_numpy(self._memory[:size_bytes]).view(dtype)


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
        bits = self._scratch.empty(numel, bits_dtype(dtype.itemsize))
        if index == 0:
            self._fill_cycle(bits, dtype, self.firsts[name])
        else:
            self._fill_blocks(bits, dtype, self.firsts[name], index)
        return bits.view(dtype).view(spec.shape)

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
