"""Trace one rank of a sharded model without weights, and print what it costs: ``python docs/tools/trace_scale.py``.

The loader is written as inference engines write theirs: fused gate and up projections, experts stacked in two tensors,
of which a rank holds some, each sliced over the tensor-parallel ranks, rows of a padded vocabulary.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from rlbridge.catalog.models import shape_of, spec_of
from rlbridge.catalog.shape import ModelShape
from rlbridge.sync.layout.dtypes import torch_dtype
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.layout.trace import trace_layout

FUSED = {
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj", 1),
}
BY_ROWS = {"q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head"}
BY_COLUMNS = {"o_proj", "down_proj"}


@dataclass
class Rank:
    """One rank of an engine: its tensors and its loader.

    Attributes:
        shape: of the model.
        spec: its checkpoint.
        tensor, tensor_rank: tensor-parallel ranks, and which one this is.
        experts, experts_rank: expert-parallel ranks, and which one this is.
        slices: 1, or ``tensor`` if each expert is sliced over the tensor-parallel ranks.
        device: of the live tensors.
        dtype: of the live tensors; ``None``: the checkpoint's.
    """

    shape: ModelShape
    spec: CheckpointSpec
    tensor: int
    tensor_rank: int
    experts: int
    experts_rank: int
    slices: int = 1
    device: str = "meta"
    dtype: torch.dtype | None = None
    live: dict[str, torch.Tensor] = field(init=False)
    expert_map: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.shape.moe is not None
        own = self.shape.moe.experts // self.experts
        self.expert_map = {own * self.experts_rank + local: local for local in range(own)}
        self.live = {}
        for name, tensor in self.spec.tensors.items():
            self._make(name, tensor.shape, self.dtype or torch_dtype(tensor.dtype))

    def _make(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Room for a checkpoint tensor; a fused one grows by each of its parts."""
        expert = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if expert:
            prefix, number, part = expert.groups()
            if int(number) == 0:
                self._make_experts(prefix, part, shape, dtype)
            return
        part, room = name.split(".")[-2], list(shape)
        if part in BY_ROWS:
            room[0] = self._padded(part, shape[0]) // self.tensor
        elif part in BY_COLUMNS:
            room[1] //= self.tensor
        if part in FUSED:
            name = name.replace(part, FUSED[part][0])
            room[0] += self.live[name].shape[0] if name in self.live else 0
        self.live[name] = torch.zeros(room, dtype=dtype, device=self.device)

    def _make_experts(self, prefix: str, part: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        local = len(self.expert_map)
        if part == "gate_proj":
            room, name = (local, 2 * shape[0] // self.slices, shape[1]), f"{prefix}.w13_weight"
        elif part == "down_proj":
            room, name = (local, shape[0], shape[1] // self.slices), f"{prefix}.w2_weight"
        else:
            return
        self.live[name] = torch.zeros(room, dtype=dtype, device=self.device)

    @staticmethod
    def _padded(part: str, rows: int) -> int:
        return -(-rows // 64) * 64 if part in ("embed_tokens", "lm_head") else rows

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """As the engine lists them."""
        return self.live

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The engine's loader."""
        for name, weight in weights:
            if ".experts." in name:
                self._load_expert(name, weight)
            else:
                self._load(name, weight)

    def _load(self, name: str, weight: torch.Tensor) -> None:
        part = name.split(".")[-2]
        if part in BY_COLUMNS:
            weight = weight.chunk(self.tensor, dim=1)[self.tensor_rank]
        elif part in ("embed_tokens", "lm_head"):
            rows = self.live[name].shape[0]
            first = rows * self.tensor_rank
            count = max(0, min(rows, weight.shape[0] - first))
            self.live[name][:count].copy_(weight[first : first + count])
            self.live[name][count:].fill_(0)
            return
        elif part in BY_ROWS:
            rows = weight.shape[0] // self.tensor
            weight = weight.narrow(0, rows * self.tensor_rank, rows)
        if part in FUSED:
            fused, index = FUSED[part]
            param = self.live[name.replace(part, fused)]
            first = 0 if index == 0 else param.shape[0] - weight.shape[0]
            param.data.narrow(0, first, weight.shape[0]).copy_(weight)
        else:
            self.live[name].data.copy_(weight)

    def _load_expert(self, name: str, weight: torch.Tensor) -> None:
        prefix, rest = name.split(".experts.")
        number, part, _ = rest.split(".")
        local = self.expert_map.get(int(number))
        if local is None:
            return
        stacked = self.live[f"{prefix}.experts.{'w2' if part == 'down_proj' else 'w13'}_weight"]
        index = self.tensor_rank % self.slices
        if part == "down_proj":
            width = stacked.shape[2]
            stacked[local].copy_(weight.narrow(1, index * width, width))
        else:
            width = stacked.shape[1] // 2
            half = stacked[local].narrow(0, width if part == "up_proj" else 0, width)
            half.copy_(weight.narrow(0, index * width, width))


def main() -> None:
    """Trace and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kimi-k2", help="a model of the catalogue with experts")
    parser.add_argument("--tensor", type=int, default=8, help="tensor-parallel ranks")
    parser.add_argument("--experts", type=int, default=64, help="expert-parallel ranks")
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = spec_of(args.model)
    rank = Rank(
        shape_of(args.model),
        spec,
        args.tensor,
        args.tensor - 1,
        args.experts,
        args.experts // 2,
        slices=args.tensor,
    )
    began, cpu = time.perf_counter(), time.process_time()
    layout = trace_layout(spec, rank.load_weights, rank.live_tensors)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    elements = sum(torch.Size(tensor.shape).numel() for tensor in spec.tensors.values())
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.stdout.write(
        f"{args.model}: {len(spec.tensors)} checkpoint tensors, {elements / 1e12:.3f} T parameters; one rank of "
        f"{args.experts} x {args.tensor}: {len(rank.live)} runtime tensors\n"
        f"trace {seconds:.2f} s ({cpu_seconds:.2f} s of CPU), peak RSS {peak_kib / 2**20:.2f} GiB, "
        f"{len(layout.boxes)} boxes, {len(msgspec.msgpack.encode(layout)) / 1e6:.2f} MB serialised\n"
    )


if __name__ == "__main__":
    main()
