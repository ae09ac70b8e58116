"""Random checkpoint tensors for the proof, the same for the same arguments."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import torch

from rlbridge.sync.layout.alphabet import float_format
from rlbridge.sync.layout.dtypes import bits_dtype, torch_dtype
from rlbridge.sync.layout.scratch import Scratch
from rlbridge.sync.layout.spec import CheckpointSpec

_WORD_BYTES = 8
_BLOCK_WORDS = 16381
"""A prime, so that rows of a tensor do not repeat from block to block; fits in the cache."""


@dataclass(frozen=True)
class RandomBits:
    """All bits of sign and mantissa are random, magnitudes in ``[1/8, 1/4)`` or ``[1/2, 1)``; integers use all bits.

    In some tensors they are all 16 times larger, and after a flip in the others: so the largest magnitude of a tensor
    depends on the values too. The range keeps the values apart after a cast to a narrower dtype, and away from its
    limits. The gaps keep a value and its flipped one apart, even if only magnitudes are left and both are rounded.

    Attributes:
        seed: other seeds, other values.
        flipped: tensors of which every random bit is flipped, so that each sign, mantissa and magnitude differs from
            what the same seed gives otherwise: no operation on single values can leave both as they are by rounding.
            ``None`` flips all.
    """

    spec: CheckpointSpec
    seed: int
    flipped: Collection[str] | None = ()
    _index: dict[str, int] = field(init=False, default_factory=dict)
    _scratch: Scratch = field(init=False, default_factory=Scratch)

    def __post_init__(self) -> None:
        self._index.update((name, i) for i, name in enumerate(self.spec.tensors))

    def __call__(self, name: str) -> torch.Tensor:
        """Values for checkpoint tensor ``name``."""
        spec = self.spec.tensors[name]
        dtype = torch_dtype(spec.dtype)
        if dtype is torch.bool:
            return self._bits(name, torch.bool, spec.shape, ~1, 0)
        if dtype.is_complex:
            part = torch.float32 if dtype is torch.complex64 else torch.float64
            return torch.view_as_complex(self._bits(name, part, (*spec.shape, 2), *self._masks(name, part)))
        if dtype.is_floating_point:
            return self._bits(name, dtype, spec.shape, *self._masks(name, dtype))
        return self._bits(name, dtype, spec.shape, 0, 0)

    def _masks(self, name: str, dtype: torch.dtype) -> tuple[int, int]:
        cleared, added = _float_masks(dtype)
        if dtype is torch.float8_e8m0fnu:
            return cleared, added
        large = int(np.random.SFC64([self.seed, self._index[name], 1]).random_raw()) & 1
        if large != (self.flipped is None or name in self.flipped):
            added += 4 << float_format(dtype).mantissa_bits
        return cleared, added

    def _bits(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], cleared: int, added: int) -> torch.Tensor:
        """Random bits where ``cleared`` has none, and those of ``added``, in each element."""
        numel, width = math.prod(shape), dtype.itemsize
        kept = _repeated(~cleared, width)
        n_blocks = -(-numel * width // (_WORD_BYTES * _BLOCK_WORDS))
        # Each block is the same random words, with all of them turned by one of its own: as fast as filling memory.
        block = np.random.Generator(np.random.SFC64(self.seed)).integers(0, 2**64, _BLOCK_WORDS, dtype=np.uint64) & kept
        generator = np.random.Generator(np.random.SFC64([self.seed, self._index[name]]))
        turns = (generator.integers(0, 2**64, n_blocks, dtype=np.uint64) & kept) ^ _repeated(added, width)
        if self.flipped is None or name in self.flipped:
            turns ^= kept
        words = self._scratch.words(n_blocks * _BLOCK_WORDS)
        np.bitwise_xor(block[None, :], turns[:, None], out=words.reshape(n_blocks, _BLOCK_WORDS))
        return torch.from_numpy(words.view(np.uint8)[: numel * width]).view(bits_dtype(width)).view(dtype).view(shape)


def _float_masks(dtype: torch.dtype) -> tuple[int, int]:
    """Keep sign, mantissa and the second lowest bit of the exponent, which then chooses between two powers of two."""
    if dtype is torch.float8_e8m0fnu:
        return 0xFC, 124
    form = float_format(dtype)
    sign = 1 << (8 * dtype.itemsize - 1)
    kept = sign | (1 << form.mantissa_bits) - 1 | 2 << form.mantissa_bits
    return ~kept, ((form.bias - 3) & ~3) << form.mantissa_bits


def _repeated(pattern: int, width: int) -> np.uint64:
    """``pattern`` of ``width`` bytes in each element of a word."""
    element = (pattern & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    return np.uint64(int.from_bytes(element * (_WORD_BYTES // width), "little"))
