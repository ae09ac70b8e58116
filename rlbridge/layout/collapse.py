"""Puts layers and experts that differ only in their number into one line. Pure.

Numbers are the parts of a dotted name that are digits. Runtime tensors collapse if the same is true of all of them up
to their numbers; a number of a checkpoint tensor that always equals the runtime tensor's own is written ``*``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import msgspec

from rlbridge.layout.parts import Part, Runtime

T = TypeVar("T")

_Numbers = tuple[int, ...]


class Line(msgspec.Struct, frozen=True):
    """One or more parts of one or more runtime tensors.

    Attributes:
        source: checkpoint tensors with their numbers as ranges, and slices.
        at: runtime index of the first part.
        how: see ``Part``.
        count: how many parts of one runtime tensor this is.
    """

    source: str
    at: tuple[int, ...]
    how: tuple[str, ...]
    count: int


class Group(msgspec.Struct, frozen=True):
    """Runtime tensors that are alike.

    Attributes:
        name: with numbers as ranges, e.g. ``model.layers.{0..27}.mlp.down_proj.weight``.
        count: how many runtime tensors.
        shape, dtype: of each of them.
        lines: what each of them is made of.
    """

    name: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    lines: tuple[Line, ...]


def collapse(tensors: Iterable[Runtime]) -> list[Group]:
    """Groups of runtime tensors, in order of their first one."""
    found: dict[object, list[Runtime]] = {}
    lines_of: dict[object, tuple[Line, ...]] = {}
    for tensor in tensors:
        pattern, numbers = split_name(tensor.name)
        lines = _lines(tensor.parts, numbers)
        key = (pattern, len(numbers), tensor.shape, tensor.dtype, lines)
        found.setdefault(key, []).append(tensor)
        lines_of[key] = lines
    groups = []
    for what, alike in found.items():
        name = joined_name([tensor.name for tensor in alike])
        groups.append(Group(name, len(alike), alike[0].shape, alike[0].dtype, lines_of[what]))
    return groups


def expanded(tensors: Iterable[Runtime]) -> list[Group]:
    """Every runtime tensor and every part on its own."""
    return [
        Group(tensor.name, 1, tensor.shape, tensor.dtype, tuple(_line([part], ()) for part in tensor.parts))
        for tensor in tensors
    ]


def split_name(name: str) -> tuple[str, _Numbers]:
    """``a.3.b`` as ``a.{}.b`` and ``(3,)``."""
    parts = name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdecimal())
    return ".".join("{}" if part.isdecimal() else part.replace("{", "{{").replace("}", "}}") for part in parts), numbers


def joined_name(names: list[str], own: _Numbers = ()) -> str:
    """Names of one pattern as one, ``a.{0..3}.b``; numbers that equal ``own`` at their place are written ``*``."""
    pattern, _ = split_name(names[0])
    columns = zip(*(split_name(name)[1] for name in names), strict=True)
    shown = []
    for place, column in enumerate(columns):
        is_own = place < len(own) and set(column) == {own[place]}
        shown.append("*" if is_own else ranges(column))
    return pattern.format(*shown)


def ranges(numbers: Iterable[int]) -> str:
    """``7``, ``{0..3}`` or ``{0..3,7}``."""
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}..{run[-1]}" for run in runs)
    return text if len(ordered) == 1 else f"{{{text}}}"


def _lines(parts: tuple[Part, ...], own: _Numbers) -> tuple[Line, ...]:
    def alike(part: Part) -> object:
        names = [split_name(name) for name in part.tensors]
        return [pattern for pattern, _ in names], part.slices, part.how

    return tuple(_line(group, own) for group in _grouped(parts, alike))


def _line(parts: list[Part], own: _Numbers) -> Line:
    by_pattern = _grouped((name for part in parts for name in part.tensors), lambda name: split_name(name)[0])
    names = ", ".join(joined_name(group, own) for group in by_pattern)
    slices = f" [{', '.join(parts[0].slices)}]" if set(parts[0].slices) - {":"} else ""
    return Line(names + slices, parts[0].at, parts[0].how, len(parts))


def _grouped(items: Iterable[T], key: Callable[[T], object]) -> list[list[T]]:
    """Items of equal ``key`` (compared by its representation), groups in order of their first item."""
    groups: dict[str, list[T]] = {}
    for item in items:
        groups.setdefault(repr(key(item)), []).append(item)
    return list(groups.values())
