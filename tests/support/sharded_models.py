"""Real backends of a given parallelism, one rank at a time in one process: what the catalog's layouts must agree with.

The trainer is transformers' model under torch's own tensor parallelism and FSDP2, over a process group that moves
nothing. The rollout is a loader that writes checkpoint tensors into stacked and sliced parameters, as engines do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlbridge.catalog.parallel import TrainerParallel

Weights = Iterable[tuple[str, torch.Tensor]]
EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight")

COLWISE = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj")
ROWWISE = ("o_proj", "down_proj")


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    """Be ``rank`` of ``world`` in a process group whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def named_mesh(sizes: tuple[int, ...], *names: str) -> DeviceMesh:
    """Torch remembers meshes by their names across process groups, and with them whose rank they were made for."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"{name}_of_{dist.get_rank()}" for name in names))


class TrainerRank:
    """The model of ``config`` as the rank sees it that the process group says; ``layers`` are those of its stage."""

    def __init__(self, config: dict[str, Any], parallel: TrainerParallel, layers: range) -> None:
        self.parallel = parallel
        sizes = (parallel.stages, parallel.replicas, parallel.shards, parallel.tensor)
        mesh = named_mesh(sizes, "stage", "replica", "shard", "tensor")
        self.coordinates = dict(zip(("stage", "replica", "shard", "tensor"), mesh.get_coordinate(), strict=True))
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[config["model_type"]](**config), dtype=torch.bfloat16)
        self._keep_stage(model, layers)
        self._cut_experts(model)
        _, replica, shard, tensor = mesh.mesh_dim_names
        self._cut_tensors(model, mesh[tensor])
        data = mesh[replica, shard] if parallel.replicas > 1 else mesh[shard]
        for module in [m for n, m in model.named_modules() if re.fullmatch(r"model\.layers\.\d+", n)]:
            if any(True for _ in module.parameters()):
                fully_shard(module, mesh=data)
        fully_shard(model, mesh=data)
        self.model = model
        self.config = config
        self.pending: dict[str, dict[tuple[int, str], torch.Tensor]] = {}

    def _keep_stage(self, model: Any, layers: range) -> None:
        count = len(model.model.layers)
        for index in set(range(count)) - set(layers):
            model.model.layers[index] = nn.Identity()
        last, tied = layers.stop == count, model.config.tie_word_embeddings
        if layers.start and not (last and tied):
            model.model.embed_tokens = nn.Identity()
        if not last:
            model.model.norm, model.lm_head = nn.Identity(), nn.Identity()

    def _cut_experts(self, model: Any) -> None:
        """Experts of this rank only, or, without expert parallelism, its slice of the inner features of each."""
        p = self.parallel
        rest = p.shards * p.tensor // p.experts
        experts_mesh = named_mesh((p.stages, p.replicas, rest, p.experts), "s", "r", "rest", "expert")
        member = experts_mesh.get_coordinate()[3]
        for module in [m for n, m in model.named_modules() if n.endswith(".mlp.experts")]:
            gate_up, down = module.gate_up_proj.detach(), module.down_proj.detach()
            if p.experts > 1:
                gate_up, down = gate_up.chunk(p.experts)[member], down.chunk(p.experts)[member]
            elif p.tensor > 1:
                rank = self.coordinates["tensor"]
                gate, up = gate_up.chunk(2, 1)
                gate_up = torch.cat([gate.chunk(p.tensor, 1)[rank], up.chunk(p.tensor, 1)[rank]], 1)
                down = down.chunk(p.tensor, 2)[rank]
            module.gate_up_proj, module.down_proj = nn.Parameter(gate_up.clone()), nn.Parameter(down.clone())
            if p.experts > 1:
                fully_shard(module, mesh=experts_mesh[experts_mesh.mesh_dim_names[2]])

    def _cut_tensors(self, model: Any, mesh: DeviceMesh) -> None:
        if mesh.size() == 1:
            return
        plan: dict[str, Any] = {}
        for name, module in model.named_modules():
            last = name.rpartition(".")[2]
            if isinstance(module, nn.Linear) and (last in COLWISE or last == "lm_head"):
                plan[name] = ColwiseParallel()
            elif isinstance(module, nn.Linear) and last in ROWWISE:
                plan[name] = RowwiseParallel()
            elif isinstance(module, nn.Embedding):
                plan[name] = RowwiseParallel(input_layouts=Replicate())
        parallelize_module(model, mesh, plan)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        state = self.model.state_dict(keep_vars=True)
        return {name: local(tensor) for name, tensor in state.items() if local(tensor).numel()}

    def load_weights(self, weights: Weights) -> None:
        state = self.model.state_dict(keep_vars=True)
        for name, tensor in weights:
            expert = EXPERT.fullmatch(name)
            if expert:
                self._expert(state, expert[1], int(expert[2]), expert[3], tensor)
            elif name in state:
                copy(state[name], tensor)

    def _expert(self, state: Any, path: str, expert: int, kind: str, tensor: torch.Tensor) -> None:
        if f"{path}.gate_up_proj" not in state:
            return
        parts = self.pending.setdefault(path, {})
        parts[expert, kind] = tensor
        count = self.config.get("num_experts") or self.config["n_routed_experts"]
        if len(parts) < 3 * count:
            return
        p, own = self.parallel, range(count)
        if p.experts > 1:
            member = (self.coordinates["shard"] * p.tensor + self.coordinates["tensor"]) % p.experts
            own = list(torch.arange(count).chunk(p.experts)[member].tolist())
        stacks = {k: torch.stack([parts[e, k] for e in own]) for k in ("gate", "up", "down")}
        if p.experts == 1:
            axes = {"gate": 1, "up": 1, "down": 2}
            stacks = {k: s.chunk(p.tensor, axes[k])[self.coordinates["tensor"]] for k, s in stacks.items()}
        copy(state[f"{path}.gate_up_proj"], torch.cat([stacks["gate"], stacks["up"]], 1))
        copy(state[f"{path}.down_proj"], stacks["down"])
        del self.pending[path]


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor.detach()


def copy(parameter: torch.Tensor, tensor: torch.Tensor) -> None:
    """Torch itself says which part of ``tensor`` is this rank's."""
    if isinstance(parameter, DTensor):
        mesh, whole = parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim
        tensor = DTensor.from_local(tensor, mesh, whole).redistribute(mesh, parameter.placements).to_local()
    local(parameter).copy_(tensor)


