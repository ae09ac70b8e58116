"""Shapes without weights: those that are published, and those that transformers writes for the same config."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from subprocess import run
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlbridge.catalog.models import MODELS, shape_of, spec_of
from rlbridge.catalog.shape import ARCHITECTURES
from rlbridge.catalog.tensors import checkpoint_spec
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.transport.errors import ConfigError

PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "moonlight-16b-a3b": 15_960_111_936,
    "kimi-k2": 1_026_408_232_448,
}

DECODER: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "q_lora_rank": 12,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biased-tied": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", QWEN_EXPERTS),
    "qwen3_moe-mixed": ("qwen3_moe", QWEN_EXPERTS | {"mlp_only_layers": [1], "attention_bias": True}),
    "qwen3_moe-stepped": ("qwen3_moe", QWEN_EXPERTS | {"decoder_sparse_step": 2}),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3-plain-query": ("deepseek_v3", LATENT | {"q_lora_rank": None}),
    "deepseek_v3-biased": ("deepseek_v3", LATENT | {"attention_bias": True, "first_k_dense_replace": 2}),
}


@pytest.mark.parametrize("name", MODELS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    count = sum(math.prod(tensor.shape) for tensor in spec_of(name).tensors.values())
    assert count == pytest.approx(PUBLISHED[name], rel=1e-6)


def test_kimi_k2_has_as_many_tensors_as_its_index() -> None:
    assert len(spec_of("kimi-k2").tensors) == 69_975


@pytest.mark.parametrize("case", TINY)
def test_a_config_gives_what_transformers_saves(case: str, tmp_path: Path) -> None:
    architecture, keys = TINY[case]
    config = CONFIG_MAPPING[architecture](**(DECODER | keys))
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    saved = read_spec(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert checkpoint_spec(written).tensors == saved.tensors
    assert spec_of(tmp_path).tensors == saved.tensors
    (tmp_path / "model.safetensors").unlink()
    assert spec_of(tmp_path).tensors == spec_of(tmp_path / "config.json").tensors == saved.tensors


def test_kimi_k2_is_a_deepseek_v3() -> None:
    config = DECODER | LATENT
    kimi, deepseek = (checkpoint_spec(config | {"model_type": kind}) for kind in ("kimi_k2", "deepseek_v3"))
    assert kimi == deepseek


def test_every_architecture_is_compared_with_transformers() -> None:
    assert {architecture for architecture, _ in TINY.values()} == set(ARCHITECTURES) - {"kimi_k2"}


def test_a_typo_is_answered_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen3-30b-a3b'"):
        spec_of("qwen3-30b-a3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2'.*llama"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "no multiple"),
        ({"hidden_size": 33}, "no head_dim"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised|unquantised"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 8}, "num_experts"),
    ],
)
def test_an_unusable_config_is_refused_by_key(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama"} | DECODER | change))
    for given in (file, tmp_path):
        with pytest.raises(ConfigError, match=message) as error:
            spec_of(given)
        assert str(error.value).startswith(str(file))


def test_places_without_a_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither safetensors files nor"):
        spec_of(tmp_path)
    (tmp_path / "config.json").write_text("no json")
    with pytest.raises(ConfigError, match=r"config.json: not a config.json"):
        shape_of(tmp_path)


def test_shapes_come_without_torch() -> None:
    code = (
        "import sys; from rlbridge.catalog.models import spec_of; spec_of('kimi-k2'); sys.exit('torch' in sys.modules)"
    )
    assert run([sys.executable, "-c", code], check=False).returncode == 0
