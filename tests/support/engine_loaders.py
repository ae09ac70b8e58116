"""Loaders written as trainers and engines write them: one decoder layer with experts, on any rank of any count.

Notation: H hidden, Q query heads, KV key/value heads, D head size, M MLP size, E experts, F expert size, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

Weights = Iterable[tuple[str, torch.Tensor]]

H, Q, D, M, E, F, V = 16, 8, 4, 24, 4, 12, 50
PADDED_V = 64
EXPERT = re.compile(r"experts\.(\d+)\.(gate|up|down)")


def checkpoint_spec(kv: int) -> CheckpointSpec:
    """Tensors as Hugging Face names and shapes them, with ``kv`` key/value heads."""
    shapes = {"embed": (V, H), "norm": (H,), "q": (Q * D, H), "k": (kv * D, H), "v": (kv * D, H), "o": (H, Q * D)}
    shapes |= {"gate": (M, H), "up": (M, H), "down": (H, M), "router": (E, H), "head": (V, H)}
    for expert in range(E):
        shapes |= {f"experts.{expert}.{kind}": (F, H) for kind in ("gate", "up")}
        shapes[f"experts.{expert}.down"] = (H, F)
    return CheckpointSpec({name: TensorSpec(shape, "bfloat16") for name, shape in shapes.items()})


@dataclass(frozen=True)
class Place:
    """A rank, and how its experts are split: over ``expert_ranks``, each expert over the rest."""

    rank: int
    ranks: int
    kv: int

    @property
    def expert_ranks(self) -> int:
        return min(2, self.ranks)

    @property
    def expert_rank(self) -> int:
        return self.rank % self.expert_ranks

    @property
    def cut(self) -> tuple[int, int]:
        """Which part of an expert, of how many."""
        return self.rank // self.expert_ranks, self.ranks // self.expert_ranks

    @property
    def kv_heads(self) -> int:
        """Key/value heads here; the same head is on several ranks if there are fewer heads than ranks."""
        return max(1, self.kv // self.ranks)

    @property
    def first_kv_head(self) -> int:
        return self.rank * self.kv // self.ranks


def copy_part(target: torch.Tensor, loaded: torch.Tensor, dim: int, part: int, parts: int) -> None:
    size = loaded.shape[dim] // parts
    target.data.copy_(loaded.narrow(dim, part * size, size))


def copy_vocabulary(target: torch.Tensor, loaded: torch.Tensor, rank: int) -> None:
    """Own rows of a vocabulary that is padded with zero rows."""
    first = rank * target.shape[0]
    rows = max(0, min(target.shape[0], loaded.shape[0] - first))
    target.data[:rows].copy_(loaded[first : first + rows])
    target.data[rows:].fill_(0)


class RowShards:
    """A trainer with FSDP2: each rank has its rows of every tensor, unevenly if they do not divide."""

    def __init__(self, place: Place) -> None:
        self._place = place
        spec = checkpoint_spec(place.kv)
        self.live = {name: self._rows(torch.zeros(tensor.shape)).clone() for name, tensor in spec.tensors.items()}
        self.live = {name: tensor for name, tensor in self.live.items() if tensor.numel()}

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.chunk(self._place.ranks)
        return parts[self._place.rank] if self._place.rank < len(parts) else tensor[:0]

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            if name in self.live:
                self.live[name].copy_(self._rows(tensor))


class Megatron:
    """A trainer with tensor parallelism as Megatron has it: query, key and value interleaved by group of heads."""

    def __init__(self, place: Place) -> None:
        self._place = p = place
        self._queries = Q // p.ranks // p.kv_heads
        _, parts = p.cut
        self.live = {
            "embedding": torch.zeros(PADDED_V // p.ranks, H),
            "output_layer": torch.zeros(PADDED_V // p.ranks, H),
            "norm": torch.zeros(H),
            "linear_qkv": torch.zeros(p.kv_heads * (self._queries + 2) * D, H),
            "linear_proj": torch.zeros(H, Q * D // p.ranks),
            "linear_fc1": torch.zeros(2 * M // p.ranks, H),
            "linear_fc2": torch.zeros(H, M // p.ranks),
            "router": torch.zeros(E, H),
            "experts_fc1": torch.zeros(E // p.expert_ranks, H, 2 * F // parts),
            "experts_fc2": torch.zeros(E // p.expert_ranks, F // parts, H),
        }

    def load_weights(self, weights: Weights) -> None:
        p, live = self._place, self.live
        collected: dict[str, torch.Tensor] = {}  # query, key and value are merged when all three are there
        for name, tensor in weights:
            if name in ("embed", "head"):
                copy_vocabulary(live["embedding" if name == "embed" else "output_layer"], tensor, p.rank)
            elif name in ("norm", "router"):
                live[name].copy_(tensor)
            elif name in ("q", "k", "v"):
                collected[name] = tensor
                if len(collected) == 3:
                    live["linear_qkv"].copy_(self._interleaved(collected))
            elif name in ("gate", "up"):
                copy_part(live["linear_fc1"].chunk(2)[name == "up"], tensor, 0, p.rank, p.ranks)
            elif name in ("o", "down"):
                copy_part(live["linear_proj" if name == "o" else "linear_fc2"], tensor, 1, p.rank, p.ranks)
            elif match := EXPERT.fullmatch(name):
                self._load_expert(int(match[1]), match[2], tensor)

    def _interleaved(self, qkv: dict[str, torch.Tensor]) -> torch.Tensor:
        p = self._place
        heads = p.kv_heads * self._queries
        query = qkv["q"].view(Q, D, H)[p.rank * heads : (p.rank + 1) * heads].view(p.kv_heads, -1, H)
        key, value = (qkv[n].view(p.kv, D, H)[p.first_kv_head : p.first_kv_head + p.kv_heads] for n in "kv")
        return torch.cat([query, key, value], dim=1).reshape(-1, H)

    def _load_expert(self, expert: int, kind: str, tensor: torch.Tensor) -> None:
        p = self._place
        owner, slot = divmod(expert, E // p.expert_ranks)
        if owner != p.expert_rank:
            return
        if kind == "down":
            copy_part(self.live["experts_fc2"][slot], tensor.T, 0, *p.cut)
        else:
            copy_part(self.live["experts_fc1"][slot].chunk(2, dim=1)[kind == "up"], tensor.T, 1, *p.cut)


class Vllm:
    """An engine with fused weights, stacked experts and a padded vocabulary; loads tensor by tensor, in place."""

    def __init__(self, place: Place) -> None:
        self._place = p = place
        _, parts = p.cut
        sizes = {
            "embed_tokens": (PADDED_V // p.ranks, H),
            "lm_head": (PADDED_V // p.ranks, H),
            "norm": (H,),
            "qkv_proj": ((Q // p.ranks + 2 * p.kv_heads) * D, H),
            "o_proj": (H, Q * D // p.ranks),
            "gate_up_proj": (2 * M // p.ranks, H),
            "down_proj": (H, M // p.ranks),
            "router": (E, H),
            "w13_weight": (E // p.expert_ranks, 2 * F // parts, H),
            "w2_weight": (E // p.expert_ranks, H, F // parts),
        }
        self.live = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}

    def load_weights(self, weights: Weights) -> None:
        p, live = self._place, self.live
        for name, tensor in weights:
            if name in ("embed", "head"):
                copy_vocabulary(live["embed_tokens" if name == "embed" else "lm_head"], tensor, p.rank)
            elif name in ("norm", "router"):
                live[name].data.copy_(tensor)
            elif name == "q":
                copy_part(live["qkv_proj"][: Q // p.ranks * D], tensor, 0, p.rank, p.ranks)
            elif name in ("k", "v"):
                first = Q // p.ranks + (p.kv_heads if name == "v" else 0)
                target = live["qkv_proj"].narrow(0, first * D, p.kv_heads * D)
                target.copy_(tensor.narrow(0, p.first_kv_head * D, p.kv_heads * D))
            elif name in ("gate", "up"):
                copy_part(live["gate_up_proj"].chunk(2)[name == "up"], tensor, 0, p.rank, p.ranks)
            elif name in ("o", "down"):
                copy_part(live["o_proj" if name == "o" else "down_proj"], tensor, 1, p.rank, p.ranks)
            elif match := EXPERT.fullmatch(name):
                self._load_expert(int(match[1]), match[2], tensor)

    def _load_expert(self, expert: int, kind: str, tensor: torch.Tensor) -> None:
        p = self._place
        owner, slot = divmod(expert, E // p.expert_ranks)
        if owner != p.expert_rank:
            return
        if kind == "down":
            copy_part(self.live["w2_weight"][slot], tensor, 1, *p.cut)
        else:
            copy_part(self.live["w13_weight"][slot].chunk(2)[kind == "up"], tensor, 0, *p.cut)
