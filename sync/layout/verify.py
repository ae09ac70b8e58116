"""The proof of a probe: random values through the same loader must arrive bit for bit where the ids say.

What does not (x + 1, -exp(x), quantisation and its scales) is no copy; it is traced back to checkpoint tensors by name.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.dtypes import bit_view, poison, torch_dtype
from rlbridge.sync.layout.elements import Ids, by_tensor
from rlbridge.sync.layout.live import LiveTensors, fill_poison
from rlbridge.sync.layout.probe import LoadWeights, Probed, probed_tensors
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import LayoutError

_Mask = NDArray[np.bool_]

_TRACED = 4096
"""Elements of each runtime tensor that are traced back when a loader is refused."""


def random_values(spec: CheckpointSpec, name: str, seed: int) -> torch.Tensor:
    """The same random tensor for the same arguments: all bits of sign and mantissa, magnitudes in ``[1/8, 2)``.

    The range keeps the values apart after a cast to a narrower dtype; integers use all their bits.
    """
    tensor, dtype = spec.tensors[name], torch_dtype(spec.tensors[name].dtype)
    # The generator reads 32 bits of its seed, so both numbers must be in them.
    generator = torch.Generator().manual_seed((seed * 1_000_003 + list(spec.tensors).index(name)) % 2**32)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.randint(limits.min, limits.max, tensor.shape, generator=generator, dtype=dtype)
    # Random bits with the exponent field replaced: its two lowest bits stay, and choose among four powers of two.
    bits = bit_view(torch.empty(0, dtype=dtype)).dtype
    limits = torch.iinfo(bits)
    raw = torch.randint(limits.min, limits.max, tensor.shape, generator=generator, dtype=bits)
    mantissa_bits = -round(math.log2(torch.finfo(dtype).eps))
    bias = 1 - round(math.log2(torch.finfo(dtype).tiny))
    sign = limits.min if limits.min < 0 else 1 << (limits.bits - 1)
    exponent = (raw >> mantissa_bits).bitwise_and_(3).add_(bias - 3).bitwise_left_shift_(mantissa_bits)
    return raw.bitwise_and_(sign | ((1 << mantissa_bits) - 1)).bitwise_or_(exponent).view(dtype)


def verify(
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    live_tensors: LiveTensors,
    names: Iterable[str],
    probed: Probed,
    seed: int,
) -> dict[str, Ids]:
    """Load random values for ``names``, compare, and return the ids without what turned out to be constant.

    Overwrites the live tensors.

    Raises:
        LayoutError: some runtime elements are no copies; the text names their tensors and where they come from.
    """
    names = list(names)
    fill_poison(probed_tensors(spec, live_tensors))
    load_weights(_values(names, lambda name: random_values(spec, name, seed)))
    live = probed_tensors(spec, live_tensors)
    cleaned: dict[str, Ids] = {}
    wrong: dict[str, Ids] = {}
    for name, ids in probed.ids.items():
        differs = _differing(spec, ids, live[name], seed)
        constant = _equal_bits(live[name].reshape(-1), probed.first_pass[name].reshape(-1))
        untouched = (live[name].reshape(-1) == poison(live[name].dtype)).cpu().numpy()
        cleaned[name] = np.where(differs, 0, ids)
        places = np.flatnonzero(np.where(ids > 0, differs & ~constant, ~(constant | untouched)))
        if places.size:
            wrong[name] = places
    if wrong:
        sources = _trace(spec, load_weights, live_tensors, names, wrong, seed)
        raise LayoutError(_refusal(wrong, sources, probed))
    return cleaned


def _values(names: Iterable[str], value: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in names:
        yield name, value(name)


def _differing(spec: CheckpointSpec, ids: Ids, live: torch.Tensor, seed: int) -> _Mask:
    """Elements of the checkpoint, by ``ids``, that are not what :func:`random_values` gives after a cast."""
    flat = live.reshape(-1).cpu()
    differs = np.zeros(ids.size, np.bool_)
    for name, elements, places in by_tensor(spec, ids):
        loaded = random_values(spec, name, seed).reshape(-1)[torch.from_numpy(elements)].to(live.dtype)
        differs[places] = ~_equal_bits(loaded, flat[torch.from_numpy(places)])
    return differs


def _equal_bits(a: torch.Tensor, b: torch.Tensor) -> _Mask:
    return (bit_view(a) == bit_view(b)).cpu().numpy()


def _trace(
    spec: CheckpointSpec,
    load_weights: LoadWeights,
    live_tensors: LiveTensors,
    names: list[str],
    wrong: Mapping[str, Ids],
    seed: int,
) -> dict[str, list[str]]:
    """Which checkpoint tensors the elements ``wrong`` depend on, by group testing.

    Each load changes the values of half of the tensors: those whose index has a given bit set, or not set. Two loads
    per bit of the index tell the tensors apart.
    """

    def load(changed: _Mask) -> dict[str, torch.Tensor]:
        seeds = {name: seed + 1 + int(moved) for name, moved in zip(names, changed, strict=True)}
        load_weights(_values(names, lambda name: random_values(spec, name, seeds[name])))
        live = probed_tensors(spec, live_tensors)
        return {
            name: live[name].reshape(-1)[torch.from_numpy(places[:_TRACED])].clone() for name, places in wrong.items()
        }

    before = load(np.zeros(len(names), np.bool_))
    possible = {name: np.ones((len(names), values.numel()), np.bool_) for name, values in before.items()}
    indices = np.arange(len(names))
    for bit in range(max(1, math.ceil(math.log2(max(2, len(names)))))):
        for value in (0, 1):
            changed = (indices >> bit) & 1 == value
            for name, values in load(changed).items():
                unmoved = _equal_bits(values, before[name])
                possible[name] &= ~(changed[:, None] & unmoved[None, :])
    sources: dict[str, list[str]] = defaultdict(list)
    for name, table in possible.items():
        sources[name] = [names[i] for i in np.flatnonzero(table.any(axis=1))]
    return sources


def _refusal(wrong: Mapping[str, Ids], sources: Mapping[str, list[str]], probed: Probed) -> str:
    lines = [
        f"\n  {name}: {places.size} of {probed.ids[name].size} elements, from "
        + (", ".join(sources[name][:8]) or "no single checkpoint tensor")
        for name, places in list(wrong.items())[:20]
    ]
    return (
        f"the loader changes values on the way into {len(wrong)} runtime tensors, so they are no copies of checkpoint "
        "elements:" + "".join(lines) + "\nLoaders that transform values are not supported yet. Discover the layout "
        "before post-processing, or keep these tensors in the checkpoint's form."
    )
