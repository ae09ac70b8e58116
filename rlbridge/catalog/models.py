"""Shapes that are built in, and finding a checkpoint's spec from whatever a user has of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from rlbridge.catalog.shape import ModelShape, shape_of_config
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.config_parse import suggestion
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import ConfigError

_QWEN3: dict[str, Any] = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "dtype": "bfloat16"}
_QWEN3_MOE: dict[str, Any] = _QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "num_key_value_heads": 4}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 163840,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "dtype": "bfloat16",
}

MODELS: Mapping[str, Mapping[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
    },
    "qwen3-235b-a22b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    },
    "moonlight-16b-a3b": _DEEPSEEK_V3
    | {
        "hidden_size": 2048,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 11264,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "q_lora_rank": None,
    },
    "kimi-k2": _DEEPSEEK_V3
    | {
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "q_lora_rank": 1536,
    },
}
"""Built-in models: name to the keys of its public ``config.json`` that decide shapes, in bf16."""


def spec_of(name_or_path: str | Path) -> CheckpointSpec:
    """The checkpoint of a built-in model, of a ``config.json``, or of a model directory.

    A directory's safetensors headers count if it has any, else its ``config.json``.

    Raises:
        ConfigError: there is no such model or file, or its config cannot be used.
        LayoutError: a safetensors file is damaged.
    """
    path = Path(name_or_path)
    if str(name_or_path) not in MODELS and path.is_dir() and any(path.glob("*.safetensors")):
        return read_spec(path)
    return spec_of_shape(shape_of(name_or_path))


def shape_of(name_or_path: str | Path) -> ModelShape:
    """The shape of a built-in model, or of the ``config.json`` that the path is or holds.

    Raises:
        ConfigError: there is no such model or file, or its config cannot be used.
    """
    if str(name_or_path) in MODELS:
        return shape_of_config(MODELS[str(name_or_path)])
    path = Path(name_or_path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        if path.is_dir():
            raise ConfigError(f"{path}: neither safetensors files nor a config.json are there")
        raise ConfigError(
            f"{name_or_path}: neither a built-in model nor a file or directory{suggestion(str(name_or_path), MODELS)}"
        )
    try:
        return shape_of_config(msgspec.json.decode(file.read_bytes(), type=dict[str, Any]))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: not a config.json: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"{file.parent}/{error}" if file.name == "config.json" else f"{file}: {error}") from None
