"""The loader of ``docs/tools/trace_scale.py`` on a small model of the same kind: every element, on every rank."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from rlbridge.catalog.layouts import rollout_layouts
from rlbridge.catalog.models import MODELS
from rlbridge.catalog.shape import shape_of_config
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.sync.layout.elements import first_ids, paint
from rlbridge.sync.layout.trace import trace_layout

SMALL = dict(MODELS["kimi-k2"]) | {
    "vocab_size": 100,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "n_routed_experts": 6,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
}
SHAPE = shape_of_config(SMALL)
SPEC = spec_of_shape(SHAPE)


def _script():
    path = Path(__file__).parents[3] / "docs" / "tools" / "trace_scale.py"
    spec = importlib.util.spec_from_file_location("trace_scale", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["trace_scale"] = module
    spec.loader.exec_module(module)
    return module


Rank = _script().Rank


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("tensor_rank", range(2))
@pytest.mark.parametrize("experts_rank", range(3))
def test_the_map_is_what_the_loader_does_to_numbers(slices, tensor_rank, experts_rank):
    where = (SHAPE, SPEC, 2, tensor_rank, 3, experts_rank, slices)
    traced = Rank(*where)
    layout = trace_layout(SPEC, traced.load_weights, traced.live_tensors)

    numbered = Rank(*where, device="cpu", dtype=torch.int64)
    firsts = first_ids(SPEC)
    numbered.load_weights(
        (name, torch.arange(firsts[name], firsts[name] + math.prod(t.shape)).reshape(t.shape))
        for name, t in SPEC.tensors.items()
    )
    painted = paint(SPEC, layout.runtime, layout.boxes)
    assert painted.keys() == numbered.live.keys()
    for name, tensor in numbered.live.items():
        assert painted[name].tolist() == tensor.reshape(-1).tolist(), name
    assert layout.opaque == []
    # One box for each part of a tensor: nothing is cut that need not be.
    assert len(layout.boxes) == len({(box.runtime, box.tensor) for box in layout.boxes})


@pytest.mark.parametrize("rank", range(6))
def test_the_map_is_the_catalogue_s(rank):
    expected = rollout_layouts(SHAPE, "tp2.ep6", gpus_per_node=8)[rank].layout
    traced = Rank(SHAPE, SPEC, 2, rank % 2, 6, rank)
    layout = trace_layout(SPEC, traced.load_weights, traced.live_tensors)

    def ours(name: str) -> str:
        return name.replace(".routed_experts", "")  # where vLLM hangs an expert layer's weights is not the point

    assert layout.runtime == {ours(name): tensor for name, tensor in expected.runtime.items()}
    boxes = [msgspec.structs.replace(box, runtime=ours(box.runtime)) for box in expected.boxes]
    assert sorted(layout.boxes, key=str) == sorted(boxes, key=str)
