"""What a benchmark moves: synthetic layouts, and values that tell every element apart from its neighbours. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import ConfigError

COLUMNS = 2048
_DTYPE, _ITEM_BYTES = "bfloat16", 2
_MATRIX_BYTES = 8_000_000
_ROW_FACTOR, _COLUMN_FACTOR, _VERSION_FACTOR = 31_337, 7, 12_289


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model and the hosts that it moves between.

    The trainer shards every tensor by rows over all of its workers. Every rollout host is a replica, its workers
    tensor parallel: even matrices are cut by rows, odd ones by columns, vectors are held whole.

    Attributes:
        trainers, rollouts: hosts of each side.
        workers_per_host: on every host.
        model_bytes: about how large the model is.
    """

    trainers: int
    rollouts: int
    workers_per_host: int
    model_bytes: int

    def __post_init__(self) -> None:
        for name in ("trainers", "rollouts", "workers_per_host"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a benchmark needs at least one of {name}, not {getattr(self, name)}")
        if self.workers_per_host > 64 or COLUMNS % self.workers_per_host:
            raise ConfigError(f"workers per host must be a power of two up to 64, not {self.workers_per_host}")
        if self._rows < 1:
            raise ConfigError(f"a model of {self.model_bytes} bytes is too small for {self.shards} trainer shards")

    @property
    def shards(self) -> int:
        """Trainer workers."""
        return self.trainers * self.workers_per_host

    @property
    def _matrices(self) -> int:
        return max(2, round(self.model_bytes / _MATRIX_BYTES))

    @property
    def _rows(self) -> int:
        """Of a matrix; whole rows for every shard on both sides."""
        unit = self.shards * self.workers_per_host
        return self.model_bytes // (self._matrices * COLUMNS * _ITEM_BYTES) // unit * unit

    def spec(self) -> CheckpointSpec:
        """The model's tensors: matrices ``[rows, COLUMNS]`` with a vector ``[rows]`` each, in bfloat16."""
        tensors = {}
        for i in range(self._matrices):
            tensors[f"layers.{i:03}.weight"] = TensorSpec((self._rows, COLUMNS), _DTYPE)
            tensors[f"layers.{i:03}.scale"] = TensorSpec((self._rows,), _DTYPE)
        return CheckpointSpec(tensors)

    def senders(self) -> dict[str, SourceMap]:
        """Worker to layout, host by host."""
        names = [name for host in range(self.trainers) for name in self.workers_of(host)]
        return {name: _layout(self._by_rows(rank, self.shards)) for rank, name in enumerate(names)}

    def receivers(self) -> dict[str, SourceMap]:
        """Worker to layout, host by host."""
        hosts = range(self.trainers, self.hosts)
        return {
            name: _layout(self._parallel(rank)) for host in hosts for rank, name in enumerate(self.workers_of(host))
        }

    @property
    def hosts(self) -> int:
        """All of them: trainers first."""
        return self.trainers + self.rollouts

    def workers_of(self, host: int) -> list[str]:
        """Names of the workers on ``host``."""
        side = f"trainer{host}" if host < self.trainers else f"rollout{host - self.trainers}"
        return [f"{side}-{rank}" for rank in range(self.workers_per_host)]

    def nodes(self) -> dict[str, int]:
        """Worker to host."""
        return {name: host for host in range(self.hosts) for name in self.workers_of(host)}

    def _by_rows(self, rank: int, ranks: int) -> Iterator[Box]:
        rows = self._rows // ranks
        for name, tensor in self.spec().tensors.items():
            yield _cut(name, (rank * rows, *(0 for _ in tensor.shape[1:])), (rows, *tensor.shape[1:]))

    def _parallel(self, rank: int) -> Iterator[Box]:
        ranks = self.workers_per_host
        rows, columns = self._rows // ranks, COLUMNS // ranks
        for i, (name, tensor) in enumerate(self.spec().tensors.items()):
            if len(tensor.shape) == 1:
                yield _cut(name, (0,), tensor.shape)
            elif i // 2 % 2 == 0:
                yield _cut(name, (rank * rows, 0), (rows, COLUMNS))
            else:
                yield _cut(name, (0, rank * columns), (self._rows, columns))


def _cut(tensor: str, start: tuple[int, ...], count: tuple[int, ...]) -> Box:
    strides = (1,) if len(count) == 1 else (count[1], 1)
    return Box(tensor, tensor, start, count, (1,) * len(count), 0, strides)


def _layout(boxes: Iterator[Box]) -> SourceMap:
    found = list(boxes)
    return SourceMap({box.runtime: TensorSpec(box.count, _DTYPE) for box in found}, found)


def empty_tensors(layout: SourceMap) -> dict[str, torch.Tensor]:
    """The runtime tensors of ``layout``, zeroed."""
    return {name: torch.zeros(it.shape, dtype=getattr(torch, it.dtype)) for name, it in layout.runtime.items()}


def fill(layout: SourceMap, tensors: dict[str, torch.Tensor], version: int) -> None:
    """Write the values of ``version``: any worker writes the same to the same checkpoint element."""
    for box in layout.boxes:
        _view(tensors[box.runtime], box).copy_(_values(box, version))


def wrong_elements(layout: SourceMap, tensors: dict[str, torch.Tensor], version: int) -> int:
    """How many elements differ from those of ``version``."""
    return sum(int((_view(tensors[box.runtime], box) != _values(box, version)).sum()) for box in layout.boxes)


def _view(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The box as bit patterns: some of them are no numbers, which compare unequal to themselves."""
    return tensor.view(torch.int16).as_strided(box.count, box.strides, box.offset)


def _values(box: Box, version: int) -> torch.Tensor:
    total = torch.tensor(zlib.crc32(box.tensor.encode()) % 65_521 + version * _VERSION_FACTOR)
    factors = (_ROW_FACTOR, _COLUMN_FACTOR)
    for d, (start, count) in enumerate(zip(box.start, box.count, strict=True)):
        total = total.unsqueeze(-1) + torch.arange(start, start + count) * factors[d]
    return (total % 65_521 - 32_760).to(torch.int16)
