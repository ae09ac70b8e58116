"""What one rollout rank holds, as vLLM lays weights out before it post-processes them. Pure.

Query, key and value are one tensor, gate and up another; experts are stacked as ``w13_weight`` ``[E, 2 I, H]`` and
``w2_weight`` ``[E, H, I]``. What produces heads or inner features is cut by rows over the tensor-parallel ranks, what
consumes them by columns; key-value heads are repeated where there are fewer than ranks; embedding and head are padded
to a multiple of 64 rows and cut by rows. Norms, routers and latent attention's down-projections are whole on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlbridge.catalog.parallel import RolloutParallel
from rlbridge.catalog.pieces import MapBuilder, Piece, even
from rlbridge.catalog.shape import Mla, ModelShape, Moe
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import ConfigError

VOCABULARY_MULTIPLE = 64
"""Rows of embedding and head are padded to a multiple of this."""


def rollout_map(
    tensors: Mapping[str, TensorSpec],
    shape: ModelShape,
    name: str,
    parallel: RolloutParallel,
    layers: range,
    rank: int,
) -> SourceMap:
    """The layout of rank ``rank`` of a stage that has ``layers``.

    Raises:
        ConfigError: the model cannot be cut by ``parallel``, which messages call ``name``.
    """
    if parallel.experts and shape.moe is None:
        raise ConfigError(f"{name}: the model has no experts; leave ep{parallel.experts} out")
    return _Rank(tensors, shape, name, parallel, rank).source_map(layers)


class _Rank:
    def __init__(
        self,
        tensors: Mapping[str, TensorSpec],
        shape: ModelShape,
        name: str,
        parallel: RolloutParallel,
        rank: int,
    ) -> None:
        self._shape, self._name, self._parallel = shape, name, parallel
        self._ranks, self._rank, self._stage_rank = parallel.tensor, rank % parallel.tensor, rank
        self._tensors = tensors
        self._builder = MapBuilder(tensors)

    def source_map(self, layers: range) -> SourceMap:
        shape = self._shape
        first, last = layers.start == 0, layers.stop == shape.layers
        if first or (last and shape.tied):
            self._vocabulary("model.embed_tokens.weight")
        for layer in layers:
            prefix = f"model.layers.{layer}"
            self._whole(f"{prefix}.input_layernorm.weight")
            if shape.mla is None:
                self._attention(f"{prefix}.self_attn")
            else:
                self._latent_attention(f"{prefix}.self_attn", shape.mla)
            self._whole(f"{prefix}.post_attention_layernorm.weight")
            if shape.moe is not None and layer in shape.moe.layers:
                self._mixture(f"{prefix}.mlp", shape.moe)
            else:
                self._mlp(f"{prefix}.mlp", shape.mlp, shape.mlp_bias)
        if last:
            self._whole("model.norm.weight")
            if not shape.tied:
                self._vocabulary("lm_head.weight")
        return self._builder.source_map()

    def _even(self, what: str, size: int) -> tuple[int, int]:
        return even(self._name, what, size, self._ranks, self._rank)

    def _whole(self, tensor: str) -> None:
        self._builder.rows(tensor, tensor)

    def _vocabulary(self, tensor: str) -> None:
        vocab, hidden = self._shape.vocab, self._shape.hidden
        padded = -(-vocab // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE
        first, rows = self._even("rows of the padded vocabulary", padded)
        real = max(0, min(rows, vocab - first))
        self._builder.add(tensor, (rows, hidden), tensor, [(tensor, (first, 0), (real, hidden))] if real else [])

    def _attention(self, prefix: str) -> None:
        shape = self._shape
        first, heads = self._even("attention heads", shape.heads)
        first_kv, kv_heads = self._kv_heads()
        query = (first * shape.head_dim, heads * shape.head_dim)
        key = value = (first_kv * shape.head_dim, kv_heads * shape.head_dim)
        cuts = {"q_proj": query, "k_proj": key, "v_proj": value}
        self._stacked(f"{prefix}.qkv_proj", prefix, cuts, shape.qkv_bias)
        self._by_columns(f"{prefix}.o_proj", *query, shape.out_bias)
        if shape.qk_norm:
            self._whole(f"{prefix}.q_norm.weight")
            self._whole(f"{prefix}.k_norm.weight")

    def _kv_heads(self) -> tuple[int, int]:
        kv_heads = self._shape.kv_heads
        if kv_heads >= self._ranks:
            return self._even("key-value heads", kv_heads)
        _, copies = even(self._name, "ranks for the key-value heads", self._ranks, kv_heads, 0)
        return self._rank // copies, 1

    def _latent_attention(self, prefix: str, mla: Mla) -> None:
        first, heads = self._even("attention heads", self._shape.heads)
        query, both = mla.nope + mla.rope, mla.nope + mla.value
        compressed = [f"{prefix}.q_a_proj", f"{prefix}.kv_a_proj_with_mqa"]
        if mla.query_rank is None:
            self._by_rows(f"{prefix}.q_proj", first * query, heads * query)
            self._whole(f"{prefix}.kv_a_proj_with_mqa.weight")
            if self._shape.qkv_bias:
                self._whole(f"{prefix}.kv_a_proj_with_mqa.bias")
        else:
            for part in ("weight", "bias") if self._shape.qkv_bias else ("weight",):
                self._builder.rows(f"{prefix}.fused_qkv_a_proj.{part}", *(f"{name}.{part}" for name in compressed))
            self._whole(f"{prefix}.q_a_layernorm.weight")
            self._by_rows(f"{prefix}.q_b_proj", first * query, heads * query)
        self._whole(f"{prefix}.kv_a_layernorm.weight")
        self._by_rows(f"{prefix}.kv_b_proj", first * both, heads * both)
        self._by_columns(f"{prefix}.o_proj", first * mla.value, heads * mla.value, self._shape.out_bias)

    def _mlp(self, prefix: str, width: int, bias: bool) -> None:
        cut = self._even("inner features of the MLP", width)
        self._stacked(f"{prefix}.gate_up_proj", prefix, {"gate_proj": cut, "up_proj": cut}, bias)
        self._by_columns(f"{prefix}.down_proj", *cut, bias)

    def _mixture(self, prefix: str, moe: Moe) -> None:
        self._whole(f"{prefix}.gate.weight")
        if moe.correction_bias:
            self._whole(f"{prefix}.gate.e_score_correction_bias")
        if moe.shared_width:
            self._mlp(f"{prefix}.shared_experts", moe.shared_width, bias=False)
        first, experts, low, width = self._expert_share(moe)
        hidden, w13, w2 = self._shape.hidden, list[Piece](), list[Piece]()
        for expert in range(first, first + experts):
            path = f"{prefix}.experts.{expert}"
            w13.append((f"{path}.gate_proj.weight", (low, 0), (width, hidden)))
            w13.append((f"{path}.up_proj.weight", (low, 0), (width, hidden)))
            w2.append((f"{path}.down_proj.weight", (0, low), (hidden, width)))
        self._builder.add(f"{prefix}.experts.routed_experts.w13_weight", (experts, 2 * width, hidden), w13[0][0], w13)
        self._builder.add(f"{prefix}.experts.routed_experts.w2_weight", (experts, hidden, width), w2[0][0], w2)

    def _expert_share(self, moe: Moe) -> tuple[int, int, int, int]:
        """First expert and number of experts, first inner feature and number of them."""
        groups = self._parallel.experts or 1
        slices = max(1, self._ranks // groups)
        group, part = divmod(self._stage_rank, slices) if self._parallel.experts else (0, self._rank)
        own = even(self._name, "experts", moe.experts, groups, group)
        return *own, *even(self._name, "inner features of an expert", moe.width, slices, part)

    def _stacked(self, runtime: str, prefix: str, cuts: Mapping[str, tuple[int, int]], bias: bool) -> None:
        """Rows of several linear layers on top of each other; a cut is a first row and a number of rows."""
        height, hidden = sum(rows for _, rows in cuts.values()), self._shape.hidden
        weights = [(f"{prefix}.{part}.weight", (first, 0), (rows, hidden)) for part, (first, rows) in cuts.items()]
        self._builder.add(f"{runtime}.weight", (height, hidden), weights[0][0], weights)
        if bias:
            biases = [(f"{prefix}.{part}.bias", (first,), (rows,)) for part, (first, rows) in cuts.items()]
            self._builder.add(f"{runtime}.bias", (height,), biases[0][0], biases)

    def _by_rows(self, path: str, first: int, rows: int) -> None:
        columns = self._tensors[f"{path}.weight"].shape[1]
        weight = f"{path}.weight"
        self._builder.add(weight, (rows, columns), weight, [(weight, (first, 0), (rows, columns))])

    def _by_columns(self, path: str, first: int, columns: int, bias: bool) -> None:
        rows = self._tensors[f"{path}.weight"].shape[0]
        weight = f"{path}.weight"
        self._builder.add(weight, (rows, columns), weight, [(weight, (0, first), (rows, columns))])
        if bias:
            self._whole(f"{path}.bias")