class RolloutRank:
    """Parameters of one engine rank and a loader that fills them slice by slice, in vLLM's shapes."""

    def __init__(self, config: dict[str, Any], spec: Any, ranks: int, rank: int, experts: int = 0) -> None:
        self.c, self.ranks, self.rank = config, ranks, rank % ranks
        self.groups = experts or 1
        self.slices = max(1, ranks // self.groups)
        self.group, self.part = divmod(rank, self.slices) if experts else (0, self.rank)
        self.live: dict[str, torch.Tensor] = {}
        for name, tensor in spec.tensors.items():
            runtime, shape = self._home(name, tensor.shape)
            if runtime is not None:
                self.live.setdefault(runtime, torch.zeros(shape, dtype=getattr(torch, tensor.dtype)))

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return self.live

    def _home(self, name: str, shape: tuple[int, ...]) -> tuple[str | None, tuple[int, ...]]:
        """Runtime tensor that a checkpoint tensor belongs into, and the shape of that one."""
        expert = EXPERT.fullmatch(name)
        if expert:
            count = (self.c.get("num_experts") or self.c["n_routed_experts"]) // self.groups
            width, hidden = self.c["moe_intermediate_size"] // self.slices, self.c["hidden_size"]
            if expert[3] == "down":
                return f"{expert[1]}.routed_experts.w2_weight", (count, hidden, width)
            return f"{expert[1]}.routed_experts.w13_weight", (count, 2 * width, hidden)
        module = name.split(".")[-2]
        if module in ("q_proj", "k_proj", "v_proj") and "kv_lora_rank" not in self.c:
            rows = self._heads() + 2 * self._kv_heads()
            return name.replace(module, "qkv_proj"), (rows * self._head_dim(), *shape[1:])
        if module in ("gate_proj", "up_proj"):
            return name.replace(module, "gate_up_proj"), (2 * shape[0] // self.ranks, *shape[1:])
        if module in ("q_a_proj", "kv_a_proj_with_mqa") and self.c.get("q_lora_rank"):
            rows = self.c["q_lora_rank"] + self.c["kv_lora_rank"] + self.c["qk_rope_head_dim"]
            return name.replace(module, "fused_qkv_a_proj"), (rows, *shape[1:])
        if module in ("embed_tokens", "lm_head"):
            return name, ((shape[0] + 63) // 64 * 64 // self.ranks, shape[1])
        if module in COLWISE:
            return name, (shape[0] // self.ranks, *shape[1:])
        if module in ROWWISE and len(shape) > 1:
            return name, (shape[0], shape[1] // self.ranks)
        return name, shape

    def _heads(self) -> int:
        return self.c["num_attention_heads"] // self.ranks

    def _kv_heads(self) -> int:
        return max(1, self.c["num_key_value_heads"] // self.ranks)

    def _head_dim(self) -> int:
        return self.c.get("head_dim") or self.c["hidden_size"] // self.c["num_attention_heads"]

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            runtime, _ = self._home(name, tuple(tensor.shape))
            self._write(name, self.live[runtime], tensor)

    def _write(self, name: str, target: torch.Tensor, tensor: torch.Tensor) -> None:
        expert = EXPERT.fullmatch(name)
        if expert:
            self._write_expert(target, int(expert[2]), expert[3], tensor)
            return
        module = name.split(".")[-2]
        if module in ("q_proj", "k_proj", "v_proj") and "kv_lora_rank" not in self.c:
            query, key = self._heads() * self._head_dim(), self._kv_heads() * self._head_dim()
            where = {"q_proj": (0, query), "k_proj": (query, key), "v_proj": (query + key, key)}[module]
            copies = 1 if module == "q_proj" else max(1, self.ranks // self.c["num_key_value_heads"])
            target.narrow(0, *where).copy_(tensor.narrow(0, self.rank // copies * where[1], where[1]))
        elif module in ("gate_proj", "up_proj"):
            target.chunk(2)[module == "up_proj"].copy_(tensor.chunk(self.ranks)[self.rank])
        elif module in ("q_a_proj", "kv_a_proj_with_mqa") and self.c.get("q_lora_rank"):
            first = 0 if module == "q_a_proj" else self.c["q_lora_rank"]
            target.narrow(0, first, tensor.shape[0]).copy_(tensor)
        elif module in ("embed_tokens", "lm_head"):
            rows = tensor[self.rank * target.shape[0] : (self.rank + 1) * target.shape[0]]
            target[: rows.shape[0]].copy_(rows)
        elif module in COLWISE:
            target.copy_(tensor.chunk(self.ranks)[self.rank])
        elif module in ROWWISE and tensor.dim() > 1:
            target.copy_(tensor.chunk(self.ranks, 1)[self.rank])
        else:
            target.copy_(tensor)

    def _write_expert(self, target: torch.Tensor, expert: int, kind: str, tensor: torch.Tensor) -> None:
        index = expert - self.group * target.shape[0]
        if not 0 <= index < target.shape[0]:
            return
        if kind == "down":
            target[index].copy_(tensor.chunk(self.slices, 1)[self.part])
        else:
            target[index].chunk(2)[kind == "up"].copy_(tensor.chunk(self.slices)[self.part])
