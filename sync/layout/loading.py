"""A backend's loader as discovery uses it: run on made-up values, as often on every rank that shares it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from rlbridge.sync.layout.live import LiveTensors, owners, specs
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError, LoaderFailedError, RlbridgeError

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
Values = Callable[[str], torch.Tensor]
"""Checkpoint tensor to made-up values for it."""
AnyRank = Callable[[bool], bool]
"""True on every rank if it was asked with True on any of them."""


@dataclass(frozen=True)
class Loader:
    """A backend's loader and its live tensors.

    Attributes:
        spec, load_weights, live_tensors: as :func:`~rlbridge.sync.layout.discover.discover` takes them.
        any_rank: decides for all ranks together whether the loader is run again.
        runtime: shape and dtype of every live tensor that owns its elements.
    """

    spec: CheckpointSpec
    load_weights: LoadWeights
    live_tensors: LiveTensors
    any_rank: AnyRank
    runtime: Mapping[str, TensorSpec] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "runtime", specs(self.live()))

    def live(self) -> dict[str, torch.Tensor]:
        """The live tensors, tied ones once."""
        return owners(self.live_tensors())

    def load(self, values: Values, names: Iterable[str] | None = None) -> dict[str, torch.Tensor]:
        """Load ``values`` of all checkpoint tensors, or of ``names``; each is made when the loader asks for it.

        Returns:
            the live tensors afterwards.

        Raises:
            LoaderFailedError: the loader raised; names the checkpoint tensor that it had last taken.
            LayoutError: loading changes which live tensors there are, or their shapes.
        """
        taken: list[str] = []
        try:
            self.load_weights(_Made(self.spec.tensors if names is None else names, values, taken))
        except RlbridgeError:
            raise
        except Exception as error:  # whatever a backend raises
            raise self._failed(taken, error) from error
        live = self.live()
        now = specs(live)
        changed = sorted(name for name in {*self.runtime, *now} if self.runtime.get(name) != now.get(name))
        if changed:
            raise LayoutError(
                "loading changed the shape or dtype of runtime tensors, or which there are: "
                f"{', '.join(changed[:20])}; discover the layout before post-processing"
            )
        return live

    def _failed(self, taken: list[str], error: Exception) -> LoaderFailedError:
        where = "before it took any checkpoint tensor"
        if taken:
            tensor = self.spec.tensors[taken[-1]]
            where = f"when it had taken checkpoint tensor {taken[-1]!r} {list(tensor.shape)} {tensor.dtype}"
        return LoaderFailedError(f"the loader failed {where}: {type(error).__name__}: {error}")

    def on_any_rank(self, names: set[str]) -> list[str]:
        """The checkpoint tensors that are in ``names`` on any rank, in the spec's order, by repeated halving."""
        waiting, found = [list(self.spec.tensors)], []
        while waiting:
            part = waiting.pop()
            if not part or not self.any_rank(not names.isdisjoint(part)):
                continue
            if len(part) == 1:
                found.append(part[0])
            else:
                waiting += [part[len(part) // 2 :], part[: len(part) // 2]]
        return found


class _Made:
    """Pairs of name and values, made when they are asked for; may be gone through as often as a list."""

    def __init__(self, names: Iterable[str], values: Values, taken: list[str]) -> None:
        self._names, self._values, self._taken = list(names), values, taken
        self._once = iter(self)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._names:
            self._taken.append(name)
            yield name, self._values(name)

    def __next__(self) -> tuple[str, torch.Tensor]:
        return next(self._once)
