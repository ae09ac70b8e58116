"""Which checkpoint tensors computed elements depend on, by group testing.

Each load flips the values of half of the tensors: those whose index has a given bit set, or not set. Two loads per bit
tell them apart where an element depends on one; where it depends on several, the candidates are flipped one by one.
Every load starts from the same live values, so what moves does so because of the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rlbridge.sync.layout.loading import Loader
from rlbridge.sync.layout.values import RandomBits
from rlbridge.sync.layout.verify import Mask, different_bits

_SAMPLED = 2**20
"""Elements of a group that are followed, evenly spaced. The check of partial reloads then looks at all of them."""

_ONE_BY_ONE = 64
"""Candidates that are flipped one by one; of more, all count as inputs."""


@dataclass(frozen=True)
class Group:
    """Elements of one runtime tensor whose inputs are asked for together; ``places``: ``[n]`` row-major."""

    runtime: str
    places: NDArray[np.int64]


def find_inputs(loader: Loader, groups: Mapping[int, Group], seed: int) -> dict[int, list[str]]:
    """The checkpoint tensors that each of ``groups`` depends on, in the spec's order; none for a backend's own tables.

    May name too many, never knowingly too few. Called on all ranks together. Overwrites the live tensors.
    """
    sampled = {key: Group(g.runtime, g.places[:: max(1, g.places.size // _SAMPLED)]) for key, g in groups.items()}
    inputs: dict[int, set[str]] = {key: set() for key in groups}
    unresolved = {key: np.ones(group.places.size, np.bool_) for key, group in sampled.items()}
    for pair in (seed, seed + 1):
        # A second pair of values for what clamping or rounding kept still in the first.
        if not loader.any_rank(any(mask.any() for mask in unresolved.values())):
            break
        trial = _Trial(loader, sampled, pair)
        steady = {key: ~moved for key, moved in trial.moved(()).items()}
        follows = {key: steady[key] & moved & unresolved[key] for key, moved in trial.moved(None).items()}
        if not loader.any_rank(any(mask.any() for mask in follows.values())):
            continue
        for key, names in _candidates(loader, trial, follows).items():
            inputs[key] |= names
        unresolved = {key: unresolved[key] & steady[key] & ~mask for key, mask in follows.items()}
    return {key: [name for name in loader.spec.tensors if name in names] for key, names in inputs.items()}


class _Trial:
    """Loads that all start from the same live values."""

    def __init__(self, loader: Loader, groups: Mapping[int, Group], seed: int) -> None:
        self._loader, self._groups, self._seed = loader, groups, seed
        concerned = {group.runtime for group in groups.values()}
        self._start = {name: tensor.clone() for name, tensor in loader.live().items() if name in concerned}
        self._base = self._load(())

    def _load(self, flipped: Collection[str] | None) -> dict[int, torch.Tensor]:
        live = self._loader.live()
        for name, values in self._start.items():
            live[name].copy_(values)
        live = self._loader.load(RandomBits(self._loader.spec, self._seed, flipped))
        return {
            key: live[group.runtime].reshape(-1)[torch.from_numpy(group.places)] for key, group in self._groups.items()
        }

    def moved(self, flipped: Collection[str] | None) -> dict[int, Mask]:
        """Which elements change when the checkpoint tensors ``flipped`` (``None``: all) do."""
        return {key: different_bits(values, self._base[key]) for key, values in self._load(flipped).items()}


def _candidates(loader: Loader, trial: _Trial, follows: Mapping[int, Mask]) -> dict[int, set[str]]:
    names = np.array(list(loader.spec.tensors), dtype=object)
    indices = np.arange(len(names))
    patterns = {key: np.zeros(mask.size, np.int64) for key, mask in follows.items()}
    n_bits = max(1, math.ceil(math.log2(max(2, len(names)))))
    for bit in range(n_bits):
        for value in (0, 1):
            for key, moved in trial.moved(set(names[(indices >> bit) & 1 == value])).items():
                patterns[key] |= moved.astype(np.int64) << (2 * bit + value)
    # The bits of a pattern that element moves with if it depends on tensor i.
    own = sum(1 << (2 * bit + ((indices >> bit) & 1)) for bit in range(n_bits))
    own = np.asarray(own, np.int64)
    found: dict[int, set[str]] = {key: set() for key in follows}
    unclear: dict[int, dict[int, set[str]]] = {key: {} for key in follows}
    for key, mask in follows.items():
        for pattern in np.unique(patterns[key][mask]):
            possible = set(names[(own & ~pattern) == 0]) or set(names)
            if len(possible) == 1:
                found[key] |= possible
            else:
                unclear[key][int(pattern)] = possible
    _one_by_one(loader, trial, patterns, unclear, found)
    return found


def _one_by_one(
    loader: Loader,
    trial: _Trial,
    patterns: Mapping[int, NDArray[np.int64]],
    unclear: Mapping[int, dict[int, set[str]]],
    found: dict[int, set[str]],
) -> None:
    """Add to ``found`` which of the candidates in ``unclear`` (group to pattern to names) are inputs."""
    names = loader.on_any_rank({name for its in unclear.values() for possible in its.values() for name in possible})
    if len(names) > _ONE_BY_ONE:
        for key, its in unclear.items():
            found[key] |= {name for possible in its.values() for name in possible}
        return
    seen: set[tuple[int, int]] = set()
    for name in names:
        for key, moved in trial.moved({name}).items():
            for pattern in unclear[key]:
                if moved[patterns[key] == pattern].any():
                    found[key].add(name)
                    seen.add((key, pattern))
    for key, its in unclear.items():
        found[key] |= {name for pattern, possible in its.items() if (key, pattern) not in seen for name in possible}
