"""Memory for made-up tensors."""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

_WORD_BYTES = 8


class Scratch:
    """Memory for one tensor at a time, used again once nobody holds the tensor before it.

    Fresh memory costs more than the values in it: each page is a fault.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint64)

    def words(self, count: int) -> NDArray[np.uint64]:
        """``[count]``, uninitialised. A tensor made of it with ``torch.from_numpy`` keeps it from being used again."""
        # Every view and every tensor's storage holds a reference to the array; without one the count is this
        # attribute and the argument of the call.
        if sys.getrefcount(self._memory) > 2 or self._memory.size < count:
            self._memory = np.empty(count, np.uint64)
        return self._memory[:count]

    def bytes(self, count: int) -> NDArray[np.uint8]:
        """``[count]``, likewise."""
        return self.words(-(-count // _WORD_BYTES)).view(np.uint8)[:count]
