"""Checkpoint tensors that travel whole because a loader computes with them instead of copying.

In layouts they are *virtual* runtime tensors, so that planner, programs and packing carry them like any other: a
receiver announces ``whole:NAME`` for every tensor that it must give to its loader, a sender ``export:NAME`` for every
tensor that it must ask its trainer for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import msgspec
import torch

from rlbridge.sync.layout.dtypes import dtype_name, item_bytes, torch_dtype
from rlbridge.sync.layout.loading import LoadWeights
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.program import BucketProgram, Program
from rlbridge.transport.errors import LayoutError, WorkerError

WHOLE, EXPORT = "whole:", "export:"
_LISTED = 20
T = TypeVar("T")

Export = Callable[[str], torch.Tensor]
"""Checkpoint name to the whole tensor as a checkpoint would store it; may communicate between trainer ranks."""
AfterLoad = Callable[[], object]


def is_virtual(runtime: str) -> bool:
    """Whether this runtime tensor exists for the transfer only."""
    return runtime.startswith((WHOLE, EXPORT))


def checkpoint_name(virtual: str) -> str:
    """The checkpoint tensor that a virtual runtime tensor is."""
    return virtual.partition(":")[2]


def with_virtual(layout: SourceMap, kind: str, inputs: Mapping[str, TensorSpec]) -> SourceMap:
    """``layout`` with one virtual runtime tensor of ``kind`` for each of ``inputs``.

    Raises:
        LayoutError: a live tensor has a name that is kept for virtual ones.
    """
    taken = [name for name in layout.runtime if is_virtual(name)]
    if taken:
        raise LayoutError(f"live tensors must not be called {WHOLE}... or {EXPORT}...: {', '.join(taken[:_LISTED])}")
    runtime = layout.runtime | {kind + name: tensor for name, tensor in inputs.items()}
    boxes = [_full_box(kind + name, name, tensor.shape) for name, tensor in inputs.items() if 0 not in tensor.shape]
    return msgspec.structs.replace(layout, runtime=runtime, boxes=[*layout.boxes, *boxes])


def inputs_of(spec: CheckpointSpec, names: Iterable[str], dtypes: Mapping[str, str]) -> dict[str, TensorSpec]:
    """Shapes and wire dtypes of the checkpoint tensors ``names``, in the checkpoint's order."""
    wanted = set(names)
    return {name: TensorSpec(tensor.shape, dtypes[name]) for name, tensor in spec.tensors.items() if name in wanted}


def total_bytes(inputs: Mapping[str, TensorSpec]) -> int:
    """Bytes of all of them together."""
    return sum(math.prod(tensor.shape) * item_bytes(tensor.dtype) for tensor in inputs.values())


def check_live(layout: SourceMap, live: Mapping[str, torch.Tensor]) -> None:
    """Nothing is written into tensors that are not what they were when their layout was discovered.

    Raises:
        LayoutError: tensors are gone or have another shape or dtype; the text lists them.
    """
    used = {box.runtime for box in layout.boxes} | {part.runtime for part in layout.opaque}
    changed = [
        f"{name} was {list(was.shape)} {was.dtype}, is {_described(live.get(name))}"
        for name, was in layout.runtime.items()
        if name in used and _spec_of(live.get(name)) != was
    ]
    if changed:
        raise LayoutError(
            "live tensors are not what they were at connect():"
            + _listing(changed)
            + "\nPost-processing that replaces tensors belongs into load_weights, so that their layout is discovered "
            "as it will be; after_load may only fill further tensors, or change values in place."
        )


