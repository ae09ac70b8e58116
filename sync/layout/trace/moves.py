"""Rules for the operations that move elements, or make room for them. Each takes the store and the operation's own
arguments, and gives the result the operation would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rlbridge.sync.layout.recover import recover
from rlbridge.sync.layout.source_map import Box
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.layout.trace.store import Rule, Store

aten = torch.ops.aten

SMALL = 1 << 20
"""Elements up to which an irregular movement is looked at element by element."""

_KEPT_REAL = 1 << 14
"""Elements up to which a constant tensor is given memory, so that a loader may read it."""


def copy_(store: Store, _: Any, into: torch.Tensor, out_of: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    store.copy(into, out_of.expand(into.shape), "aten.copy_")
    return into


def foreach_copy_(
    store: Store, _: Any, into: Sequence[torch.Tensor], out_of: Sequence[torch.Tensor], non_blocking: bool = False
) -> None:
    for one, other in zip(into, out_of, strict=True):
        store.copy(one, other.expand(one.shape), "aten._foreach_copy_")


def duplicate(store: Store, func: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``clone``, ``to``: a fresh copy, cast."""
    device = kwargs.get("device") or tensor.device
    strides = None
    if not tensor.is_contiguous() and kwargs.get("memory_format") is not torch.contiguous_format:
        as_meta = func(to_meta(tensor), *args, **(kwargs | {"device": None} if "device" in kwargs else kwargs))
        strides = as_meta.stride()
    out = store.blank(tensor.shape, kwargs.get("dtype") or tensor.dtype, torch.device(device), strides)
    store.copy(out, tensor, name_of(func))
    return out


