"""Run a loader on tensors without memory, and turn what was recorded into boxes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from rlbridge.sync.layout.live import LiveTensors, owners, specs
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.layout.trace.boxes import Found, boxes_of
from rlbridge.sync.layout.trace.mode import OperationMode, ValueMode
from rlbridge.sync.layout.trace.store import Store, kind
from rlbridge.transport.errors import LayoutError

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_MAX_RERUNS = 6
"""How often a loader that reads values is tried again, each time with another kind of tensors given as real ones."""


@dataclass(frozen=True, slots=True)
class Traced:
    """What a trace found.

    Attributes:
        boxes: copies, rectangular in checkpoint coordinates.
        opaque: elements computed by arithmetic.
        untraced: runtime tensor to the reason why nothing is claimed about it. The others are complete: an element
            in no box and not opaque does not depend on the checkpoint.
    """

    boxes: list[Box] = field(default_factory=list)
    opaque: list[Opaque] = field(default_factory=list)
    untraced: dict[str, str] = field(default_factory=dict)


def trace(spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors) -> Traced:
    """Follow the checkpoint's elements through ``load_weights`` without loading any.

    The checkpoint tensors have shapes and dtypes but no memory; no live tensor is written to, and no message is sent
    to another rank. Where the loader reads values (``item``, ``tolist``, operations whose result has a shape that
    depends on them), it is run again with real tensors of that kind, filled with ones. What is then computed, or
    chosen by index, is left untraced, and so is what a loader writes between reading values and asking for its next
    tensor. A loader that first collects all tensors and then decides in Python where they go is believed to go the
    same way for all values: verify such a layout.

    Args:
        spec: the checkpoint that the loader understands.
        load_weights: the backend's own loader. It gets each (name, tensor) once, in the spec's order.
        live_tensors: runtime name to tensor, on the CPU or on the meta device; asked anew after the load. Tied
            weights may be listed under all their names: the first one owns the elements.

    Raises:
        LayoutError: live tensors overlap in part, or the loader replaced one so that it cannot be given back.
    """
    real: set[str] = set()
    failed = ""
    for _ in range(1 + _MAX_RERUNS):
        store = Store()
        with torch.no_grad(), _given_back(live_tensors):
            before = owners(live_tensors(), meta=True)
            expected = specs(before)
            error = _load(store, spec, load_weights, live_tensors, real)
            if error is None:
                return _collect(store, spec, expected, live_tensors())
        failed = str(error)
        wanted = set() if store.failure is None else store.failure.names - real
        if store.failure is None or not wanted:
            break
        kinds = {kind(name) for name in wanted}
        real |= {name for name in spec.tensors if kind(name) in kinds}
    return Traced(untraced=dict.fromkeys(expected, failed))


def trace_layout(spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors) -> SourceMap:
    """The whole layout from a trace alone, for planning without weights: live tensors may be on the meta device.

    Raises:
        LayoutError: some runtime tensors could not be traced; the text lists them with the reasons.
    """
    runtime = specs(owners(live_tensors(), meta=True))
    traced = trace(spec, load_weights, live_tensors)
    if traced.untraced:
        lines = [f"{name}: {reason}" for name, reason in list(traced.untraced.items())[:20]]
        more = f"\n  and {len(traced.untraced) - 20} more" if len(traced.untraced) > 20 else ""
        raise LayoutError(
            "the layout of these runtime tensors cannot be traced; discover it on real tensors instead:\n  "
            + "\n  ".join(lines)
            + more
        )
    aliases = _tied_aliases(spec, load_weights, live_tensors, traced)
    return SourceMap(runtime, traced.boxes, aliases, traced.opaque)


def _tied_aliases(
    spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors, traced: Traced
) -> list[Box]:
    """Boxes of checkpoint tensors that another one overwrote in tied weights: leaving that one out shows them.

    A loader that insists on the whole checkpoint shows none.
    """
    owned, listed = owners(live_tensors(), meta=True), live_tensors()
    twice = {name for name in owned for other in listed if other not in owned and _same(listed[other], owned[name])}
    shown = {box.tensor for box in traced.boxes} | {name for part in traced.opaque for name in part.inputs}
    winners = {box.tensor for box in traced.boxes if box.runtime in twice}
    if not winners or shown == set(spec.tensors):
        return []
    rest = CheckpointSpec({name: tensor for name, tensor in spec.tensors.items() if name not in winners})
    again = trace(rest, load_weights, live_tensors)
    return [box for box in again.boxes if box.runtime in twice and box.tensor not in shown]


def _load(
    store: Store,
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    live_tensors: LiveTensors,
    real: Set[str],
) -> Exception | None:
    """Run the loader; the error that kept it from being followed, if any."""
    for tensor in live_tensors().values():
        store.adopt(tensor, live=True, real=tensor.device.type != "meta")
    try:
        with warnings.catch_warnings(), ValueMode(store), OperationMode(store):
            # Of a live tensor on the meta device, torch says that copying into it does nothing: that is the point.
            warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
            load_weights(_weights(store, spec, real))
    except Exception as error:
        return store.failure or LayoutError(f"the loader cannot be traced: {type(error).__name__}: {error}")
    return store.failure


def _weights(store: Store, spec: CheckpointSpec, real: Set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """The checkpoint, each tensor made when asked for."""
    for name, tensor in spec.tensors.items():
        store.next_tensor()
        # The loader's modes are on while this runs.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = store.stand_in(name, tensor) if name in real else store.checkpoint(name, tensor)
        yield name, made
        del made
    store.next_tensor(last=True)


def _collect(
    store: Store, spec: CheckpointSpec, expected: Mapping[str, TensorSpec], live: Mapping[str, torch.Tensor]
) -> Traced:
    """Read what the live tensors hold now."""
    traced = Traced()
    now = owners(live, meta=True)
    position = {name: i for i, name in enumerate(spec.tensors)}
    for name, before in expected.items():
        if name not in now:
            traced.untraced[name] = "it is gone, or part of another tensor, after loading"
            continue
        after = specs({name: now[name]})[name]
        if after != before:
            traced.untraced[name] = (
                f"loading makes it {after.dtype} {list(after.shape)} instead of {before.dtype} {list(before.shape)}"
            )
            continue
        found = boxes_of(store, spec, position, name, now[name])
        if isinstance(found, Found):
            traced.boxes.extend(found.boxes)
            traced.opaque.extend(found.opaque)
        else:
            traced.untraced[name] = found
    for name in now:
        if name not in expected and name in live:
            traced.untraced[name] = "loading gives it memory of its own"
    return traced


@contextmanager
def _given_back(live_tensors: LiveTensors) -> Iterator[None]:
    """Undo what a loader did by replacing tensors (``param.data = w``) instead of writing into them.

    Raises:
        LayoutError: on leaving, where that is impossible.
    """
    objects = dict(live_tensors())
    aliases = {name: tensor.detach() for name, tensor in objects.items()}
    try:
        yield
    finally:
        for name, tensor in objects.items():
            _point(tensor, aliases[name])
        lost = [name for name in _moved(aliases, live_tensors) if not _replace(name, aliases[name], live_tensors)]
        if lost:
            raise LayoutError(
                "loading replaced these tensors by others, so they cannot be given their values back: "
                f"{', '.join(lost[:20])}; discover the layout before post-processing"
            )


def _moved(aliases: Mapping[str, torch.Tensor], live_tensors: LiveTensors) -> list[str]:
    now = live_tensors()
    return [name for name, alias in aliases.items() if name not in now or not _same(now[name], alias)]


def _same(tensor: torch.Tensor, alias: torch.Tensor) -> bool:
    return (
        tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.shape == alias.shape
        and tensor.stride() == alias.stride()
        and tensor.dtype == alias.dtype
    )


def _point(tensor: torch.Tensor, alias: torch.Tensor) -> None:
    if _same(tensor, alias):
        return
    if tensor.device == alias.device:
        tensor.data = alias
    else:
        # Only the whole Python object can change its device. Nothing else refers to ``old``.
        old = type(tensor)(alias, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else alias.detach()
        torch.utils.swap_tensors(tensor, old)


def _replace(name: str, alias: torch.Tensor, live_tensors: LiveTensors) -> bool:
    """Make the tensor that is listed as ``name`` now the old one again, or at least equal to it."""
    now = live_tensors()
    if name not in now:
        return False
    _point(now[name], alias)
    now = live_tensors()
    if _same(now[name], alias):
        return True
    # It was a view of what the backend keeps: only the values can be given back.
    if now[name].shape != alias.shape or now[name].dtype != alias.dtype:
        return False
    now[name].detach().copy_(alias)
    return True