class Loading:
    """A receiver's last step of applying a version: its loader on the whole tensors, then its post-processing.

    Args:
        inputs: checkpoint name to shape and wire dtype of each whole tensor, in the checkpoint's order.
        load_weights, after_load: the backend's own.
    """

    def __init__(
        self, inputs: Mapping[str, TensorSpec], load_weights: LoadWeights, after_load: AfterLoad | None
    ) -> None:
        self.inputs = dict(inputs)
        self._load_weights, self._after_load = load_weights, after_load
        self._buffers: dict[str, torch.Tensor] = {}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Host memory that the whole tensors arrive in, by virtual name; for a receiver without staging."""
        if not self._buffers:
            self._buffers = {WHOLE + name: _empty(tensor) for name, tensor in self.inputs.items()}
        return self._buffers

    def arrived(self, name: str) -> torch.Tensor:
        """The whole tensor that lies in ``buffers``."""
        return self.buffers()[WHOLE + name]

    def finish(self, version: int, whole: Callable[[str], torch.Tensor]) -> None:
        """Everything that is a copy is written: compute the rest from ``whole(name)``, asked for one at a time.

        Raises:
            WorkerError: the backend's own code raised; the live weights are no version.
        """
        if self.inputs:
            stream = WholeTensors(list(self.inputs), whole)
            what = f"load_weights on {', '.join(list(self.inputs)[:_LISTED])}"
            _run(partial(self._load_weights, stream), what, version)
        if self._after_load is not None:
            _run(self._after_load, "after_load", version)


class WholeTensors:
    """(name, tensor) pairs in the checkpoint's order, each made when it is asked for.

    An iterator, as loaders expect; ``iter()`` begins anew, for those that go through the weights twice.
    """

    def __init__(self, names: list[str], whole: Callable[[str], torch.Tensor]) -> None:
        self._names, self._whole = names, whole
        self._first: Iterator[tuple[str, torch.Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, self._whole(name)) for name in self._names)

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._first is None:
            self._first = iter(self)
        return next(self._first)


class StagedWholes:
    """Whole tensors, put together from a version's staged payloads.

    Args:
        program: where the parts lie.
        payload: bucket number to its payload, ``uint8 [payload_bytes]``.
        inputs: shape and dtype of each.
    """

    def __init__(
        self, program: Program, payload: Callable[[int], torch.Tensor], inputs: Mapping[str, TensorSpec]
    ) -> None:
        self._payload, self._inputs = payload, inputs
        self._parts: dict[str, list[BucketProgram]] = defaultdict(list)
        for bucket in program.buckets if inputs else ():
            for name in {piece.runtime for piece in bucket.pieces if piece.runtime.startswith(WHOLE)}:
                pieces = tuple(piece for piece in bucket.pieces if piece.runtime == name)
                self._parts[name].append(msgspec.structs.replace(bucket, pieces=pieces))

    def tensor(self, name: str) -> torch.Tensor:
        """A new tensor with the values of this version."""
        whole = _empty(self._inputs[name])
        for part in self._parts[WHOLE + name]:
            prepare(part, {WHOLE + name: whole}).unpack(self._payload(part.bucket))
        return whole


class Exports:
    """What a sender asks its trainer for at every version.

    Args:
        inputs: checkpoint name to shape and wire dtype; all ranks export the same ones, in the same order.
        kept: those that this rank sends. For the others it only takes part, and what it returns does not matter.
        export: the trainer's own.
    """

    def __init__(self, inputs: Mapping[str, TensorSpec], kept: Container[str], export: Export) -> None:
        self._inputs, self._kept, self._export = inputs, kept, export

    def take(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank sends, by virtual name, checked; each is exported when it is asked for.

        Raises:
            WorkerError: ``export`` raised. LayoutError: it returned something else than the checkpoint's tensor.
        """
        for name, wanted in self._inputs.items():
            tensor = _run(partial(self._export, name), f"export({name!r})", version)
            if name in self._kept:
                _check_export(name, wanted, tensor)
                yield EXPORT + name, tensor.detach()

    def take_together(self, version: int) -> dict[str, torch.Tensor]:
        """All that ``take`` gives, to be held until the version is out.

        Raises:
            LayoutError: two exported tensors share memory, so that one has overwritten the other.
        """
        taken: dict[str, torch.Tensor] = {}
        owner: dict[int, str] = {}
        for virtual, tensor in self.take(version):
            other = owner.setdefault(tensor.data_ptr(), virtual) if tensor.numel() else virtual
            if other != virtual:
                raise LayoutError(
                    f"export({checkpoint_name(virtual)!r}) returned the memory of export({checkpoint_name(other)!r}); "
                    "without sender staging both must stay as they are until the version is out, so give each memory "
                    "of its own (a clone, if they are tied)"
                )
            taken[virtual] = tensor
        return taken

    def copy(self, tensor: torch.Tensor, virtual: str, snapshot: dict[str, torch.Tensor]) -> None:
        """Copy an exported tensor into ``snapshot``, which keeps it in the wire dtype: this end's one cast."""
        if virtual not in snapshot:
            dtype = torch_dtype(self._inputs[checkpoint_name(virtual)].dtype)
            snapshot[virtual] = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        snapshot[virtual].copy_(tensor)


