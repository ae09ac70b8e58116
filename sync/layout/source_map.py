"""The result of layout discovery: affine boxes from checkpoint coordinates to runtime storage.

Notation: ``N`` dimensions of the checkpoint tensor; a *runtime tensor* is one live tensor of a backend (a parameter, a
shard of one, a fused weight), addressed by row-major element index over its own shape.
"""

from __future__ import annotations

import msgspec

from rlbridge.sync.layout.spec import TensorSpec


class Box(msgspec.Struct, frozen=True, array_like=True):
    """A rectangle of checkpoint elements and where each of them lies at run time.

    Element ``k`` (``0 <= k[d] < count[d]``) is checkpoint element ``start[d] + k[d] * step[d]`` of ``tensor`` and
    runtime element ``offset + sum(k[d] * strides[d])`` of ``runtime``. Permutation and transposition are strides.

    Attributes:
        runtime: name of the runtime tensor.
        tensor: name of the checkpoint tensor.
        start, count, step: ``[N]`` each; ``count >= 1``, ``step >= 1``.
        offset: first runtime element, row-major.
        strides: ``[N]`` runtime elements per step of ``k[d]``; 0 only where ``count`` is 1.
    """

    runtime: str
    tensor: str
    start: tuple[int, ...]
    count: tuple[int, ...]
    step: tuple[int, ...]
    offset: int
    strides: tuple[int, ...]


class Opaque(msgspec.Struct, frozen=True, array_like=True):
    """Runtime elements that the loader computes from the checkpoint instead of copying them.

    Element ``k`` (``0 <= k[d] < count[d]``) is runtime element ``offset + sum(k[d] * strides[d])`` of ``runtime``.

    Attributes:
        runtime: name of the runtime tensor.
        offset, count, strides: which elements; ``[M]`` each, for any ``M``.
        inputs: the checkpoint tensors that their values depend on, in the checkpoint's order.
        reason: what was done to them, for messages, e.g. ``"aten.exp"`` or ``"values differ from the checkpoint's"``.
    """

    runtime: str
    offset: int
    count: tuple[int, ...]
    strides: tuple[int, ...]
    inputs: tuple[str, ...]
    reason: str


class SourceMap(msgspec.Struct, frozen=True):
    """Everything that is known about one worker's layout.

    Attributes:
        runtime: shape and dtype of every runtime tensor.
        boxes: what comes from the checkpoint. A checkpoint element may appear in several boxes (replicated kv heads);
            a runtime element appears in at most one (padding in none).
        aliases: further boxes that hold for a sender only: the element also is what the checkpoint stores under a
            second name (tied weights of which the checkpoint has both copies).
        opaque: elements that are no copies; disjoint from ``boxes``. A receiver gets their inputs whole and runs the
            loader on them; a sender exports their inputs by name.
        probed: runtime tensor to the reason why the probe had to read it, where a trace was tried first.
    """

    runtime: dict[str, TensorSpec]
    boxes: list[Box]
    aliases: list[Box] = []
    opaque: list[Opaque] = []
    probed: dict[str, str] = {}

    @property
    def opaque_inputs(self) -> set[str]:
        """The checkpoint tensors that opaque elements depend on."""
        return {name for part in self.opaque for name in part.inputs}
