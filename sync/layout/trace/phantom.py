"""CPU tensors that take addresses but no memory: as long as nobody touches them, their size does not matter.

Unlike meta tensors they are on the device that a loader expects, so that ``.to(param.device)``, ``param.data = w`` and
checks of devices behave as in a real load. Read by accident they are zero.
"""

from __future__ import annotations

import mmap

import torch

# Python's mmap module does not name it before 3.13. The address space is taken without a claim on memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def phantom(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, mmap.mmap]:
    """A strided CPU tensor of zeros on a storage of its own, and the pages that live exactly as long as the storage."""
    reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    pages = mmap.mmap(-1, max(1, reach) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(pages, dtype=dtype).as_strided(shape, strides), pages
