"""The catalog's layouts are those that discovery finds in real backends of the same parallelism."""

from __future__ import annotations

import math
from typing import Any

import pytest
from sharded_models import RolloutRank, TrainerRank, rank_of

from rlbridge.catalog.layouts import Placed, rollout_layouts, trainer_layouts
from rlbridge.catalog.models import MODELS, shape_of
from rlbridge.catalog.parallel import rollout_parallel, trainer_parallel
from rlbridge.catalog.shape import shape_of_config
from rlbridge.catalog.tensors import checkpoint_spec
from rlbridge.sync.correspondence import correspond
from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.transport.errors import ConfigError

DECODER: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "head_dim": 4,
    "dtype": "bfloat16",
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
TINY: dict[str, dict[str, Any]] = {
    "dense": DECODER | {"model_type": "qwen3"},
    "small-vocabulary": DECODER | {"model_type": "llama", "vocab_size": 70},
    "biased": DECODER | {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "tied": DECODER | {"model_type": "qwen2", "tie_word_embeddings": True},
    "moe": DECODER
    | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "latent": DECODER | LATENT | {"model_type": "deepseek_v3"},
    "plain-query": DECODER | LATENT | {"model_type": "deepseek_v3", "q_lora_rank": None, "attention_bias": True},
}


def same(found: SourceMap, expected: SourceMap) -> None:
    assert found.runtime == expected.runtime
    assert len(found.boxes) == len(expected.boxes)
    assert set(found.boxes) == set(expected.boxes)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dense", "fsdp1"),
        ("dense", "fsdp4"),
        ("biased", "fsdp2.tp2"),
        ("tied", "hsdp2x3"),
        ("tied", "pp2.fsdp2"),
        ("moe", "fsdp3"),
        ("moe", "fsdp2.tp2"),
        ("moe", "pp2.fsdp4.ep2"),
        ("latent", "fsdp2.tp2.ep4"),
        ("latent", "pp3.fsdp2.tp2"),
        ("plain-query", "fsdp7"),
    ],
)
def test_trainers_are_as_torch_shards_them(model: str, name: str) -> None:
    config, parallel = TINY[model], trainer_parallel(name)
    spec = checkpoint_spec(config)
    placed = trainer_layouts(shape_of_config(config), name, gpus_per_node=2)
    assert len(placed) == parallel.ranks
    bounds = [0, 3] if parallel.stages == 1 else [0, 2, 3] if parallel.stages == 2 else [0, 1, 2, 3]
    for index, worker in enumerate(placed):
        stage = index * parallel.stages // parallel.ranks
        with rank_of(parallel.ranks, index):
            backend = TrainerRank(config, parallel, range(bounds[stage], bounds[stage + 1]))
            same(discover(spec, backend.load_weights, backend.live_tensors), worker.layout)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("dense", "tp1"),
        ("dense", "tp4"),
        ("small-vocabulary", "tp4"),
        ("biased", "tp2x2"),
        ("tied", "tp2"),
        ("moe", "tp4"),
        ("moe", "tp2.ep4"),
        ("moe", "tp4.ep2"),
        ("latent", "ep8.tp2"),
        ("latent", "tp2"),
        ("plain-query", "tp2.ep2x2"),
    ],
)
def test_rollouts_are_as_an_engine_loads_them(model: str, name: str) -> None:
    config, parallel = TINY[model], rollout_parallel(name)
    spec = checkpoint_spec(config)
    placed = rollout_layouts(shape_of_config(config), name, gpus_per_node=2)
    for worker, rank in zip(placed, range(parallel.ranks), strict=False):
        backend = RolloutRank(config, spec, parallel.tensor, rank, parallel.experts)
        same(discover(spec, backend.load_weights, backend.live_tensors), worker.layout)


