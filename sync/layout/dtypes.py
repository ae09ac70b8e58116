"""What layouts have to know about torch's dtypes, by name: sizes, kinds, and which integers they hold exactly."""

from __future__ import annotations

import torch

from rlbridge.transport.errors import LayoutError

_EXACT_INTEGERS: dict[torch.dtype, int] = {
    torch.float64: 2**53,
    torch.float32: 2**24,
    torch.bfloat16: 2**8,
    torch.float16: 2**11,
    torch.float8_e4m3fn: 2**4,
    torch.float8_e4m3fnuz: 2**4,
    torch.float8_e5m2: 2**3,
    torch.float8_e5m2fnuz: 2**3,
    torch.int64: 2**62,
    torch.int32: 2**31,
    torch.int16: 2**15,
    torch.int8: 2**7,
    torch.uint8: 2**8 - 1,
}
"""Each dtype holds ``-1`` or, unsigned, its own maximum beside the integers ``0 .. n - 1``."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype called ``torch.<name>``.

    Raises:
        LayoutError: torch has no such dtype.
    """
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"unknown dtype {name!r}; give torch's own name, e.g. 'bfloat16'")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Torch's name without the prefix."""
    return str(dtype).removeprefix("torch.")


def item_bytes(name: str) -> int:
    """Bytes of one element."""
    return torch_dtype(name).itemsize


def is_floating(name: str) -> bool:
    """Whether the dtype is a real floating one (fp8 included)."""
    return torch_dtype(name).is_floating_point


def exact_integers(dtype: torch.dtype) -> int | None:
    """``n`` such that ``0 .. n - 1`` and the poison value are exact in ``dtype``; ``None`` if it cannot be probed."""
    return _EXACT_INTEGERS.get(dtype)


def poison(dtype: torch.dtype) -> int:
    """A value that no probe digit has."""
    return 255 if dtype is torch.uint8 else -1


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of the same width, for comparisons that tell NaNs and signed zeros apart."""
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.element_size()])
