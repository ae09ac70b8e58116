"""What loaders of known engines do to weights, as small cases: the map is exact and as small as it can be."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlbridge.sync.layout.discover import discover, landed_nowhere
from rlbridge.sync.layout.dtypes import dtype_name
from rlbridge.sync.layout.elements import first_ids, paint
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

HEADS, KV, HEAD, HIDDEN = 8, 4, 4, 16


def spec_of(**shapes) -> CheckpointSpec:
    return CheckpointSpec({n: TensorSpec(tuple(s), "bfloat16") for n, s in shapes.items()})


def check(spec, formula, boxes, dtype=torch.bfloat16):
    """Discover ``out = formula(checkpoint)`` and compare with the formula on ids; expects ``boxes`` boxes."""
    blank = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}
    live = {"out": torch.full_like(formula(blank), 3.0, dtype=dtype)}
    layout = discover(spec, lambda weights: live["out"].copy_(formula(dict(weights))), lambda: live)
    ids = {
        n: torch.arange(first, first + math.prod(spec.tensors[n].shape)).reshape(spec.tensors[n].shape)
        for n, first in first_ids(spec).items()
    }
    painted = paint(spec, layout.runtime, layout.boxes)["out"]
    assert painted.tolist() == formula(ids).reshape(-1).tolist()
    assert len(layout.boxes) == boxes
    assert (live["out"] == 3.0).all()
    return layout


ATTENTION = spec_of(q=(HEADS * HEAD, HIDDEN), k=(KV * HEAD, HIDDEN), v=(KV * HEAD, HIDDEN))


@pytest.mark.parametrize("rank", range(4))
def test_fused_qkv_sharded_by_heads(rank):
    check(ATTENTION, lambda w: torch.cat([w[n].chunk(4)[rank] for n in "qkv"]), boxes=3)


@pytest.mark.parametrize("rank", range(8))
def test_kv_heads_replicated_when_there_are_more_ranks(rank):
    def formula(w):
        return torch.cat([w["q"].chunk(8)[rank], w["k"].chunk(4)[rank // 2], w["v"].chunk(4)[rank // 2]])

    check(ATTENTION, formula, boxes=3)


def test_kv_heads_repeated_within_one_tensor():
    def formula(w):
        return w["k"].view(KV, 1, HEAD, HIDDEN).expand(KV, 2, HEAD, HIDDEN).reshape(HEADS * HEAD, HIDDEN)

    # The second copy of each head and the first one of the next lie side by side.
    check(ATTENTION, formula, boxes=KV + 1)


def test_qkv_interleaved_by_group():
    def formula(w):
        groups = [w[n].view(KV, -1, HIDDEN) for n in "qkv"]
        return torch.cat(groups, dim=1).reshape(-1, HIDDEN)

    check(ATTENTION, formula, boxes=3 * KV)


def test_rows_permuted_for_rotary_halves():
    def formula(w):
        return w["q"].view(HEADS, 2, HEAD // 2, HIDDEN).transpose(1, 2).reshape(-1, HIDDEN)

    check(ATTENTION, formula, boxes=2 * HEADS)


@pytest.mark.parametrize("rank", range(2))
def test_gate_and_up_fused_and_transposed(rank):
    spec = spec_of(gate=(24, 8), up=(24, 8))
    check(spec, lambda w: torch.cat([w["gate"].chunk(2)[rank], w["up"].chunk(2)[rank]]).T, boxes=2)


@pytest.mark.parametrize("rank", range(2))
def test_experts_stacked_sharded_and_transposed(rank):
    spec = spec_of(**{f"{kind}{e}": (12, 8) for e in range(3) for kind in ("gate", "up")})

    def formula(w):
        experts = [torch.cat([w[f"gate{e}"].chunk(2)[rank], w[f"up{e}"].chunk(2)[rank]]) for e in range(3)]
        return torch.stack(experts).transpose(1, 2)

    check(spec, formula, boxes=6)


def test_experts_already_stacked_in_the_checkpoint():
    spec = spec_of(w=(4, 6, 10))
    check(spec, lambda w: w["w"][1:3].permute(2, 0, 1), boxes=1)


@pytest.mark.parametrize(("rank", "boxes"), [(0, 1), (1, 1), (3, 0)])
def test_vocabulary_padded_and_sharded(rank, boxes):
    spec = spec_of(w=(50, 6))

    def formula(w):
        padded = torch.cat([w["w"], w["w"].new_zeros(78, 6)])
        return padded.chunk(4)[rank]

    check(spec, formula, boxes=boxes)


@pytest.mark.parametrize("rank", range(2))
def test_strided_shard_of_data_and_tensor_parallel(rank):
    spec = spec_of(w=(16, 6))
    check(spec, lambda w: w["w"].view(2, 2, 4, 6)[:, rank].reshape(8, 6), boxes=2)


def test_every_third_row():
    check(spec_of(w=(17, 5)), lambda w: w["w"][1::3], boxes=1)


def test_even_and_odd_columns_apart():
    check(spec_of(w=(6, 10)), lambda w: torch.cat([w["w"][:, ::2], w["w"][:, 1::2]], 1), boxes=2)


def test_flat_parameter_cut_anywhere():
    spec = spec_of(a=(7, 5), b=(3, 4, 5))
    check(spec, lambda w: torch.cat([w["a"].reshape(-1), w["b"].reshape(-1)])[11:72], boxes=2 + 3)


def test_reshapes_do_not_cut():
    check(spec_of(w=(12, 6)), lambda w: w["w"].reshape(3, 4, 6), boxes=1)
    check(spec_of(w=(3, 4, 6)), lambda w: w["w"].reshape(72), boxes=1)


def test_a_random_permutation_of_rows_is_cut_by_rows_only():
    order = torch.randperm(32, generator=torch.Generator().manual_seed(1))
    assert len(discover_rows(order).boxes) <= 32


def discover_rows(order):
    spec = spec_of(w=(32, 300))
    live = {"out": torch.zeros(32, 300)}
    return discover(spec, lambda weights: live["out"].copy_(dict(weights)["w"][order]), lambda: live)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float64])
def test_cast_on_the_way(dtype):
    check(spec_of(w=(40, 30)), lambda w: w["w"].T, boxes=1, dtype=dtype)


def test_one_probe_tensor_exists_at_a_time():
    spec = spec_of(a=(4, 4), b=(4, 4), c=(4, 4))
    live = {n: torch.zeros(4, 4) for n in spec.tensors}
    before: list[weakref.ref] = []

    def load(weights):
        for name, tensor in weights:
            assert all(ref() is None for ref in before)
            before.append(weakref.ref(tensor))
            live[name].copy_(tensor)
            del tensor

    assert len(discover(spec, load, lambda: live).boxes) == 3


def test_a_loader_may_reorder():
    spec = spec_of(a=(4, 4), b=(4, 2), c=(2, 4))
    live = {n: torch.zeros(t.shape) for n, t in spec.tensors.items()}

    def load(weights):
        for name, tensor in sorted(weights, key=lambda item: item[0], reverse=True):
            live[name].copy_(tensor)

    assert len(discover(spec, load, lambda: live).boxes) == 3


def model_and_spec(tied: bool, listed: bool = False):
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    names = dict(model.state_dict() if listed or not tied else model.named_parameters())
    spec = CheckpointSpec({n: TensorSpec(tuple(t.shape), dtype_name(t.dtype)) for n, t in names.items()})
    return model, spec


def loader(model):
    parameters = dict(model.named_parameters(remove_duplicate=False))

    def load(weights):
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    return load


def test_qwen3():
    model, spec = model_and_spec(tied=False)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    layout = discover(spec, loader(model), lambda: dict(model.named_parameters()))
    assert [(box.runtime, box.tensor) for box in layout.boxes] == [(n, n) for n in spec.tensors]
    assert landed_nowhere(spec, layout) == []
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_tied_qwen3_has_one_owner():
    model, spec = model_and_spec(tied=True)
    assert "lm_head.weight" not in spec.tensors
    layout = discover(spec, loader(model), model.state_dict)
    assert [(box.runtime, box.tensor) for box in layout.boxes] == [(n, n) for n in spec.tensors]
    assert layout.aliases == []


def test_tied_qwen3_whose_checkpoint_has_both_names():
    model, spec = model_and_spec(tied=True, listed=True)
    assert "lm_head.weight" in spec.tensors
    layout = discover(spec, loader(model), model.state_dict)
    owner = "model.embed_tokens.weight"
    assert {box.tensor for box in layout.boxes if box.runtime == owner} == {"lm_head.weight"}
    assert [(box.runtime, box.tensor) for box in layout.aliases] == [(owner, "model.embed_tokens.weight")]
    assert landed_nowhere(spec, layout) == []
