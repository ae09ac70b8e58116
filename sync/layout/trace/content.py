"""What each storage holds during a trace: pieces of checkpoint tensors, results of arithmetic, or neither."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from rlbridge.sync.layout.trace.casts import Chain, cast, reinterpret
from rlbridge.sync.layout.trace.pieces import Piece, TooIrregularError, compose, flat, piece, reach, without


class Copied(NamedTuple):
    """Elements of a checkpoint tensor (source addresses are its row-major indices), cast along ``chain``."""

    tensor: str
    chain: Chain


class Made(NamedTuple):
    """Elements computed from ``inputs``. ``lost``: what they depend on is not known for certain."""

    inputs: frozenset[str]
    reason: str
    lost: bool = False


Origin = Copied | Made
Entry = tuple[Piece, Origin]


def inputs_of(origin: Origin) -> frozenset[str]:
    """The checkpoint tensors behind ``origin``."""
    return frozenset((origin.tensor,)) if isinstance(origin, Copied) else origin.inputs


@dataclass(slots=True, eq=False)
class Content:
    """Entries have disjoint destinations; elements in none do not depend on the checkpoint.

    Attributes:
        unit: bytes of an element; addresses count elements.
        live: a live tensor's storage, which is never written to.
        real: the memory holds the true values.
        keep: holds the storage, whose address identifies it, alive.
    """

    unit: int
    live: bool = False
    real: bool = False
    keep: object = None
    entries: list[Entry] = field(default_factory=list)
    _lows: list[int] = field(default_factory=list)
    _reach: int = 0

    def replace(self, first: int, stop: int, new: Iterable[Entry]) -> None:
        """Put ``new`` in the place of ``entries[first:stop]``; entries are kept by ascending first destination."""
        ordered = sorted(new, key=_low)
        if ordered:
            # What is left of an old entry may begin behind entries that are not replaced.
            behind = max(stop, bisect_left(self._lows, _low(ordered[-1])))
            ordered, stop = sorted([*ordered, *self.entries[stop:behind]], key=_low), behind
        self.entries[first:stop] = ordered
        self._lows[first:stop] = [_low(entry) for entry in ordered]
        self._reach = max([self._reach, *(reach(part) for part, _ in ordered)])

    def set_entries(self, new: Iterable[Entry]) -> None:
        """Replace all entries."""
        self._reach = 0
        self.replace(0, len(self.entries), new)

    def near(self, low: int, high: int) -> tuple[int, int]:
        """The range of the only entries that can have destinations in ``low .. high``."""
        return bisect_left(self._lows, low - self._reach), bisect_right(self._lows, high)


def _low(entry: Entry) -> int:
    return entry[0].at


class WidthError(Exception):
    """A storage is viewed with elements of another width than what was written into it."""


def read(content: Content, into: torch.Tensor, out_of: torch.Tensor) -> list[Entry]:
    """What ``into`` (destination addresses) receives when ``out_of``, of the same shape and in ``content``, is copied.

    Raises:
        WidthError, TooIrregularError: it cannot be said.
    """
    if not content.entries or out_of.numel() == 0:
        return []
    if content.unit != out_of.element_size():
        raise WidthError
    asked = between(into, out_of)
    found: list[Entry] = []
    first, stop = content.near(*_span(out_of))
    for written, origin in content.entries[first:stop]:
        for part in compose(asked, written):
            seen = origin
            if isinstance(origin, Copied):
                seen = Copied(origin.tensor, reinterpret(origin.chain, out_of.dtype))
            found.append((part if isinstance(seen, Copied) else _placeless(part), seen))
    return found


def inputs(content: Content, view: torch.Tensor) -> frozenset[str]:
    """The checkpoint tensors that the elements of ``view``, in ``content``, depend on."""
    if not content.entries:
        return frozenset()
    if len(content.entries) == 1 and content.entries[0][0] == flat(view.numel()):
        return inputs_of(content.entries[0][1])
    try:
        return frozenset().union(*(inputs_of(origin) for _, origin in read(content, view, view)))
    except (WidthError, TooIrregularError):
        return frozenset().union(*(inputs_of(origin) for _, origin in content.entries))


def overwrite(content: Content, view: torch.Tensor, new: Iterable[Entry]) -> None:
    """Put ``new`` (whose destinations are addresses within ``view``) where ``view`` is; the rest of it is constant.

    Raises:
        WidthError, TooIrregularError: it cannot be said; nothing is changed.
    """
    if view.numel() == 0:
        return
    if not content.entries:
        content.unit = view.element_size()
    elif content.unit != view.element_size():
        raise WidthError
    hole = between(view, view)
    first, stop = content.near(*_span(view))
    kept = [(left, origin) for old, origin in content.entries[first:stop] for left in without(old, hole)]
    content.replace(first, stop, [*kept, *new])


def whole(name: str, count: int, dtype: str) -> list[Entry]:
    """The entries of a checkpoint tensor's own storage, of ``count`` elements."""
    return [(flat(count), Copied(name, (dtype,)))] if count else []


def made(view: torch.Tensor, origin: Made) -> list[Entry]:
    """Entries that say that all of ``view`` is ``origin``."""
    return [(_placeless(between(view, view)), origin)] if view.numel() else []


def cast_to(entries: Iterable[Entry], dtype: torch.dtype) -> Iterator[Entry]:
    """``entries`` after a cast."""
    for part, origin in entries:
        if isinstance(origin, Copied):
            yield part, Copied(origin.tensor, cast(origin.chain, dtype))
        else:
            yield part, origin


def changed(entries: Iterable[Entry], change: Callable[[Origin], Made]) -> list[Entry]:
    """``entries`` after arithmetic on each of their elements."""
    return [(_placeless(part), change(origin)) for part, origin in entries]


def overlay(below: list[Entry], above: list[Entry]) -> list[Entry]:
    """Entries of elements computed from both: where both have one, the inputs are united."""
    merged: list[Entry] = []
    for part, origin in above:
        here = piece(part.at, part.at, [(n, there, there) for n, there, _ in part.dims])
        alone, left = [part], []
        for other, one in below:
            both = [_placeless(common) for common in compose(here, other)]
            merged += [(common, _united(one, origin)) for common in both]
            left += [(rest, one) for rest in (without(other, here) if both else [other])]
            for common in both:
                alone = [rest for p in alone for rest in without(p, common)]
        below = left
        merged += [(rest, origin) for rest in alone]
    return merged + below


def _united(a: Origin, b: Origin) -> Made:
    reasons = [origin.reason for origin in (a, b) if isinstance(origin, Made)]
    lost = any(isinstance(origin, Made) and origin.lost for origin in (a, b))
    return Made(inputs_of(a) | inputs_of(b), reasons[0] if reasons else "", lost)


def between(into: torch.Tensor, out_of: torch.Tensor) -> Piece:
    """The piece that copies one view, element by element, to another one of the same shape."""
    offsets: tuple[Any, Any] = into.storage_offset(), out_of.storage_offset()
    return piece(*offsets, zip(into.shape, into.stride(), out_of.stride(), strict=True))


def _span(view: torch.Tensor) -> tuple[int, int]:
    """First and last address."""
    offset: Any = view.storage_offset()
    return offset, offset + sum((n - 1) * stride for n, stride in zip(view.shape, view.stride(), strict=True))


def _placeless(part: Piece) -> Piece:
    """``part`` without its source addresses, which mean nothing for computed elements."""
    return piece(part.at, 0, [(n, there, 0) for n, there, _ in part.dims])
