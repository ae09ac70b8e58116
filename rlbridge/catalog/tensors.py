"""From a model's shape to the tensors of its checkpoint, as Hugging Face names them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlbridge.catalog.shape import Mla, ModelShape, Moe, shape_of_config
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

_Named = tuple[str, tuple[int, ...]]


def checkpoint_spec(config: Mapping[str, Any]) -> CheckpointSpec:
    """The checkpoint that belongs to a ``config.json``, as transformers saves it: experts apart, no tied head.

    Raises:
        ConfigError: see ``shape_of_config``.
    """
    return spec_of_shape(shape_of_config(config))


def spec_of_shape(shape: ModelShape) -> CheckpointSpec:
    """All tensors of a model: embedding, layer by layer, last norm, head."""
    in_fp32 = shape.moe is not None and shape.moe.correction_bias
    return CheckpointSpec(
        {
            name: TensorSpec(size, "float32" if in_fp32 and ".mlp.gate." in name else shape.dtype)
            for name, size in _tensors(shape)
        }
    )


def _tensors(shape: ModelShape) -> Iterator[_Named]:
    yield "model.embed_tokens.weight", (shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (shape.hidden,)
        yield from _latent_attention(shape, shape.mla, prefix) if shape.mla else _attention(shape, prefix)
        yield f"{prefix}.post_attention_layernorm.weight", (shape.hidden,)
        if shape.moe and layer in shape.moe.layers:
            yield from _experts(shape, shape.moe, f"{prefix}.mlp")
        else:
            yield from _dense(shape, f"{prefix}.mlp", shape.mlp)
    yield "model.norm.weight", (shape.hidden,)
    if not shape.tied:
        yield "lm_head.weight", (shape.vocab, shape.hidden)


def _attention(shape: ModelShape, prefix: str) -> Iterator[_Named]:
    wide = {"q": shape.heads * shape.head_dim} | dict.fromkeys("kv", shape.kv_heads * shape.head_dim)
    for part, rows in wide.items():
        yield from _linear(f"{prefix}.self_attn.{part}_proj", rows, shape.hidden, shape.qkv_bias)
    yield from _linear(f"{prefix}.self_attn.o_proj", shape.hidden, wide["q"], shape.out_bias)
    if shape.qk_norm:
        yield f"{prefix}.self_attn.q_norm.weight", (shape.head_dim,)
        yield f"{prefix}.self_attn.k_norm.weight", (shape.head_dim,)


def _latent_attention(shape: ModelShape, mla: Mla, prefix: str) -> Iterator[_Named]:
    attention = f"{prefix}.self_attn"
    queries = shape.heads * (mla.nope + mla.rope)
    if mla.query_rank is None:
        yield from _linear(f"{attention}.q_proj", queries, shape.hidden)
    else:
        yield from _linear(f"{attention}.q_a_proj", mla.query_rank, shape.hidden, shape.qkv_bias)
        yield f"{attention}.q_a_layernorm.weight", (mla.query_rank,)
        yield from _linear(f"{attention}.q_b_proj", queries, mla.query_rank)
    yield from _linear(f"{attention}.kv_a_proj_with_mqa", mla.kv_rank + mla.rope, shape.hidden, shape.qkv_bias)
    yield f"{attention}.kv_a_layernorm.weight", (mla.kv_rank,)
    yield from _linear(f"{attention}.kv_b_proj", shape.heads * (mla.nope + mla.value), mla.kv_rank)
    yield from _linear(f"{attention}.o_proj", shape.hidden, shape.heads * mla.value, shape.out_bias)


def _dense(shape: ModelShape, prefix: str, width: int) -> Iterator[_Named]:
    yield from _linear(f"{prefix}.gate_proj", width, shape.hidden, shape.mlp_bias)
    yield from _linear(f"{prefix}.up_proj", width, shape.hidden, shape.mlp_bias)
    yield from _linear(f"{prefix}.down_proj", shape.hidden, width, shape.mlp_bias)


def _experts(shape: ModelShape, moe: Moe, prefix: str) -> Iterator[_Named]:
    yield f"{prefix}.gate.weight", (moe.experts, shape.hidden)
    if moe.correction_bias:
        yield f"{prefix}.gate.e_score_correction_bias", (moe.experts,)
    for expert in range(moe.experts):
        yield from _dense(shape, f"{prefix}.experts.{expert}", moe.width)
    if moe.shared_width:
        yield from _dense(shape, f"{prefix}.shared_experts", moe.shared_width)


def _linear(prefix: str, rows: int, columns: int, bias: bool = False) -> Iterator[_Named]:
    yield f"{prefix}.weight", (rows, columns)
    if bias:
        yield f"{prefix}.bias", (rows,)
