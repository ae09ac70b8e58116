"""CPU tensors that take addresses but no memory: as long as nobody touches them, their size does not matter.

Unlike meta tensors they are on the device that a loader expects, so that ``.to(param.device)``, ``param.data = w`` and
checks of devices behave as in a real load. Read by accident they are zero.
"""

from __future__ import annotations

import mmap

import torch

_CHUNK_BYTES = 1 << 38
_ALIGNMENT_BYTES = 64

# Python's mmap module does not name it before 3.13. The address space is taken without a claim on memory.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class Arena:
    """Hands out addresses from large reservations, each once. A reservation lives as long as any tensor in it."""

    def __init__(self) -> None:
        self._chunk: memoryview | None = None
        self._used = 0

    def phantom(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, memoryview]:
        """A CPU tensor of zeros on a storage of its own, and a buffer that lives exactly as long as the storage.

        Args:
            shape, dtype: of the tensor.
            strides: of the tensor; ``None``: contiguous.
        """
        if strides is None:
            reach = 1
            for n in shape:
                reach *= n
        else:
            reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        buffer = self._take(max(1, reach) * dtype.itemsize)
        flat = torch.frombuffer(buffer, dtype=dtype)
        if strides is None and reach:
            return flat.view(shape), buffer
        return flat.as_strided(shape, strides or (1,) * len(shape)), buffer

    def _take(self, nbytes: int) -> memoryview:
        if self._chunk is None or self._used + nbytes > self._chunk.nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
            self._chunk = memoryview(mmap.mmap(-1, max(nbytes, _CHUNK_BYTES), flags=flags))
            self._used = 0
        buffer = self._chunk[self._used : self._used + nbytes]
        self._used += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return buffer
