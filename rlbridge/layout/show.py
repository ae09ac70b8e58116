"""Layouts and their differences as tables and as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlbridge.layout.collapse import Group, Line, collapse, expanded, joined_name, split_name
from rlbridge.layout.difference import Difference
from rlbridge.layout.parts import Runtime, short_dtype
from rlbridge.layout.saved import KnownLayout
from rlbridge.sync.layout.codec import map_hash

_UNITS = ("B", "kB", "MB", "GB", "TB")


def show_layout(console: Console, known: KnownLayout, tensors: Sequence[Runtime], every: bool) -> None:
    """Print the table of ``tensors``, and what is to be said of the whole layout."""
    table = _table(known.title)
    for group in expanded(tensors) if every else collapse(tensors):
        _add_group(table, group)
    console.print(table)
    for text in _remarks(known):
        console.print(text)


def layout_json(known: KnownLayout, tensors: Iterable[Runtime]) -> dict[str, Any]:
    """All tensors one by one, for programs."""
    return {
        "title": known.title,
        "hash": map_hash(known.layout),
        "tensors": [_tensor_json(tensor) for tensor in tensors],
        "nowhere": nowhere(known),
        "probed": known.layout.probed,
    }


def show_difference(console: Console, first: KnownLayout, second: KnownLayout, found: Difference, every: bool) -> None:
    """Print what only one side has, and what both have differently, and a last line that counts it."""
    form = expanded if every else collapse
    for known, tensors in ((first, found.only_first), (second, found.only_second)):
        if tensors:
            table = _table(f"only in {known.title}")
            for group in form(tensors):
                _add_group(table, group)
            console.print(table)
    if found.changed:
        for known, side in ((first, 0), (second, 1)):
            table = _table(f"different, in {known.title}")
            for group in form([pair[side] for pair in found.changed]):
                _add_group(table, group)
            console.print(table)
    verdict = "the layouts are equal" if found.none else "the layouts differ"
    console.print(
        f"{verdict}: {found.equal:,} runtime tensors equal, {len(found.changed):,} different, "
        f"{len(found.only_first):,} only in {first.title}, {len(found.only_second):,} only in {second.title}"
    )


def difference_json(first: KnownLayout, second: KnownLayout, found: Difference) -> dict[str, Any]:
    """The difference for programs."""
    return {
        "first": first.title,
        "second": second.title,
        "equal": found.none,
        "same": found.equal,
        "only_first": [_tensor_json(tensor) for tensor in found.only_first],
        "only_second": [_tensor_json(tensor) for tensor in found.only_second],
        "different": [
            {"name": one.name, "first": _tensor_json(one), "second": _tensor_json(other)}
            for one, other in found.changed
        ],
    }


def nowhere(known: KnownLayout) -> list[str]:
    """Checkpoint tensors of which the layout keeps nothing."""
    layout = known.layout
    landed = {box.tensor for box in [*layout.boxes, *layout.aliases]} | layout.opaque_inputs
    return [name for name in known.checkpoint.tensors if name not in landed]


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    table.add_column("runtime tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    table.add_column("dtype", no_wrap=True)
    table.add_column("from the checkpoint", overflow="fold")
    table.add_column("at", no_wrap=True)
    table.add_column("as", overflow="fold")
    return table


def _add_group(table: Table, group: Group) -> None:
    name = Text(group.name + (f"  x{group.count}" if group.count > 1 else ""))
    first = (name, Text(str(list(group.shape))), Text(short_dtype(group.dtype)))
    for index, line in enumerate(group.lines):
        left = first if index == 0 else (Text(), Text(), Text())
        table.add_row(*left, *_line(line, single=len(group.lines) == 1))


def _line(line: Line, single: bool) -> tuple[Text, Text, Text]:
    source = Text(line.source + (f"  x{line.count}" if line.count > 1 else ""))
    at = "" if not line.at or (single and not any(line.at)) else str(list(line.at)) + (" …" if line.count > 1 else "")
    how = "; ".join(line.how) if line.how else "copy"
    return source, Text(at), Text(how, style="yellow" if "opaque" in how or "not filled" in how else "")


def _remarks(known: KnownLayout) -> Iterable[Text]:
    layout = known.layout
    size = sum(math.prod(spec.shape) * _item_bytes(spec.dtype) for spec in layout.runtime.values())
    computed = f", {len(layout.opaque):,} computed parts" if layout.opaque else ""
    yield Text(
        f"{len(layout.runtime):,} runtime tensors of {_bytes(size)}, {len(layout.boxes):,} boxes{computed}; "
        f"hash {map_hash(layout)}",
        style="dim",
    )
    unused = nowhere(known)
    if unused:
        yield Text(f"in no runtime tensor: {', '.join(_collapsed_names(unused))}", style="dim")
    for reason in sorted(set(layout.probed.values())):
        names = [name for name, why in layout.probed.items() if why == reason]
        yield Text(f"probed, because {reason}: {', '.join(_collapsed_names(names))}", style="dim")


def _collapsed_names(names: Iterable[str]) -> list[str]:
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(split_name(name)[0], []).append(name)
    return [joined_name(alike) for alike in by_pattern.values()]


def _item_bytes(dtype: str) -> int:
    """Bytes of an element: its dtype's name has the bits. Torch knows too, but takes seconds to load."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1


def _bytes(size: float) -> str:
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"


def _tensor_json(tensor: Runtime) -> dict[str, Any]:
    parts = [
        {"tensors": part.tensors, "slices": part.slices, "at": part.at, "as": part.how or ("copy",)}
        for part in tensor.parts
    ]
    return {"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype, "parts": parts}
