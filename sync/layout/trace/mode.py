"""The two modes under which a loader is traced: one sees every operation, the other what reads values beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from rlbridge.sync.layout.trace.moves import (
    FACTORIES,
    MOVES,
    ONLY_SHAPES,
    REARRANGING,
    factory,
    name_of,
    only_moves,
    rearrange,
    to_meta,
)
from rlbridge.sync.layout.trace.store import NotFollowedError, Store

aten = torch.ops.aten

_SHARES = {aten._unsafe_view, aten.unsafe_split, aten.unsafe_split_with_sizes, aten.unsafe_chunk, aten.set_}
"""Operations that give views, or rebind a tensor, although their schema does not say so."""

_COLLECTIVES = {"c10d", "_c10d_functional", "c10d_functional", "_dtensor"}


class OperationMode(TorchDispatchMode):
    """Runs views as they are, and of everything else only what does not touch traced tensors; the rest is recorded."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, a second's work, to keep it away from this function.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            if FakeTensor in types:
                return func(*args, **kwargs)  # somebody asks for shapes
            return NotImplemented  # a DTensor or the like: it comes back here with its local shards
        traits = _traits(func)
        if traits.view:
            return func(*args, **kwargs)
        if traits.factory:
            return factory(self.store, func, *args, **kwargs)
        tensors = list(_tensors(args, kwargs))
        if traits.collective:
            return self._collective(func, traits, args, kwargs, tensors)
        if not tensors or traits.only_shapes or all(self.store.of(t) is None for t in tensors):
            return func(*args, **kwargs)
        written = traits.written(args, kwargs)
        if all(self.store.is_real(t) for t in tensors) and not any(self._is_live(t) for t in written):
            return self._for_real(func, traits, args, kwargs, tensors, written)
        if traits.reads_values:
            for tensor in tensors:
                self.store.values(tensor, name_of(func))
            return func(*args, **kwargs)
        return self._record(func, traits, args, kwargs, tensors, written)

    def _is_live(self, tensor: torch.Tensor) -> bool:
        content = self.store.of(tensor)
        return content is not None and content.live

    def _for_real(
        self,
        func: Any,
        traits: _Traits,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        """Run an operation whose operands all have true values, and record what it does as well."""
        names = frozenset[str]().union(*(self.store.inputs(t) for t in tensors))
        if not names:
            return func(*args, **kwargs)
        if traits.reads_values:
            for tensor in tensors:
                self.store.values(tensor, name_of(func))
            return func(*args, **kwargs)
        failure = self.store.failure
        try:
            shadow = self._record(func, traits, args, kwargs, tensors, written)
        except NotFollowedError:
            self.store.failure, shadow = failure, None
            for tensor in written:
                self.store.lose(tensor, names, f"{name_of(func)} of values that the loader reads")
        result = func(*args, **kwargs)
        for tensor in written:
            self.store.adopt(tensor).real = True
        known = {t.untyped_storage()._cdata for t in tensors}
        shadows = list(_tensors((shadow,), {}))
        for i, tensor in enumerate(_tensors((result,), {})):
            if tensor.untyped_storage()._cdata not in known:
                like = shadows[i] if i < len(shadows) else None
                self.store.give_values(tensor, like, names, f"{name_of(func)} of values that the loader reads")
        return result

    def _record(
        self,
        func: Any,
        traits: _Traits,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        packet, out = func.overloadpacket, kwargs.get("out")
        result = None
        plain = {k: v for k, v in kwargs.items() if k != "out"} if isinstance(out, torch.Tensor) else kwargs
        if packet in MOVES:
            result = MOVES[packet](self.store, func, *args, **plain)
        moves = (packet in MOVES or packet in REARRANGING) and only_moves(self.store, func, args, kwargs)
        if result is None and moves and packet in REARRANGING and out is None:
            result = rearrange(self.store, func, args, kwargs)
        if packet is aten._foreach_copy_:
            return None
        if result is None:
            return self._compute(func, traits, args, kwargs, tensors, written, irregular=moves)
        if isinstance(out, torch.Tensor):
            self.store.copy(out, result.expand(out.shape), name_of(func))
            return out
        return result

    def _compute(
        self,
        func: Any,
        traits: _Traits,
        args: Any,
        kwargs: Any,
        tensors: list[torch.Tensor],
        written: list[torch.Tensor],
        *,
        irregular: bool,
    ) -> Any:
        """Find the shapes of the results, and record what they are computed from."""
        op = name_of(func)
        each = [self.store.inputs(t) for t in tensors]
        names = frozenset[str]().union(*each)
        try:
            on_meta = _on_meta(func, args, kwargs)
        except Exception as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.store.not_followed(f"{op} needs values: {text}", names) from error
        sources = [t for t, found in zip(tensors, each, strict=True) if found]

        def record(into: torch.Tensor) -> None:
            if irregular:
                self.store.lose(into, names, f"{op} is too irregular to follow")
            elif traits.pointwise and all(_fits(source, into) for source in sources):
                self.store.map(into, [source.expand(into.shape) for source in sources], op)
            else:
                self.store.compute(into, names, op)

        for tensor in written:
            record(tensor)
        device = next((t.device for t in tensors if t.dim() > 0), tensors[0].device)

        def fresh(meta: torch.Tensor) -> torch.Tensor:
            tensor = self.store.blank(meta.shape, meta.dtype, device, meta.stride())
            record(tensor)
            return tensor

        if traits.returns_written:
            return written[0] if len(traits.returned) == 1 else tuple(written)
        return tree_map_only(torch.Tensor, fresh, on_meta)

    def _collective(self, func: Any, traits: _Traits, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Never talk to other ranks, who may trace differently; what they would have sent is not known."""
        names = frozenset[str]().union(*(self.store.inputs(t) for t in tensors))
        op = name_of(func)
        if func.namespace != "c10d":
            return self._functional_collective(func, args, kwargs, tensors[0].device, names)
        for tensor in tensors:
            self.store.lose(tensor, names, f"{op} communicates with other ranks")
        results: list[Any] = []
        for returned in traits.returned:
            if "Work" in returned:
                results.append(FakeWork().boxed())
            else:
                results.append(args[0])
        return results[0] if len(results) == 1 else tuple(results)

    def _functional_collective(
        self, func: Any, args: Any, kwargs: Any, device: torch.device, names: frozenset[str]
    ) -> Any:
        op = name_of(func)
        if "wait_tensor" in op:
            return args[0]
        try:
            on_meta = _on_meta(func, args, kwargs)
        except Exception as error:
            raise self.store.not_followed(f"{op} communicates with other ranks", names) from error

        def received(meta: torch.Tensor) -> torch.Tensor:
            tensor = self.store.blank(meta.shape, meta.dtype, device, meta.stride())
            self.store.lose(tensor, names, f"{op} communicates with other ranks")
            return tensor

        return tree_map_only(torch.Tensor, received, on_meta)


class ValueMode(TorchFunctionMode):
    """Guards the ways from a tensor's memory into Python that are no operations."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READERS:
            if func is torch.Tensor.__deepcopy__:
                return args[0].clone()
            self.store.values(args[0], f"Tensor.{getattr(func, '__name__', 'read')}")
        return func(*args, **(kwargs or {}))


_READERS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
    torch.Tensor.__deepcopy__,
}


@dataclass(frozen=True, slots=True, eq=False)
class _Traits:
    """What an operation's schema says about it."""

    view: bool
    factory: bool
    only_shapes: bool
    collective: bool
    reads_values: bool
    pointwise: bool
    returns_written: bool
    returned: tuple[str, ...]
    positions: tuple[tuple[int, str], ...]

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among the arguments that the operation writes to."""
        found: list[torch.Tensor] = []
        for position, name in self.positions:
            value = args[position] if position < len(args) else kwargs.get(name)
            found += _tensors((value,), {})
        return found


@cache
def _traits(func: Any) -> _Traits:
    arguments, returns, packet = func._schema.arguments, func._schema.returns, func.overloadpacket
    positions = tuple(
        (i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    aliases = [r.alias_info for r in returns]
    collective = func.namespace in _COLLECTIVES
    return _Traits(
        view=(not positions and any(a is not None for a in aliases) and not collective) or packet in _SHARES,
        factory=packet in FACTORIES and not positions,
        only_shapes=packet in ONLY_SHAPES,
        collective=collective,
        reads_values=bool(returns) and not any("Tensor" in str(r.type) for r in returns) and not positions,
        pointwise=torch.Tag.pointwise in func.tags,
        returns_written=bool(positions) and all(a is not None and a.is_write for a in aliases),
        returned=tuple(str(r.type) for r in returns),
        positions=positions,
    )


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value, {})


def _fits(operand: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether ``operand`` can be broadcast to ``result``."""
    aligned = zip(reversed(operand.shape), reversed(result.shape), strict=False)
    return operand.dim() <= result.dim() and all(a in (1, b) for a, b in aligned)


def _on_meta(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation for its shapes."""
    kwargs = tree_map_only(torch.device, lambda _: torch.device("meta"), kwargs)
    return func(*tree_map_only(torch.Tensor, to_meta, args), **tree_map_only(torch.Tensor, to_meta, kwargs))