def same(store: Store, _: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """``pin_memory``: as if it were already so."""
    return tensor.view_as(tensor)


def cat(store: Store, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    # Empty tensors of one dimension are skipped by torch, whatever the others' shape.
    parts = [t for t in tensors if not (t.dim() == 1 and t.numel() == 0)] or list(tensors)
    dim = dim % max(1, parts[0].dim())
    shape = list(parts[0].shape)
    shape[dim] = sum(t.shape[dim] for t in parts)
    dtype = parts[0].dtype
    for t in parts:
        dtype = torch.promote_types(dtype, t.dtype)
    out = store.blank(shape, dtype, parts[0].device)
    at = 0
    for t in parts:
        store.copy(out.narrow(dim, at, t.shape[dim]), t, "aten.cat")
        at += t.shape[dim]
    return out


def stack(store: Store, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    dim = dim % (tensors[0].dim() + 1)
    return cat(store, func, [t.unsqueeze(dim) for t in tensors], dim)


def repeat(store: Store, func: Any, tensor: torch.Tensor, repeats: Sequence[int]) -> torch.Tensor:
    shape = [1] * (len(repeats) - tensor.dim()) + list(tensor.shape)
    out = store.blank([n * times for n, times in zip(shape, repeats, strict=True)], tensor.dtype, tensor.device)
    split = [size for n, times in zip(shape, repeats, strict=True) for size in (times, n)]
    spread = [size for n in shape for size in (1, n)]
    store.copy(out.view(split), tensor.reshape(shape).view(spread).expand(split), "aten.repeat")
    return out


def pad(store: Store, func: Any, tensor: torch.Tensor, padding: Sequence[int], value: Any = 0) -> torch.Tensor:
    inside, shape = tensor, list(tensor.shape)
    room: list[tuple[int, int]] = [(0, n) for n in shape]
    for i in range(len(padding) // 2):
        before, after = padding[2 * i], padding[2 * i + 1]
        dim = tensor.dim() - 1 - i
        cut_before, cut_after = max(0, -before), max(0, -after)
        inside = inside.narrow(dim, cut_before, shape[dim] - cut_before - cut_after)
        room[dim] = (max(0, before), inside.shape[dim])
        shape[dim] += before + after
    out = store.blank(shape, tensor.dtype, tensor.device)
    into = out
    for dim, (start, length) in enumerate(room):
        into = into.narrow(dim, start, length)
    store.copy(into, inside, "aten.constant_pad_nd")
    return out


def constant_(store: Store, func: Any, into: torch.Tensor, value: Any = 0) -> torch.Tensor:
    """``zero_``, ``fill_``."""
    if isinstance(value, torch.Tensor) and store.inputs(value):
        store.copy(into, value.expand(into.shape), name_of(func))
    elif store.of(into) is None and into.numel() <= _KEPT_REAL:
        func(into, *([] if func.overloadpacket is aten.zero_ else [value]))
    else:
        store.constant(into, name_of(func))
    return into


def factory(store: Store, func: Any, *args: Any, **kwargs: Any) -> Any:
    """``empty``, ``zeros``, ``new_empty`` ...: large ones take no memory."""
    like = args[0].device if isinstance(args[0], torch.Tensor) else torch.get_default_device()
    device = torch.device(kwargs.get("device") or like)
    if device.type == "meta":
        return func(*args, **kwargs)
    as_meta = func(*[to_meta(a) if isinstance(a, torch.Tensor) else a for a in args], **kwargs | {"device": "meta"})
    if as_meta.numel() <= _KEPT_REAL:
        return func(*args, **kwargs)
    return store.blank(as_meta.shape, as_meta.dtype, device, as_meta.stride())


def index_select(store: Store, func: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    return _take_lines(store, func, tensor, dim, index)


def index(store: Store, func: Any, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(given) == 1 and given[0][1].dim() == 1:
        return _take_lines(store, func, tensor, *given[0])
    return None


def index_put_(
    store: Store,
    func: Any,
    into: torch.Tensor,
    indices: Sequence[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
) -> torch.Tensor | None:
    given = [(d, i) for d, i in enumerate(indices) if i is not None]
    if accumulate or len(given) != 1 or given[0][1].dim() != 1:
        return None
    dim, index = given[0]
    return _put_lines(store, func, into, dim, index, values)


def index_copy_(
    store: Store, func: Any, into: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor
) -> torch.Tensor | None:
    return _put_lines(store, func, into, dim % max(1, into.dim()), index, values)


def flip(store: Store, func: Any, tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    for dim in dims:
        tensor = _lines_of(store, func, tensor, dim, torch.arange(tensor.shape[dim], 0, -1))
    return tensor.view_as(tensor)


def roll(store: Store, func: Any, tensor: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> Any:
    if not dims:
        return roll(store, func, tensor.reshape(-1), shifts, [0]).view(tensor.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        tensor = _lines_of(store, func, tensor, dim, torch.arange(1, tensor.shape[dim] + 1).roll(shift))
    return tensor.view_as(tensor)


MOVES: dict[Any, Rule] = {
    aten.copy_: copy_,
    aten._foreach_copy_: foreach_copy_,
    aten.clone: duplicate,
    aten._to_copy: duplicate,
    aten.lift_fresh_copy: duplicate,
    aten._pin_memory: same,
    aten.cat: cat,
    aten.stack: stack,
    aten.repeat: repeat,
    aten.constant_pad_nd: pad,
    aten.index_select: index_select,
    aten.index: index,
    aten.index_put_: index_put_,
    aten.index_copy_: index_copy_,
    aten.flip: flip,
    aten.roll: roll,
    aten.zero_: constant_,
    aten.fill_: constant_,
}
"""Rules by operation, asked where a traced tensor is among the arguments. ``None`` as result: not this case."""

FACTORIES = {
    aten.empty,
    aten.empty_strided,
    aten.empty_like,
    aten.new_empty,
    aten.new_empty_strided,
    aten.zeros,
    aten.zeros_like,
    aten.new_zeros,
}

ONLY_SHAPES = {aten.ones_like, aten.new_ones, aten.full_like, aten.new_full, aten.rand_like, aten.randn_like}
"""Operations that read no value of their tensor argument."""

REARRANGING = {
    aten.index,
    aten.index_put,
    aten.index_put_,
    aten.index_copy,
    aten.index_copy_,
    aten.index_select,
    aten.gather,
    aten.take,
    aten.scatter,
    aten.scatter_,
    aten.where,
    aten.masked_fill,
    aten.masked_fill_,
    aten.masked_scatter,
    aten.masked_scatter_,
    aten.masked_select,
    aten.tril,
    aten.triu,
    aten.tril_,
    aten.triu_,
    aten.diag_embed,
    aten.repeat_interleave,
    aten.rot90,
    aten.slice_scatter,
    aten.select_scatter,
    aten.narrow_copy,
    aten.split_with_sizes_copy,
    aten.view_copy,
    aten.permute_copy,
    aten.pixel_shuffle,
    aten.pixel_unshuffle,
    aten.channel_shuffle,
    aten.index_fill,
    aten.index_fill_,
}
"""Operations that only move elements or put constants: small ones are followed by moving numbers instead."""

_FILLINGS = {"value", "self", "other"}
_SELECTORS = {"index", "indices", "mask", "condition", "repeats"}


def rearrange(store: Store, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Run a ``REARRANGING`` operation on numbers that stand for elements; ``None`` if it is too large for that."""
    named = arguments(func, args, kwargs)
    data = {k: v for k, v in named.items() if isinstance(v, torch.Tensor) and k not in _SELECTORS}
    if any(t.numel() > SMALL for t in data.values()):
        return None
    numbers: dict[str, Any] = {}
    shapes: dict[str, TensorSpec] = {}
    following = 1
    for k, tensor in data.items():
        numbers[k] = torch.zeros(tensor.shape, dtype=torch.int64)
        if store.of(tensor) is not None:
            numbers[k] = torch.arange(following, following + tensor.numel()).reshape(tensor.shape)
            shapes[k] = TensorSpec(tuple(tensor.shape), "int64")
            following += tensor.numel()
    # Constants that are filled in are no elements: number 0.
    fixed = {k: 0 if k in _FILLINGS and isinstance(v, int | float) else v for k, v in named.items()}
    moved = func(**fixed | {k: v.clone() for k, v in numbers.items()})
    if not isinstance(moved, torch.Tensor) or moved.numel() > SMALL:
        return None
    first = data["self"] if "self" in data else next(iter(data.values()))
    dtype = first.dtype
    if func._schema.returns[0].alias_info is None and len(data) > 1:
        dtype = torch.result_type(*list(data.values())[:2])
    out = store.blank(moved.shape, dtype, first.device)
    runtime = {"out": TensorSpec(tuple(moved.shape), "int64")}
    for box in recover(CheckpointSpec(shapes), runtime, {"out": moved.reshape(-1).numpy()}):
        store.copy(_destination(out, box), _source(data[box.tensor], box), name_of(func))
    if func._schema.returns[0].alias_info is None:
        return out
    store.copy(first, out, name_of(func))
    return first


def only_moves(store: Store, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation of ``MOVES`` or ``REARRANGING`` only moves, and in the same way for any values."""
    named = arguments(func, args, kwargs)
    if named.get("accumulate") or "reduce" in named:
        return False
    selectors = [t for k, v in named.items() if k in _SELECTORS for t in _flat(v)]
    return not store.reached and all(not store.inputs(t) for t in selectors)


def arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments by the names that the schema gives them."""
    return {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}


def _flat(value: Any) -> list[torch.Tensor]:
    return [t for t in (value if isinstance(value, list | tuple) else [value]) if isinstance(t, torch.Tensor)]


def _destination(out: torch.Tensor, box: Box) -> torch.Tensor:
    return out.as_strided(box.count, box.strides, box.offset)


def _source(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for d, (start, count, step) in enumerate(zip(box.start, box.count, box.step, strict=True)):
        tensor = tensor[(slice(None),) * d + (slice(start, start + (count - 1) * step + 1, step),)]
    return tensor


def _take_lines(store: Store, func: Any, tensor: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor | None:
    """Choose lines of one dimension; equally spaced ones are copied at once."""
    if not _is_constant(store, index) or tensor.dim() == 0:
        return None
    dim %= tensor.dim()
    return _lines_of(store, func, tensor, dim, torch.arange(1, tensor.shape[dim] + 1)[index.cpu()])


def _lines_of(store: Store, func: Any, tensor: torch.Tensor, dim: int, lines: torch.Tensor) -> torch.Tensor:
    """The ``lines`` (numbered from 1) of ``tensor`` along ``dim``, as a new tensor."""
    shape = list(tensor.shape)
    shape[dim] = lines.numel()
    out = store.blank(shape, tensor.dtype, tensor.device)
    for into, out_of in _runs(lines):
        store.copy(_lines(out, dim, into), _lines(tensor, dim, out_of), name_of(func))
    return out


def _put_lines(
    store: Store, func: Any, into: torch.Tensor, dim: int, index: torch.Tensor, values: torch.Tensor
) -> torch.Tensor | None:
    if not _is_constant(store, index) or into.dim() == 0:
        return None
    shape = list(into.shape)
    at = torch.arange(shape[dim])[index.cpu()]
    shape[dim] = at.numel()
    values = values.expand(shape)
    lines = torch.zeros(into.shape[dim], dtype=torch.int64)
    lines[at] = torch.arange(1, at.numel() + 1)
    for to, out_of in _runs(lines):
        store.copy(_lines(into, dim, to), _lines(values, dim, out_of), name_of(func))
    return into


_Progression = tuple[int, int, int]
"""start, count, step."""


def _runs(lines: torch.Tensor) -> Iterator[tuple[_Progression, _Progression]]:
    """Runs of equally spaced lines: positions, and what is at them (numbers from 1; 0 is nothing)."""
    spec = CheckpointSpec({"x": TensorSpec((max(1, int(lines.max())) if lines.numel() else 1,), "int64")})
    for box in recover(spec, {"y": TensorSpec((lines.numel(),), "int64")}, {"y": lines.numpy()}):
        yield (box.offset, box.count[0], max(1, box.strides[0])), (box.start[0], box.count[0], box.step[0])


def _lines(tensor: torch.Tensor, dim: int, which: _Progression) -> torch.Tensor:
    start, count, step = which
    return tensor[(slice(None),) * dim + (slice(start, start + (count - 1) * step + 1, step),)]


def _is_constant(store: Store, index: torch.Tensor) -> bool:
    return store.is_real(index) and not store.inputs(index) and not store.reached and index.device.type != "meta"


def to_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Shape, strides and dtype only."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def name_of(func: Any) -> str:
    """For messages: ``aten.exp``."""
    return str(func.overloadpacket)
