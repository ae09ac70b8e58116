"""Trainers and engines with other shards, other fusions, other dtypes: what arrives is what the engine would load."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from delivery import Held, deliver
from engine_loaders import Megatron, Place, RowShards, Vllm, checkpoint_spec

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.source_map import SourceMap

RANKS = (1, 2, 4)


@cache
def layouts(engine: type, ranks: int, kv: int) -> list[SourceMap]:
    found = []
    for rank in range(ranks):
        worker = engine(Place(rank, ranks, kv))
        found.append(discover(checkpoint_spec(kv), worker.load_weights, lambda live=worker.live: live))
    return found


def workers(engine: type, ranks: int, kv: int, weights: dict[str, torch.Tensor]) -> list:
    """Ranks that hold ``weights``."""
    made = [engine(Place(rank, ranks, kv)) for rank in range(ranks)]
    for worker in made:
        worker.load_weights(iter(weights.items()))
    return made


def held(prefix: str, engine: type, its_workers: list, kv: int) -> dict[str, Held]:
    maps = layouts(engine, len(its_workers), kv)
    return {f"{prefix}{r}": Held(maps[r], worker.live) for r, worker in enumerate(its_workers)}


def random_weights(kv: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    spec = checkpoint_spec(kv)
    return {n: torch.randn(t.shape, generator=generator).to(torch.bfloat16) for n, t in spec.tensors.items()}


@pytest.mark.parametrize("kv", [2, 4])
@pytest.mark.parametrize("rollout_ranks", RANKS)
@pytest.mark.parametrize("trainer_ranks", RANKS)
@pytest.mark.parametrize("trainer", [RowShards, Megatron])
def test_every_shard_of_a_trainer_serves_every_shard_of_an_engine(trainer, trainer_ranks, rollout_ranks, kv):
    engines = workers(Vllm, rollout_ranks, kv, random_weights(kv, 0))
    for version in (1, 2):
        weights = random_weights(kv, version)
        trainers = workers(trainer, trainer_ranks, kv, weights)
        deliver(checkpoint_spec(kv), held("t", trainer, trainers, kv), held("r", Vllm, engines, kv))
        for engine, fresh in zip(engines, workers(Vllm, rollout_ranks, kv, weights), strict=True):
            for name, tensor in fresh.live.items():
                assert torch.equal(bit_view(engine.live[name]), bit_view(tensor)), name


@pytest.mark.parametrize("engine", [RowShards, Megatron, Vllm])
@pytest.mark.parametrize("ranks", RANKS)
def test_maps_have_as_many_boxes_as_there_are_blocks(engine, ranks):
    kv, found = 2, layouts(engine, ranks, 2)
    blocks = {
        # Interleaving cuts query, key and value by group; the experts' three matrices are one block each.
        Megatron: 8 + 3 * max(1, kv // ranks) + 3 * 4 // min(2, ranks),
        Vllm: 8 + 3 + 3 * 4 // min(2, ranks),
        RowShards: len(checkpoint_spec(kv).tensors),
    }[engine]
    assert all(len(layout.boxes) <= blocks for layout in found)
    assert len(found[0].boxes) == blocks
