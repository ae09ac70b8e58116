"""All storages of one trace, and the few operations on them from which every rule is made."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rlbridge.sync.layout.dtypes import torch_dtype
from rlbridge.sync.layout.elements import row_major_strides
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.sync.layout.trace.content import (
    Content,
    Entry,
    Made,
    Origin,
    WidthError,
    cast_to,
    changed,
    inputs,
    inputs_of,
    made,
    overlay,
    overwrite,
    read,
    whole,
)
from rlbridge.sync.layout.trace.phantom import Arena
from rlbridge.sync.layout.trace.pieces import TooIrregularError
from rlbridge.transport.errors import LayoutError

_NOTHING: frozenset[str] = frozenset()

Rule = Callable[..., Any]


class NotFollowedError(LayoutError):
    """The loader did something to traced tensors that needs their values; ``names`` are those it needs."""

    def __init__(self, reason: str, names: frozenset[str]) -> None:
        super().__init__(reason)
        self.reason, self.names = reason, names


class Store:
    """Contents by storage. A storage without content holds real values that do not depend on the checkpoint.

    Attributes:
        failure: the first thing that could not be followed, also if the loader swallowed the error.
        reached: checkpoint tensors whose values the loader has read into Python, with what read them.
        recent: those of ``reached`` that were read since the loader was given its last tensor: whatever is written
            before it asks for the next one may depend on them.
        streaming: whether there is a next one. A loader that has collected all of them shows no such bounds.
    """

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.failure: NotFollowedError | None = None
        self.reached: dict[str, str] = {}
        self.recent: set[str] = set()
        self.streaming = True
        self._arena = Arena()

    # --- contents ---

    def of(self, tensor: torch.Tensor) -> Content | None:
        """The content of the storage under ``tensor``."""
        return self.contents.get(tensor.untyped_storage()._cdata)

    def inputs(self, tensor: torch.Tensor) -> frozenset[str]:
        """The checkpoint tensors that the elements of ``tensor`` depend on."""
        content = self.of(tensor)
        return _NOTHING if content is None else inputs(content, tensor)

    def is_real(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` holds its true values."""
        content = self.of(tensor)
        return content is None or content.real

    def adopt(self, tensor: torch.Tensor, *, live: bool = False, real: bool = False) -> Content:
        """The content of the storage under ``tensor``, made if there is none."""
        storage = tensor.untyped_storage()
        content = self.contents.get(storage._cdata)
        if content is None:
            content = Content(tensor.element_size(), live=live, real=real, keep=storage)
            self.contents[storage._cdata] = content
        return content

    # --- tensors ---

    def checkpoint(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A checkpoint tensor without memory."""
        tensor, content = self._phantom(spec.shape, None, torch_dtype(spec.dtype))
        content.set_entries(whole(name, tensor.numel(), spec.dtype))
        return tensor

    def stand_in(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """A checkpoint tensor with memory, for loaders that read its values."""
        dtype = torch_dtype(spec.dtype)
        tensor = torch.zeros(spec.shape, dtype=dtype)
        if dtype.is_floating_point:
            tensor = torch.ones(spec.shape).to(dtype)  # a zero would be a bad divisor, a one a bad index
        self.adopt(tensor, real=True).set_entries(whole(name, tensor.numel(), spec.dtype))
        return tensor

    def blank(
        self,
        shape: Iterable[int],
        dtype: torch.dtype,
        device: torch.device,
        strides: tuple[int, ...] | None = None,
    ) -> torch.Tensor:
        """A tensor that no checkpoint element is in yet. On the CPU it takes no memory."""
        shape = tuple(shape)
        if device.type == "cpu":
            return self._phantom(shape, strides, dtype)[0]
        strides = row_major_strides(shape) if strides is None else strides
        tensor = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        self.adopt(tensor)
        return tensor

    def _phantom(
        self, shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, Content]:
        tensor, buffer = self._arena.phantom(shape, strides, dtype)
        contents, key = self.contents, tensor.untyped_storage()._cdata
        # The address that identifies a storage will be another one's after this one is freed.
        content = contents[key] = Content(dtype.itemsize, keep=weakref.ref(buffer, lambda _: contents.pop(key, None)))
        return tensor, content

    # --- what happens to elements ---

    def copy(self, into: torch.Tensor, out_of: torch.Tensor, op: str) -> None:
        """Copy and cast ``out_of`` into ``into``, of the same shape."""
        source = self.of(out_of)
        try:
            found = [] if source is None else list(cast_to(read(source, into, out_of), into.dtype))
        except (WidthError, TooIrregularError) as error:
            found = self._unclear(into, self.inputs(out_of), op, error)
        if source is None and self.of(into) is None:
            return
        self.put(into, found, op)

    def compute(self, into: torch.Tensor, names: frozenset[str], op: str) -> None:
        """Say that arithmetic on ``names`` fills ``into``."""
        if self.reached:
            origin = Made(names | frozenset(self.reached), f"{op} after {self._read_by()}", lost=True)
        else:
            origin = Made(names, op)
        self.put(into, made(into, origin) if origin.inputs else [], op)

    def map(self, into: torch.Tensor, operands: Sequence[torch.Tensor], op: str) -> None:
        """Say that each element of ``into`` is computed from the same element of ``operands``, of its shape."""
        names = _NOTHING.union(*(self.inputs(operand) for operand in operands))
        if self.reached:
            self.compute(into, names, op)
            return

        def change(origin: Origin) -> Made:
            if isinstance(origin, Made):
                return origin._replace(reason=origin.reason if op in origin.reason else f"{origin.reason}, {op}")
            return Made(inputs_of(origin), op)

        found: list[Entry] = []
        try:
            for operand in operands:
                content = self.of(operand)
                found = overlay(found, [] if content is None else changed(read(content, into, operand), change))
        except (WidthError, TooIrregularError) as error:
            found = self._unclear(into, names, op, error)
        self.put(into, found, op)

    def lose(self, into: torch.Tensor, names: frozenset[str], reason: str) -> None:
        """Say that nobody knows what ``into`` is after this."""
        self.put(into, made(into, Made(names, reason, lost=True)), reason)

    def constant(self, into: torch.Tensor, op: str) -> None:
        """Say that ``into`` no longer depends on the checkpoint, without writing to it."""
        self.put(into, [], op)

    def put(self, into: torch.Tensor, found: list[Entry], op: str) -> None:
        """Replace what is known of ``into``; its memory no longer counts."""
        content = self.adopt(into)
        content.real = False
        if self.recent:
            origin = Made(frozenset(self.recent), f"written after {self._read_by()}", lost=True)
            found = changed(found, lambda old: origin._replace(inputs=origin.inputs | inputs_of(old)))
        try:
            overwrite(content, into, found)
        except (WidthError, TooIrregularError) as error:
            lost = inputs(content, into).union(*(inputs_of(origin) for _, origin in found))
            everything = torch.empty(0, dtype=into.dtype, device=into.device).set_(into.untyped_storage())
            content.set_entries([])
            overwrite(content, everything, self._unclear(everything, lost, op, error))

    def give_values(self, real: torch.Tensor, like: torch.Tensor | None, names: frozenset[str], reason: str) -> None:
        """Say that ``real``, which has true values, is what ``like``, which has none, was recorded to be."""
        known = None if like is None else self.of(like)
        content = self.adopt(real)
        if like is not None and known is not None and _alike(real, like):
            content.unit = known.unit
            content.set_entries(known.entries)
        else:
            self.lose(real, names, reason)
        content.real = True

    # --- values ---

    def values(self, tensor: torch.Tensor, op: str) -> None:
        """The loader is about to read the values of ``tensor``.

        Raises:
            NotFollowedError: they are not there.
        """
        content = self.of(tensor)
        if content is None:
            return
        names = inputs(content, tensor)
        if not content.real:
            raise self.not_followed(f"{op} reads values", names)
        self.reached |= dict.fromkeys(names, op)
        if self.streaming:
            self.recent |= names

    def not_followed(self, reason: str, names: frozenset[str]) -> NotFollowedError:
        """The error to raise; remembered."""
        error = NotFollowedError(reason, names)
        self.failure = self.failure or error
        return error

    def next_tensor(self, *, last: bool = False) -> None:
        """The loader asks for its next checkpoint tensor; ``last``: there is none."""
        self.recent.clear()
        self.streaming = not last

    def _read_by(self) -> str:
        return f"{next(reversed(self.reached.values()))} read values"

    @staticmethod
    def _unclear(into: torch.Tensor, names: frozenset[str], op: str, error: Exception) -> list[Entry]:
        why = "views elements of another width" if isinstance(error, WidthError) else "is too irregular to follow"
        return made(into, Made(names, f"{op} {why}", lost=True)) if names else []


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (a, b)]
    return layouts[0] == layouts[1]


def kind(name: str) -> str:
    """``name`` with its numbers left out: what a loader treats alike."""
    return re.sub(r"\d+", "#", name)
