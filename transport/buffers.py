"""The one check of what may be handed to a transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlbridge.transport.errors import TransportError

TAG_LIMIT = 1 << 64
"""Tags are unsigned 64-bit integers."""


def as_bytes(buffer: Any) -> npt.NDArray[np.uint8]:
    """The memory of ``buffer`` as a NumPy array that shares it: ``uint8 [n]``.

    UCX takes a pointer and a length and asks no questions: a strided view would send its neighbours' bytes, and another
    dtype another count. So everything is refused here that is not plainly a run of bytes in host memory.

    Raises:
        TransportError: ``buffer`` is not a one-dimensional contiguous ``torch.uint8`` tensor on the CPU.
    """
    if not isinstance(buffer, torch.Tensor):
        raise TransportError(f"a buffer must be a torch.Tensor, not {type(buffer).__name__}")
    if buffer.dtype is not torch.uint8:
        raise TransportError(f"a buffer must be torch.uint8, not {buffer.dtype}: pass tensor.view(torch.uint8)")
    if buffer.device.type != "cpu":
        raise TransportError(f"a buffer must be in host memory, not on {buffer.device}: stage it on the CPU first")
    if buffer.dim() != 1 or not buffer.is_contiguous():
        shape, strides = tuple(buffer.shape), tuple(buffer.stride())
        raise TransportError(
            f"a buffer must be one contiguous run of bytes, not shape {shape} with strides {strides}: "
            "pack it, or pass tensor.contiguous().view(-1)"
        )
    array: npt.NDArray[np.uint8] = buffer.detach().numpy()
    return array


def check_tag(tag: int) -> None:
    """Refuse what is not an unsigned 64-bit integer.

    Raises:
        TransportError: naming the tag.
    """
    if not 0 <= tag < TAG_LIMIT:
        raise TransportError(f"a tag must be an unsigned 64-bit integer, not {tag}")
