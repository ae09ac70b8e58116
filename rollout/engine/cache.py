"""Keys and values of the rows that decode together, each row at a length of its own.

Notation: ``R`` rows of capacity, ``S`` positions of a row, ``H`` key-value heads, ``D`` head size; a forward covers
``B`` consecutive rows with ``T`` tokens each and attends to the first ``L`` positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache


@dataclass(frozen=True, slots=True)
class _Window:
    """Where the forward under way writes and what it reads."""

    start: int
    stop: int
    length: int
    slots: torch.Tensor  # int64 [B * T]: flat (row, position) of each token


class RowCache(Cache):
    """A preallocated cache whose rows are written at positions of their own.

    transformers' caches keep one position for the whole batch. Here ``aim`` says, before each forward, which rows it
    covers and where each token goes; ``update`` writes there and returns views, so that nothing is copied to attend.
    Live rows are kept contiguous (``move``), which makes "only live rows" a slice. One position past the end of each
    row is a dump for the keys of padding. Layers are allocated when a model first writes to them.
    """

    def __init__(self, rows: int, length: int) -> None:
        super().__init__(layers=[])
        self._rows = rows
        self._stride = length + 1
        self._stores: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._window: _Window | None = None

    @property
    def dump(self) -> int:
        """The position where padding is written; nothing attends to it."""
        return self._stride - 1

    def aim(self, start: int, positions: torch.Tensor, length: int) -> None:
        """Point the next forward at rows ``[start, start + B)``.

        Args:
            start: first row.
            positions: int64 ``[B, T]``, where each token is written (``dump`` for padding).
            length: ``L``, positions that are attended to.
        """
        stop = start + positions.shape[0]
        rows = torch.arange(start, stop).unsqueeze(1)
        self._window = _Window(start, stop, length, (rows * self._stride + positions).flatten())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, H, T, D]`` and return everything the forward attends to, ``[B, H, L, D]`` (views)."""
        if self._window is None:
            raise RuntimeError("RowCache.aim was not called before the forward")
        if layer_idx not in self._stores:
            self._stores[layer_idx] = (self._allocate(key_states), self._allocate(value_states))
        keys, values = self._stores[layer_idx]
        return self._write(keys, key_states, self._window), self._write(values, value_states, self._window)

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` positions of rows ``source`` over rows ``target`` (int64 ``[n]``; may overlap)."""
        for rows in self._by_row():
            rows[target, :length] = rows[source, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions attended to: transformers asks for defaults that explicit positions and masks make void."""
        return self._window.length if self._window else 0

    def _allocate(self, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, size = states.shape
        return states.new_zeros(self._rows * self._stride, heads, size)

    def _write(self, store: torch.Tensor, states: torch.Tensor, window: _Window) -> torch.Tensor:
        store.index_copy_(0, window.slots, states.transpose(1, 2).flatten(0, 1))
        rows = store.view(self._rows, self._stride, *store.shape[1:])
        return rows[window.start : window.stop, : window.length].transpose(1, 2)

    def _by_row(self) -> Iterator[torch.Tensor]:
        for pair in self._stores.values():
            for store in pair:
                yield store.view(self._rows, self._stride, *store.shape[1:])
