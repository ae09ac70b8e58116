"""What layouts have to know about torch's dtypes, by name: sizes, kinds, and their bits."""

from __future__ import annotations

import torch

from rlbridge.transport.errors import LayoutError

_INTEGERS_OF_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


def bits_dtype(width_bytes: int) -> torch.dtype:
    """The integers whose bits stand for elements of that width."""
    return _INTEGERS_OF_WIDTH[width_bytes]


def bit_view(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as integers of the same width, for comparisons that tell NaNs and signed zeros apart."""
    if tensor.dtype is torch.complex128:
        return torch.view_as_real(tensor).view(torch.int64)
    return tensor.view(bits_dtype(tensor.element_size()))