def refuse_without_export(layout: SourceMap) -> LayoutError:
    """What a trainer hears whose loader computes, if it gives no ``export``."""
    return LayoutError(
        "this trainer's loader computes runtime tensors instead of copying them, and cannot be run backwards:"
        + describe(layout.opaque)
        + f"\nGive SenderAdapter(export=...): called with {_names(layout.opaque_inputs)} at every version, it returns "
        "that tensor whole, as the checkpoint would store it."
    )


def describe(parts: Iterable[Opaque]) -> str:
    """One indented line for each runtime tensor that is computed: from what, and how."""
    lines: dict[str, None] = {}
    for part in parts:
        lines[f"{part.runtime} from {', '.join(part.inputs) or 'no checkpoint tensor'} ({part.reason})"] = None
    return _listing(list(lines))


def check_budget(inputs: Mapping[str, TensorSpec], bucket_bytes: int, budget_bytes: int) -> int:
    """Bytes of the host buffers that a receiver without staging needs for ``inputs``.

    Raises:
        LayoutError: they leave no room for a bucket within ``budget_bytes``.
    """
    needed_bytes = total_bytes(inputs)
    if inputs and needed_bytes + bucket_bytes > budget_bytes:
        raise LayoutError(
            f"this receiver's loader computes with {len(inputs)} whole checkpoint tensors of {needed_bytes} bytes "
            f"({_names(inputs)}). Without receiver staging they need host memory of their own until a version is "
            f"whole: with one bucket of {bucket_bytes} bytes that is more than staging_bytes={budget_bytes}. Choose a "
            f"mode with receiver staging, or set staging_bytes to at least {needed_bytes + bucket_bytes}."
        )
    return needed_bytes


def _check_export(name: str, wanted: TensorSpec, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"export({name!r}) returned {type(tensor).__name__}, not a tensor")
    if hasattr(tensor, "to_local") or tensor.device.type == "meta":
        raise LayoutError(
            f"export({name!r}) returned a {type(tensor).__name__} on {tensor.device.type!r}; return the whole tensor "
            "with its values, e.g. full_tensor()"
        )
    both_floating = torch_dtype(wanted.dtype).is_floating_point and tensor.dtype.is_floating_point
    if tuple(tensor.shape) != wanted.shape or not (both_floating or dtype_name(tensor.dtype) == wanted.dtype):
        raise LayoutError(
            f"export({name!r}) returned {_described(tensor)}, but the checkpoint has {list(wanted.shape)}, which "
            f"travels as {wanted.dtype}; return the tensor as the checkpoint would store it"
        )


def _run(step: Callable[[], T], what: str, version: int) -> T:
    try:
        return step()
    except Exception as error:
        raise WorkerError(f"version {version}: {what} raised {type(error).__name__}: {error}") from error


def _full_box(runtime: str, tensor: str, shape: tuple[int, ...]) -> Box:
    strides = [math.prod(shape[d + 1 :]) if n > 1 else 0 for d, n in enumerate(shape)]
    zeros, ones = (0,) * len(shape), (1,) * len(shape)
    return Box(runtime, tensor, zeros, shape, ones, 0, tuple(strides))


def _empty(tensor: TensorSpec) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype))


def _spec_of(tensor: torch.Tensor | None) -> TensorSpec | None:
    return None if tensor is None else TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype))


def _described(tensor: torch.Tensor | None) -> str:
    return "gone" if tensor is None else f"{list(tensor.shape)} {dtype_name(tensor.dtype)}"


def _names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _LISTED} more" if len(ordered) > _LISTED else ""
    return ", ".join(ordered[:_LISTED]) + more


def _listing(lines: list[str]) -> str:
    more = [f"... and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "".join(f"\n  {line}" for line in [*lines[:_LISTED], *more])
