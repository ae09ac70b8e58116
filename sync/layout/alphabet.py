"""The values that carry digits through a loader, and back. Pure.

A digit is a bit pattern: sign, a few exponents around 1 and the high bits of the mantissa, as many as every dtype on
the way represents exactly. So bfloat16 carries 15 bits at a time, and a cast to a wider or narrower dtype that keeps
them loses nothing. Integer tensors carry small integers. Zero, NaN and the poison are no digits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.dtypes import bit_view, bits_dtype

_MAX_BITS = 15
_MAX_EXPONENT_BITS = 7
_FLOATS = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
)
_INTEGER_BITS = {torch.int8: 7, torch.uint8: 7} | dict.fromkeys(
    (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64), _MAX_BITS
)


CARRIERS = (*_FLOATS, *_INTEGER_BITS)
"""The dtypes that can be probed."""


def can_carry_digits(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be probed at all."""
    return dtype in CARRIERS


@dataclass(frozen=True)
class FloatFormat:
    """Sign, exponent and mantissa of a float dtype, from the highest bit down."""

    mantissa_bits: int
    bias: int
    exponents: tuple[int, int]
    """The least and the largest whose mantissas are all finite and normal."""


def float_format(dtype: torch.dtype) -> FloatFormat:
    """How ``dtype`` lays out its bits."""
    info = torch.finfo(dtype)
    least, largest = round(math.log2(info.tiny)), math.frexp(info.max)[1] - 1
    if dtype is torch.float8_e4m3fn:  # there the highest mantissa is NaN
        largest -= 1
    mantissa_bits = 2 if dtype is torch.float8_e5m2fnuz else -round(math.log2(info.eps))  # torch gives it e4m3's eps
    return FloatFormat(mantissa_bits, 1 - least, (least, largest))


@dataclass(frozen=True)
class Alphabet:
    """Digits of ``bits`` bits.

    Attributes:
        mantissa_bits, exponent_bits: of the floating values; with the sign they hold a digit.
        lowest: the least exponent in use; one less is the poison's.
    """

    bits: int
    mantissa_bits: int
    exponent_bits: int
    lowest: int

    @classmethod
    def of(cls, dtypes: Iterable[torch.dtype]) -> Alphabet:
        """What all of ``dtypes`` hold exactly; those that cannot be probed do not count."""
        dtypes = set(dtypes)
        formats = [float_format(dtype) for dtype in dtypes if dtype in _FLOATS] or [float_format(torch.float32)]
        least = max(form.exponents[0] for form in formats)
        room = min(form.exponents[1] for form in formats) - least  # without the poison's exponent
        exponent_bits = min(_MAX_EXPONENT_BITS, room.bit_length() - 1)
        mantissa_bits = min(_MAX_BITS - 1 - exponent_bits, *(form.mantissa_bits for form in formats), 52)
        lowest = least + 1 + (room - (1 << exponent_bits)) // 2
        bits = min([1 + exponent_bits + mantissa_bits, *(_INTEGER_BITS.get(dtype, _MAX_BITS) for dtype in dtypes)])
        return cls(bits, mantissa_bits, exponent_bits, lowest)

    @property
    def base(self) -> int:
        """The number of digits."""
        return 1 << self.bits

    def poison(self, dtype: torch.dtype) -> float:
        """A value that is no digit."""
        if dtype.is_floating_point:
            return float(2.0 ** (self.lowest - 1))
        return torch.iinfo(dtype).max if torch.iinfo(dtype).min == 0 else -1

    def encode(self, dtype: torch.dtype, digits: NDArray[np.int64]) -> torch.Tensor:
        """``digits`` (``[n]``) as the bits of values of ``dtype``: integers as :func:`bit_view` would give them."""
        numbers = torch.from_numpy(np.ascontiguousarray(digits))
        if not dtype.is_floating_point:
            return bit_view(numbers.to(dtype))
        form, width = float_format(dtype), 8 * dtype.itemsize
        magnitude_bits = self.mantissa_bits + self.exponent_bits
        magnitude = numbers & ((1 << magnitude_bits) - 1)
        magnitude = (magnitude << (form.mantissa_bits - self.mantissa_bits)) + (
            (self.lowest + form.bias) << form.mantissa_bits
        )
        signed = torch.where((numbers >> magnitude_bits) > 0, magnitude - (1 << (width - 1)), magnitude)
        return signed.to(bits_dtype(dtype.itemsize))  # wraps to what has the same low bits

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """What has to be kept of a runtime tensor to decode it: the high bits of each element, ``[M]``, on the CPU."""
        flat, dtype = tensor.reshape(-1).contiguous().cpu(), tensor.dtype
        if not dtype.is_floating_point:
            return flat.clone() if dtype.itemsize == 1 else flat.to(torch.int16)
        kept = self._kept_bytes(dtype)
        bits = flat.view(bits_dtype(kept))
        # NumPy asks for huge pages, which torch does not: touching fresh memory then costs less than the copy.
        out = torch.from_numpy(np.empty(flat.numel() * kept, np.uint8)).view(bits_dtype(kept))
        return out.copy_(bits if kept == dtype.itemsize else bits.view(flat.numel(), -1)[:, -1])

    def decode(self, dtype: torch.dtype, kept: torch.Tensor) -> NDArray[np.int64]:
        """Digits of what :meth:`read` kept, -1 where there is none."""
        numbers = kept.to(torch.int64).numpy()
        if not dtype.is_floating_point:
            digits = numbers
        else:
            form, width = float_format(dtype), 8 * kept.element_size()
            shift = form.mantissa_bits - 8 * (dtype.itemsize - kept.element_size()) - self.mantissa_bits
            magnitude = numbers & ((1 << (width - 1)) - 1)
            digits = (magnitude >> shift) - ((self.lowest + form.bias) << self.mantissa_bits)
            magnitude_bits = self.mantissa_bits + self.exponent_bits
            no_digit = (digits < 0) | (digits >> magnitude_bits > 0) | (magnitude & ((1 << shift) - 1) > 0)
            digits += ((numbers >> (width - 1)) & 1) << magnitude_bits
            digits[no_digit] = -1
        digits[digits >= self.base] = -1
        return digits

    def _kept_bytes(self, dtype: torch.dtype) -> int:
        """Enough for the sign, the exponent and the mantissa bits in use."""
        form = float_format(dtype)
        needed = 8 * dtype.itemsize - form.mantissa_bits + self.mantissa_bits
        return next(width for width in (1, 2, 4, 8) if 8 * width >= needed)

    @cached_property
    def all_digits(self) -> NDArray[np.int64]:
        """``[base]``."""
        return np.arange(self.base, dtype=np.int64)
