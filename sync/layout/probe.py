"""The probe: load numbers that say which element they are through the backend's own loader and read where they land.

An element's id travels as digits, one per pass, in a base that the narrowest dtype on the way holds exactly. Before
each pass the live tensors are filled with a value that is no digit, so what the loader leaves alone is told from data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rlbridge.sync.layout.dtypes import dtype_name, exact_integers, torch_dtype
from rlbridge.sync.layout.elements import Ids, count_ids, first_ids
from rlbridge.sync.layout.live import LiveTensors, fill_poison, owners
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import LayoutError

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_MAX_BASE = 2**24
_CHUNK = 2**22
"""Elements decoded at a time, which bounds the temporary memory."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What one probe found.

    Attributes:
        ids: runtime tensor to element ids, ``[M]``: 0 where nothing or zeros were loaded. What
            is no plain copy of the checkpoint has an arbitrary id.
        first_pass: the live tensors after the first pass, to recognise constants.
    """

    ids: dict[str, Ids]
    first_pass: dict[str, torch.Tensor]


def probe(spec: CheckpointSpec, load_weights: LoadWeights, live_tensors: LiveTensors, names: Iterable[str]) -> Probed:
    """Find where the elements of the checkpoint tensors ``names`` land. Overwrites the live tensors.

    Raises:
        LayoutError: a dtype cannot carry digits.
    """
    base = digit_base(spec, probed_tensors(spec, live_tensors))
    total = count_ids(spec)
    ids: dict[str, torch.Tensor] = {}
    first_pass: dict[str, torch.Tensor] = {}
    scale = 1
    while scale <= total:
        fill_poison(probed_tensors(spec, live_tensors))
        load_weights(_digits(spec, names, scale, base))
        live = probed_tensors(spec, live_tensors)
        for name, tensor in live.items():
            if scale == 1:
                first_pass[name] = tensor.clone()
                ids[name] = torch.zeros(tensor.numel(), dtype=torch.int64)
            _add_digits(tensor, ids[name], scale, base)
        scale *= base
    for found in ids.values():
        found[found > total] = 0
    return Probed({name: found.numpy() for name, found in ids.items()}, first_pass)


def probed_tensors(spec: CheckpointSpec, live_tensors: LiveTensors) -> dict[str, torch.Tensor]:
    """The live tensors that the checkpoint could fill.

    Integer tensors count only if the checkpoint has some: otherwise they are a backend's own tables, which its loader
    may read, so they must not be poisoned. Boolean ones are always left alone.
    """
    integers = any(not torch_dtype(tensor.dtype).is_floating_point for tensor in spec.tensors.values())
    return {
        name: tensor
        for name, tensor in owners(live_tensors()).items()
        if tensor.dtype.is_floating_point or (integers and tensor.dtype is not torch.bool)
    }


def digit_base(spec: CheckpointSpec, live: Mapping[str, torch.Tensor]) -> int:
    """How many digits every dtype on the way can tell apart; a power of two.

    Raises:
        LayoutError: a tensor's dtype cannot; the text names it.
    """
    dtypes = {f"checkpoint tensor {name!r}": torch_dtype(tensor.dtype) for name, tensor in spec.tensors.items()}
    dtypes |= {f"runtime tensor {name!r}": tensor.dtype for name, tensor in live.items()}
    refused = [f"{what}: {dtype_name(dtype)}" for what, dtype in dtypes.items() if exact_integers(dtype) is None]
    if refused:
        raise LayoutError("layout discovery cannot follow tensors of these dtypes:\n  " + "\n  ".join(refused[:20]))
    narrowest = min([_MAX_BASE, *(exact_integers(dtype) or 0 for dtype in dtypes.values())])
    return 1 << (narrowest.bit_length() - 1)


def _digits(spec: CheckpointSpec, names: Iterable[str], scale: int, base: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor filled with one digit of its elements' ids; made when asked for, so that one exists at a time."""
    firsts = first_ids(spec)
    for name in names:
        tensor = spec.tensors[name]
        ids = torch.arange(firsts[name], firsts[name] + math.prod(tensor.shape), dtype=torch.int64)
        digits = ids.bitwise_right_shift_(scale.bit_length() - 1).bitwise_and_(base - 1)
        yield name, digits.to(torch_dtype(tensor.dtype)).reshape(tensor.shape)


def _add_digits(tensor: torch.Tensor, ids: torch.Tensor, scale: int, base: int) -> None:
    """Add one pass's digits to ``ids``; what is no digit adds nothing, and verification tells what it is."""
    flat = tensor.reshape(-1)
    exact = torch.float32 if tensor.element_size() <= 2 else torch.float64
    for at in range(0, flat.numel(), _CHUNK):
        part = slice(at, at + _CHUNK)
        values = flat[part].to("cpu", exact)
        digits = values.to(torch.int64)
        # Poison is none, and neither is NaN, which differs from whatever integer it becomes.
        no_digit = (digits != values) | (digits < 0) | (digits >= base)
        ids[part] += digits.masked_fill_(no_digit, 0).mul_(scale)
