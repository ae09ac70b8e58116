"""Handling a backend's live tensors: one owner per element, boxes as views, and giving them back as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from rlbridge.sync.layout.dtypes import dtype_name
from rlbridge.sync.layout.source_map import Box, Opaque
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import LayoutError

LiveTensors = Callable[[], Mapping[str, torch.Tensor]]


def owners(tensors: Mapping[str, torch.Tensor], *, meta: bool = False) -> dict[str, torch.Tensor]:
    """``tensors`` detached, without those whose elements another one has already (tied weights, views of a fused one).

    Of equal tensors the first name stays; of nested ones the larger. Tensors on the meta device, which have no memory,
    are taken only with ``meta``.

    Raises:
        LayoutError: a tensor has no memory of its own or overlaps another one in part.
    """
    by_size = sorted(tensors.items(), key=lambda item: -item[1].numel())
    kept: dict[str, torch.Tensor] = {}
    spans: dict[tuple[bool, int], list[tuple[int, int, str]]] = {}
    for name, tensor in by_size:
        if tensor.numel() == 0:
            continue
        if tensor.device.type == "meta" and not meta:
            raise LayoutError(f"{name!r} has no memory (meta device); materialise it before its layout is discovered")
        if hasattr(tensor, "to_local"):
            raise LayoutError(f"{name!r} is a {type(tensor).__name__}; give its local shard, `.to_local()`")
        begin, end = _span(tensor)
        memory = _memory(tensor)
        over = [s for s in spans.setdefault(memory, []) if s[0] < end and begin < s[1]]
        if not over:
            kept[name] = tensor.detach()
            spans[memory].append((begin, end, name))
        elif not any(_inside(tensor, kept[owner]) for *_, owner in over):
            raise LayoutError(f"{name!r} shares part of its memory with {over[0][2]!r}; list only one of them")
    return {name: kept[name] for name in tensors if name in kept}


def tied_names(tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Owners whose very elements are listed under a further name."""
    kept = owners(tensors)
    return {
        owner
        for name, tensor in tensors.items()
        if name not in kept and tensor.numel()
        for owner, other in kept.items()
        if other.data_ptr() == tensor.data_ptr() and other.shape == tensor.shape
    }


def specs(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorSpec]:
    """Shapes and dtypes."""
    return {name: TensorSpec(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in tensors.items()}


def flat_elements(tensor: torch.Tensor) -> torch.Tensor:
    """``[M]``, contiguous, in row-major order: a view of ``tensor``, or a copy if its elements do not lie like that."""
    return tensor.reshape(-1).contiguous()


def box_values(box: Box, values: torch.Tensor) -> torch.Tensor:
    """The part of a checkpoint tensor that ``box`` takes, ``[count[0], ..., count[N-1]]``: a view."""
    axes = zip(box.start, box.count, box.step, strict=True)
    return values[tuple(slice(start, start + (count - 1) * step + 1, step) for start, count, step in axes)]


def box_of(box: Box | Opaque, flat: torch.Tensor) -> torch.Tensor:
    """Where ``box`` lies in a runtime tensor's elements (``flat``: ``[M]``, contiguous): a view of the same shape."""
    return torch.as_strided(flat, box.count, box.strides, flat.storage_offset() + box.offset)


@contextmanager
def restored(live_tensors: LiveTensors) -> Iterator[None]:
    """Give the live tensors their present bits back on leaving, also after an error. Holds one copy of them.

    Raises:
        LayoutError: two calls of ``live_tensors`` give different memory, so that nobody could write what is in use.
    """
    _check_in_place(live_tensors)
    saved = {name: tensor.clone() for name, tensor in owners(live_tensors()).items()}
    try:
        yield
    finally:
        # Asked for again: a loader may have replaced tensors instead of writing into them.
        now = live_tensors()
        lost = [name for name, tensor in saved.items() if name not in now or now[name].shape != tensor.shape]
        for name in saved:
            if name not in lost:
                now[name].detach().copy_(saved[name])
        if lost:
            raise LayoutError(
                "loading changed the shape of these tensors or dropped them, so they cannot be given their values "
                f"back: {', '.join(sorted(lost)[:20])}; discover the layout before post-processing"
            )


def _check_in_place(live_tensors: LiveTensors) -> None:
    first, second = owners(live_tensors()), owners(live_tensors())  # both are held, so that no address is used twice
    copies = [name for name, tensor in first.items() if name not in second or _place(tensor) != _place(second[name])]
    if copies:
        raise LayoutError(
            f"live_tensors() gives other memory at each call for {', '.join(sorted(copies)[:20])}; give the tensors in "
            "use themselves, or views of them: no .to(dtype), .clone(), .contiguous(), .cpu() or .full_tensor()"
        )


def _place(tensor: torch.Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _memory(tensor: torch.Tensor) -> tuple[bool, int]:
    """What tells one memory from another. All meta storages begin at address 0: they are told by identity."""
    storage, meta = tensor.untyped_storage(), tensor.device.type == "meta"
    return meta, storage._cdata if meta else storage.data_ptr()


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and byte behind the last one, within the storage."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (int(reach) + 1) * tensor.element_size()


def _inside(tensor: torch.Tensor, owner: torch.Tensor) -> bool:
    (begin, end), (first, last) = _span(tensor), _span(owner)
    same = (tensor.shape, tensor.stride()) == (owner.shape, owner.stride()) and begin == first
    return tensor.dtype == owner.dtype and (same or (owner.is_contiguous() and first <= begin and end <= last))
