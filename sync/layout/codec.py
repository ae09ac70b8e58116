"""Source maps as bytes: small enough to send and to keep, and a hash that says whether two layouts are the same.

A large model repeats itself: every name is written once, and so is every form of a box (its counts, steps and
strides), of which a map of a hundred thousand boxes has a few dozen. Boxes are columns of whole numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec
import xxhash

from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import LayoutError

T = TypeVar("T")

_FORMAT = "rlbridge.layout.1"

_Form = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Counts, steps and strides."""


class _Boxes(msgspec.Struct, frozen=True, array_like=True):
    """Columns; ``start`` has as many entries for a box as its form has dimensions."""

    runtime: list[int]
    tensor: list[int]
    form: list[int]
    offset: list[int]
    start: list[int]


class _Runtime(msgspec.Struct, frozen=True, array_like=True):
    name: list[int]
    shape: list[tuple[int, ...]]
    dtype: list[int]


class _Opaque(msgspec.Struct, frozen=True, array_like=True):
    runtime: int
    offset: int
    count: tuple[int, ...]
    strides: tuple[int, ...]
    inputs: list[int]
    reason: int


class _Packed(msgspec.Struct, frozen=True, array_like=True):
    """Names are indices into ``strings``, forms into ``forms``."""

    format: str
    strings: list[str]
    forms: list[_Form]
    runtime: _Runtime
    boxes: _Boxes
    aliases: _Boxes
    opaque: list[_Opaque]
    probed: list[tuple[int, int]]


def encode(layout: SourceMap) -> bytes:
    """``layout`` as bytes, the order of everything included. The same map always gives the same bytes."""
    strings, forms = _Table[str](), _Table[_Form]()
    packed = _Packed(
        _FORMAT,
        strings.entries,
        forms.entries,
        _pack_runtime(layout.runtime.items(), strings),
        _pack_boxes(layout.boxes, strings, forms),
        _pack_boxes(layout.aliases, strings, forms),
        [_pack_opaque(part, strings) for part in layout.opaque],
        [(strings.index(name), strings.index(reason)) for name, reason in layout.probed.items()],
    )
    return msgspec.msgpack.encode(packed)


def decode(data: bytes) -> SourceMap:
    """The map that ``encode`` was given.

    Raises:
        LayoutError: ``data`` is damaged, or no encoded layout.
    """
    try:
        packed = msgspec.msgpack.decode(data, type=_Packed)
    except msgspec.MsgspecError as error:
        raise LayoutError(f"not an encoded layout: {error}") from None
    if packed.format != _FORMAT:
        raise LayoutError(f"an encoded layout of format {packed.format!r}; this version reads {_FORMAT!r}")
    strings, forms = _Reader(packed.strings), _Reader(packed.forms)
    try:
        return SourceMap(
            _unpack_runtime(packed.runtime, strings),
            _unpack_boxes(packed.boxes, strings, forms),
            _unpack_boxes(packed.aliases, strings, forms),
            [_unpack_opaque(part, strings) for part in packed.opaque],
            {strings[name]: strings[reason] for name, reason in packed.probed},
        )
    except (IndexError, ValueError) as error:
        raise LayoutError(f"a damaged layout: {error}") from None


def map_hash(layout: SourceMap) -> str:
    """Equal for layouts that say the same of every element, in whatever order and however they were found.

    Reasons (of opaque elements, and of probing) are remarks and do not count.
    """
    same = SourceMap(
        dict(sorted(layout.runtime.items())),
        sorted(layout.boxes, key=msgspec.structs.astuple),
        sorted(layout.aliases, key=msgspec.structs.astuple),
        sorted((msgspec.structs.replace(part, reason="") for part in layout.opaque), key=msgspec.structs.astuple),
    )
    return xxhash.xxh3_128_hexdigest(encode(same))


class _Table(Generic[T]):
    """Distinct entries in order of first use."""

    def __init__(self) -> None:
        self.entries: list[T] = []
        self._index: dict[T, int] = {}

    def index(self, entry: T) -> int:
        index = self._index.setdefault(entry, len(self.entries))
        if index == len(self.entries):
            self.entries.append(entry)
        return index


class _Reader(Generic[T]):
    """A table read by index, counting from its beginning only."""

    def __init__(self, entries: Sequence[T]) -> None:
        self._entries = entries

    def __getitem__(self, index: int) -> T:
        if not 0 <= index < len(self._entries):
            raise IndexError(f"entry {index} of a table of {len(self._entries)}")
        return self._entries[index]


def _pack_runtime(items: Iterable[tuple[str, TensorSpec]], strings: _Table[str]) -> _Runtime:
    packed = _Runtime([], [], [])
    for name, spec in items:
        packed.name.append(strings.index(name))
        packed.shape.append(spec.shape)
        packed.dtype.append(strings.index(spec.dtype))
    return packed


def _unpack_runtime(packed: _Runtime, strings: _Reader[str]) -> dict[str, TensorSpec]:
    columns = zip(packed.name, packed.shape, packed.dtype, strict=True)
    return {strings[name]: TensorSpec(shape, strings[dtype]) for name, shape, dtype in columns}


def _pack_boxes(boxes: Iterable[Box], strings: _Table[str], forms: _Table[_Form]) -> _Boxes:
    packed = _Boxes([], [], [], [], [])
    for box in boxes:
        packed.runtime.append(strings.index(box.runtime))
        packed.tensor.append(strings.index(box.tensor))
        packed.form.append(forms.index((box.count, box.step, box.strides)))
        packed.offset.append(box.offset)
        packed.start.extend(box.start)
    return packed


def _unpack_boxes(packed: _Boxes, strings: _Reader[str], forms: _Reader[_Form]) -> list[Box]:
    boxes, starts, at = [], packed.start, 0
    for runtime, tensor, form, offset in zip(packed.runtime, packed.tensor, packed.form, packed.offset, strict=True):
        count, step, strides = forms[form]
        if not len(count) == len(step) == len(strides):
            raise ValueError(f"form {form} has several numbers of dimensions")
        start = tuple(starts[at : at + len(count)])
        at += len(count)
        boxes.append(Box(strings[runtime], strings[tensor], start, count, step, offset, strides))
    if at != len(starts):
        raise ValueError(f"{len(starts)} starting indices where the boxes need {at}")
    return boxes


def _pack_opaque(part: Opaque, strings: _Table[str]) -> _Opaque:
    inputs = [strings.index(name) for name in part.inputs]
    return _Opaque(
        strings.index(part.runtime), part.offset, part.count, part.strides, inputs, strings.index(part.reason)
    )


def _unpack_opaque(part: _Opaque, strings: _Reader[str]) -> Opaque:
    inputs = tuple(strings[name] for name in part.inputs)
    return Opaque(strings[part.runtime], part.offset, part.count, part.strides, inputs, strings[part.reason])
