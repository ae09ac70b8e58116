"""Chains of casts: which ones equal one direct cast, for every value."""

from __future__ import annotations

import math
from functools import cache

import torch

from rlbridge.sync.layout.dtypes import bit_view, dtype_name, torch_dtype

Chain = tuple[str, ...]
"""Dtypes that a value went through, the checkpoint's first. ``"as int16"``: its bits were read as another dtype."""

_AS = "as "


def cast(chain: Chain, dtype: torch.dtype) -> Chain:
    """``chain`` continued by a cast to ``dtype``. What was only a lossless widening on the way drops out."""
    name = dtype_name(dtype)
    if name == chain[-1]:
        return chain
    while len(chain) > 1 and not chain[-1].startswith(_AS) and lossless(_dtype(chain[-2]), chain[-1]):
        chain = chain[:-1]
    return chain if name == _dtype(chain[-1]) else (*chain, name)


def reinterpret(chain: Chain, dtype: torch.dtype) -> Chain:
    """``chain`` whose bits are read as ``dtype``, of the same width."""
    name = dtype_name(dtype)
    if name == _dtype(chain[-1]):
        return chain
    if chain[-1].startswith(_AS):
        chain = chain[:-1]
    return chain if name == _dtype(chain[-1]) else (*chain, _AS + name)


def no_copy(chain: Chain) -> str | None:
    """Why the last value of ``chain`` is not the first one, or that one cast directly; ``None`` if it is."""
    if any(step.startswith(_AS) for step in chain):
        return f"bits of {chain[0]} read {next(step for step in chain if step.startswith(_AS))}"
    return None if len(chain) <= 2 else f"cast through {chain[1]}"


def _dtype(step: str) -> str:
    return step.removeprefix(_AS)


@cache
def lossless(narrow: str, wide: str) -> bool:
    """Whether each value of ``narrow`` is one of ``wide`` as well."""
    a, b = torch_dtype(narrow), torch_dtype(wide)
    if a == b:
        return True
    if a.is_complex or b.is_complex or b is torch.bool or (a.is_floating_point and not b.is_floating_point):
        return False
    if a is torch.bool:
        return True
    if not b.is_floating_point:
        return torch.iinfo(b).min <= torch.iinfo(a).min and torch.iinfo(a).max <= torch.iinfo(b).max
    if a.itemsize <= 2:
        return _survives(a, b)
    if a.is_floating_point:
        return b.itemsize > a.itemsize
    return torch.iinfo(a).bits < 2 - math.log2(torch.finfo(b).eps)


def _survives(a: torch.dtype, b: torch.dtype) -> bool:
    """Send every value of a dtype of one or two bytes there and back."""
    codes = torch.arange(1 << (8 * a.itemsize), dtype=torch.int32)
    values = codes.to(torch.uint8 if a.itemsize == 1 else torch.int16).view(a)
    if a.is_floating_point:
        values = values[~values.to(torch.float64).isnan()]
    back = values.to(b).to(a)
    return bool(torch.equal(bit_view(values), bit_view(back)))
