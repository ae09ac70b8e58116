"""What a model's ``config.json`` says about the shapes of its weights, in one form for all architectures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from rlbridge.transport.errors import ConfigError

_Size = Annotated[int, msgspec.Meta(ge=1)]


class Mla(msgspec.Struct, frozen=True):
    """Multi-head latent attention.

    Attributes:
        query_rank: width of the compressed query; ``None``: the query is not compressed.
        kv_rank: width of the compressed key and value.
        nope, rope: widths of a head's key without and with rotary position; the latter is shared by all heads.
        value: width of a head's value.
    """

    query_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int


class Moe(msgspec.Struct, frozen=True):
    """Mixture of experts.

    Attributes:
        experts: routed experts of a sparse layer.
        width: inner width of one routed expert.
        shared_width: inner width of all shared experts together; 0 without any.
        layers: which layers are sparse; the others have a dense MLP.
        correction_bias: whether the router has a bias for balancing and is kept in fp32, as DeepSeek-V3's.
    """

    experts: int
    width: int
    shared_width: int
    layers: frozenset[int]
    correction_bias: bool


class ModelShape(msgspec.Struct, frozen=True):
    """Everything that decides names, shapes and dtypes of a decoder's weights.

    Attributes:
        layers, hidden, vocab: number of decoder layers, model width, rows of the embedding.
        heads, kv_heads, head_dim: grouped-query attention; unused but for ``heads`` with ``mla``.
        mlp: inner width of a dense MLP.
        tied: the output head is the embedding and has no tensor of its own.
        dtype: of all weights but a DeepSeek-V3 router's.
        qkv_bias, out_bias, mlp_bias: which projections have biases.
        qk_norm: per-head norms of query and key.
        mla, moe: latent attention and experts, where there are any.
    """

    layers: int
    hidden: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    dtype: str
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    mla: Mla | None = None
    moe: Moe | None = None


class _Decoder(msgspec.Struct):
    """Keys that all architectures have, and their defaults where a ``config.json`` may be silent."""

    hidden_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    intermediate_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    dtype: str | None = None
    torch_dtype: str | None = None


class _Qwen3Moe(msgspec.Struct):
    moe_intermediate_size: _Size
    num_experts: _Size | None = None
    num_local_experts: _Size | None = None
    decoder_sparse_step: _Size = 1
    mlp_only_layers: list[int] | None = None


class _DeepseekV3(msgspec.Struct):
    kv_lora_rank: _Size
    qk_nope_head_dim: _Size
    qk_rope_head_dim: _Size
    v_head_dim: _Size
    moe_intermediate_size: _Size
    n_routed_experts: _Size
    n_shared_experts: int | None = None
    first_k_dense_replace: int = 0
    q_lora_rank: _Size | None = None


_DEEPSEEK_V3 = ("deepseek_v3", "kimi_k2")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe", *_DEEPSEEK_V3)
"""Values of ``model_type`` whose weights are known."""


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """Read the keys of a Hugging Face ``config.json``. Layers that only predict further tokens are left out.

    Raises:
        ConfigError: the architecture is not one of ``ARCHITECTURES``, a key is missing or has an impossible value,
            or the config is of a quantised checkpoint.
    """
    architecture = config.get("model_type")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"config.json: model_type {architecture!r}: shapes are known for {', '.join(ARCHITECTURES)}; "
            "give a directory with the safetensors files instead"
        )
    if config.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config: shapes are known for unquantised weights only; give a directory with "
            "the safetensors files, or take the key out to describe the weights before quantisation"
        )
    common = _read(config, _Decoder)
    head_dim = common.head_dim or (128 if architecture == "qwen3" else _head_dim(common))
    return ModelShape(
        layers=common.num_hidden_layers,
        hidden=common.hidden_size,
        vocab=common.vocab_size,
        heads=common.num_attention_heads,
        kv_heads=_kv_heads(common),
        head_dim=head_dim,
        mlp=common.intermediate_size,
        tied=common.tie_word_embeddings,
        dtype=(common.dtype or common.torch_dtype or "float32").removeprefix("torch."),
        qkv_bias=common.attention_bias or architecture == "qwen2",
        out_bias=common.attention_bias and architecture != "qwen2",
        mlp_bias=common.mlp_bias and architecture == "llama",
        qk_norm=architecture in ("qwen3", "qwen3_moe"),
        mla=_mla(_read(config, _DeepseekV3)) if architecture in _DEEPSEEK_V3 else None,
        moe=_moe(architecture, config, common.num_hidden_layers),
    )


def _read(config: Mapping[str, Any], keys: type[Any]) -> Any:
    try:
        return msgspec.convert(dict(config), keys)
    except msgspec.ValidationError as error:
        raise ConfigError(f"config.json: {error}") from None


def _head_dim(common: _Decoder) -> int:
    if common.hidden_size % common.num_attention_heads:
        raise ConfigError(
            f"config.json: hidden_size {common.hidden_size} is no multiple of num_attention_heads "
            f"{common.num_attention_heads}, and there is no head_dim"
        )
    return common.hidden_size // common.num_attention_heads


def _kv_heads(common: _Decoder) -> int:
    kv_heads = common.num_key_value_heads or common.num_attention_heads
    if common.num_attention_heads % kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {common.num_attention_heads} is no multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    return kv_heads


def _mla(keys: _DeepseekV3) -> Mla:
    return Mla(keys.q_lora_rank, keys.kv_lora_rank, keys.qk_nope_head_dim, keys.qk_rope_head_dim, keys.v_head_dim)


def _moe(architecture: str, config: Mapping[str, Any], layers: int) -> Moe | None:
    if architecture == "qwen3_moe":
        qwen: _Qwen3Moe = _read(config, _Qwen3Moe)
        experts = qwen.num_experts or qwen.num_local_experts
        if experts is None:
            raise ConfigError("config.json: Object missing required field `num_experts`")
        dense = set(qwen.mlp_only_layers or ())
        step = qwen.decoder_sparse_step
        sparse = frozenset(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
        return Moe(experts, qwen.moe_intermediate_size, 0, sparse, correction_bias=False)
    if architecture in _DEEPSEEK_V3:
        keys: _DeepseekV3 = _read(config, _DeepseekV3)
        width = keys.moe_intermediate_size
        sparse = frozenset(range(keys.first_k_dense_replace, layers))
        return Moe(keys.n_routed_experts, width, width * (keys.n_shared_experts or 0), sparse, correction_bias=True)
    return None
