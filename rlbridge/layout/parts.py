"""What each runtime tensor is made of, in words: slices of checkpoint tensors, padding, computed elements. Pure."""

from __future__ import annotations

import fnmatch
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import TensorSpec

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8"}


class Part(msgspec.Struct, frozen=True):
    """Some elements of a runtime tensor.

    Attributes:
        tensors: the checkpoint tensor they are copied from, those they are computed from, or none for padding.
        slices: of that tensor, per dimension, as Python writes them; empty where no slice is copied.
        at: runtime index of the first one.
        how: everything that is more than a plain copy.
    """

    tensors: tuple[str, ...]
    slices: tuple[str, ...]
    at: tuple[int, ...]
    how: tuple[str, ...]


class Runtime(msgspec.Struct, frozen=True):
    """A runtime tensor and its parts, in the order in which they lie in it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[Part, ...]

    def matches(self, pattern: str) -> bool:
        """Whether its own name or a checkpoint tensor's fits the shell pattern."""
        names = [self.name, *(tensor for part in self.parts for tensor in part.tensors)]
        return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def describe(layout: SourceMap, checkpoint: Mapping[str, TensorSpec]) -> list[Runtime]:
    """All runtime tensors of ``layout``; ``checkpoint`` has the tensors that it names."""
    boxes: dict[str, list[tuple[Box, bool]]] = defaultdict(list)
    for box in layout.boxes:
        boxes[box.runtime].append((box, False))
    for box in layout.aliases:
        boxes[box.runtime].append((box, True))
    opaque: dict[str, list[Opaque]] = defaultdict(list)
    for computed in layout.opaque:
        opaque[computed.runtime].append(computed)
    described = []
    for name, spec in layout.runtime.items():
        copied = sorted(boxes[name], key=lambda item: (item[1], item[0].offset))
        parts = [_copied(box, alias, spec, checkpoint[box.tensor]) for box, alias in copied]
        parts += [_computed(part, spec) for part in sorted(opaque[name], key=lambda part: part.offset)]
        filled = sum(math.prod(box.count) for box, alias in copied if not alias)
        filled += sum(math.prod(part.count) for part in opaque[name])
        parts += _padding(math.prod(spec.shape) - filled, whole=not filled)
        described.append(Runtime(name, spec.shape, spec.dtype, tuple(parts)))
    return described


def short_dtype(dtype: str) -> str:
    """``bfloat16`` as ``bf16``."""
    return SHORT_DTYPES.get(dtype, dtype)


def _copied(box: Box, alias: bool, runtime: TensorSpec, tensor: TensorSpec) -> Part:
    how = []
    moving = [stride for stride, n in zip(box.strides, box.count, strict=True) if n > 1]
    if moving != sorted(moving, reverse=True):
        how.append("transposed" if len(moving) == 2 else "permuted")
    if tensor.dtype != runtime.dtype:
        how.append(f"cast {short_dtype(tensor.dtype)} → {short_dtype(runtime.dtype)}")
    if any(step > 1 for step in box.step):
        how.append(f"every {_ordinal(max(box.step))}")
    if alias:
        how.append("tied: the same memory under a second name")
    axes = zip(box.start, box.count, box.step, tensor.shape, strict=True)
    slices = tuple(_slice(*axis) for axis in axes)
    return Part((box.tensor,), slices, _index(box.offset, runtime.shape), tuple(how))


def _computed(part: Opaque, runtime: TensorSpec) -> Part:
    size = math.prod(part.count)
    whole = size == math.prod(runtime.shape)
    elements = "" if whole else f"{size:,} elements "
    return Part(part.inputs, (), _index(part.offset, runtime.shape), (f"{elements}opaque: {part.reason}",))


def _padding(elements: int, whole: bool) -> list[Part]:
    if not elements:
        return []
    text = "not filled by any checkpoint tensor" if whole else f"padded with {elements:,} elements"
    return [Part((), (), (), (text,))]


def _slice(start: int, count: int, step: int, size: int) -> str:
    if count == size:
        return ":"
    if count == 1:
        return f"{start}:{start + 1}"
    stop = start + (count - 1) * step + 1
    return f"{start}:{stop}" + (f":{step}" if step > 1 else "")


def _index(offset: int, shape: Sequence[int]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        offset, place = divmod(offset, size)
        index.append(place)
    return tuple(reversed(index))


def _ordinal(n: int) -> str:
    return {2: "2nd", 3: "3rd"}.get(n, f"{n}th")