@pytest.mark.parametrize("model", [name for name in TINY if name != "small-vocabulary"])
@pytest.mark.parametrize("trainer", ["fsdp3", "pp2.hsdp2x2.tp2", "pp3.fsdp4"])
@pytest.mark.parametrize("rollout", ["tp4x2", "pp2.tp2", "tp1x3"])
def test_every_trainer_serves_every_rollout(model: str, trainer: str, rollout: str) -> None:
    shape, spec = shape_of_config(TINY[model]), checkpoint_spec(TINY[model])
    senders = {p.worker: p.layout for p in trainer_layouts(shape, trainer, 8)}
    receivers = {p.worker: p.layout for p in rollout_layouts(shape, rollout, 8)}
    atoms = correspond(spec, senders, receivers).atoms()
    assert sum(math.prod(atom.area.count) for atom in atoms) == elements(spec)


def elements(spec: Any) -> int:
    return sum(math.prod(tensor.shape) for tensor in spec.tensors.values())


def test_kimi_k2_on_a_cluster_is_held_once_and_needed_once() -> None:
    shape, spec = shape_of("kimi-k2"), checkpoint_spec(MODELS["kimi-k2"])
    trainers = trainer_layouts(shape, "pp8.fsdp32.ep32", 8)
    rollouts = rollout_layouts(shape, "tp8.ep64x4", 8, first_node=32)
    assert [len(side) for side in (trainers, rollouts)] == [256, 256]
    copies_of_buffers = 31 * 60 * 384
    assert held(trainers) == elements(spec) + copies_of_buffers
    assert {p.node for p in trainers} == set(range(32))
    assert {p.node for p in rollouts} == set(range(32, 64))
    assert all(p.layout is rollouts[i % 64].layout for i, p in enumerate(rollouts))
    experts = {b.tensor for p in rollouts[:64] for b in p.layout.boxes if ".experts." in b.tensor}
    assert len(experts) == 60 * 384 * 3


def held(placed: list[Placed]) -> int:
    maps = {id(p.layout): p.layout for p in placed}
    return sum(math.prod(box.count) for layout in maps.values() for box in layout.boxes)


def test_replicas_of_a_shard_share_a_layout() -> None:
    placed = trainer_layouts(shape_of("qwen3-0.6b"), "pp2.hsdp2x4.tp2", 8)
    assert len({id(p.layout) for p in placed}) == len(placed) // 2
    assert placed[0].layout is placed[8].layout is not placed[16].layout


@pytest.mark.parametrize(
    ("model", "trainer", "message"),
    [
        ("qwen3-8b", "fsdp8.ep8", "no experts"),
        ("qwen3-30b-a3b", "fsdp8.tp8", "key-value heads"),
        ("qwen3-30b-a3b", "fsdp6.ep6", "128 experts cannot be divided by 6"),
        ("qwen3-30b-a3b", "fsdp8.ep16", "cannot be cut into groups of ep16"),
        ("qwen3-8b", "pp37", "36 layers are too few"),
        ("qwen3-8b", "fsdp8.fsdp2", "twice"),
        ("qwen3-8b", "fsdp8.hsdp2x4", "same axis"),
        ("qwen3-8b", "hsdp8", "cannot read 'hsdp8'"),
        ("qwen3-8b", "dp8", "cannot read 'dp8'"),
        ("qwen3-8b", "fsdp0", "at least 1"),
    ],
)
def test_trainers_that_do_not_divide_are_refused(model: str, trainer: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        trainer_layouts(shape_of(model), trainer, 8)
    assert str(error.value).startswith(trainer)


@pytest.mark.parametrize(
    ("model", "rollout", "message"),
    [
        ("qwen3-8b", "tp4.ep4", "no experts"),
        ("qwen3-8b", "tp3", "vocabulary cannot be divided by 3"),
        ("qwen3-30b-a3b", "tp4.ep6", "multiple of the other"),
        ("qwen3-30b-a3b", "ep256", "128 experts cannot be divided by 256"),
        ("moonlight-16b-a3b", "tp32", "attention heads cannot be divided by 32"),
        ("qwen3-8b", "tp4x0", "at least 1"),
        ("qwen3-8b", "fsdp4", "cannot read 'fsdp4'"),
        ("qwen3-8b", "", "cannot read ''"),
        ("qwen3-8b", "pp99", "too few"),
    ],
)
def test_rollouts_that_do_not_divide_are_refused(model: str, rollout: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        rollout_layouts(shape_of(model), rollout, 8)
