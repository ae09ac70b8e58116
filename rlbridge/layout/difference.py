"""What differs between two layouts, runtime tensor by runtime tensor. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from rlbridge.layout.parts import Runtime


class Difference(msgspec.Struct, frozen=True):
    """Runtime tensors by name.

    Attributes:
        only_first, only_second: those that one side does not have.
        changed: those of both sides whose shape, dtype or parts differ, side by side.
        equal: how many are the same.
    """

    only_first: list[Runtime]
    only_second: list[Runtime]
    changed: list[tuple[Runtime, Runtime]]
    equal: int

    @property
    def none(self) -> bool:
        """Whether both layouts are the same."""
        return not (self.only_first or self.only_second or self.changed)


def difference(first: Sequence[Runtime], second: Sequence[Runtime]) -> Difference:
    """Compare by name."""
    ours, theirs = _by_name(first), _by_name(second)
    both = [(tensor, theirs[name]) for name, tensor in ours.items() if name in theirs]
    changed = [(one, other) for one, other in both if one != other]
    return Difference(
        [tensor for name, tensor in ours.items() if name not in theirs],
        [tensor for name, tensor in theirs.items() if name not in ours],
        changed,
        len(both) - len(changed),
    )


def _by_name(tensors: Iterable[Runtime]) -> dict[str, Runtime]:
    return {tensor.name: tensor for tensor in tensors}
