"""What one trainer rank holds: FSDP2 over tensor parallelism, experts stacked as transformers keeps them. Pure.

Names are the checkpoint's but for experts, which are two tensors per layer: ``mlp.experts.gate_up_proj``
``[E, 2 I, H]`` and ``mlp.experts.down_proj`` ``[E, H, I]``. Tensor parallelism cuts what produces heads or inner
features by rows, what consumes them by columns, and embedding and head by vocabulary; FSDP2 then cuts dimension 0 of
what is left as ``torch.chunk`` does. Expert parallelism gives a rank whole experts, which FSDP2 cuts over the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from rlbridge.catalog.parallel import TrainerParallel
from rlbridge.catalog.pieces import MapBuilder, Piece, chunk, even
from rlbridge.catalog.shape import ModelShape, Moe
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import ConfigError

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")
_BY_COLUMNS = ("o_proj", "down_proj")
_BUFFERS = ("e_score_correction_bias",)
"""What is no parameter, so FSDP2 leaves it whole on every rank."""


class Stage(msgspec.Struct, frozen=True):
    """Checkpoint tensors of a pipeline stage, routed experts apart.

    Attributes:
        plain: checkpoint name and shape of everything but routed experts.
        sparse: layers of the stage that have routed experts.
    """

    plain: list[tuple[str, tuple[int, ...]]]
    sparse: list[int]


def check(shape: ModelShape, name: str, parallel: TrainerParallel) -> None:
    """Refuse a parallelism that the model cannot be cut by.

    Raises:
        ConfigError: the sizes do not divide; the text says which.
    """
    tensor = parallel.tensor
    sizes = {"attention heads": shape.heads, "inner features of the MLP": shape.mlp}
    if shape.mla is None:
        sizes["key-value heads"] = shape.kv_heads
    if shape.moe is not None:
        if shape.moe.shared_width:
            sizes["inner features of shared experts"] = shape.moe.shared_width
        if parallel.experts == 1:
            sizes["inner features of an expert"] = shape.moe.width
        even(name, "experts", shape.moe.experts, parallel.experts, 0)
    elif parallel.experts > 1:
        raise ConfigError(f"{name}: the model has no experts; leave ep{parallel.experts} out")
    for what, size in sizes.items():
        even(name, what, size, tensor, 0)


def trainer_map(
    tensors: Mapping[str, TensorSpec], shape: ModelShape, stage: Stage, parallel: TrainerParallel, shard: int, rank: int
) -> SourceMap:
    """The layout of the rank that is ``shard`` on the FSDP axis and ``rank`` on the tensor-parallel one."""
    builder = MapBuilder(tensors)
    for name, size in stage.plain:
        start, count = _tensor_slice(name, size, parallel.tensor, rank)
        buffer = name.endswith(_BUFFERS)
        first, rows = (0, count[0]) if buffer else chunk(count[0], parallel.shards, shard)
        if rows:
            count = (rows, *count[1:])
            builder.add(name, count, name, [(name, (start[0] + first, *start[1:]), count)])
    if shape.moe is not None:
        for layer in stage.sparse:
            _add_experts(builder, shape, shape.moe, layer, parallel, shard, rank)
    return builder.source_map()


def _tensor_slice(name: str, size: tuple[int, ...], ranks: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Start and count of what tensor parallelism leaves to a rank."""
    start, count = [0] * len(size), list(size)
    module = name.split(".")[-2]
    axis = 0 if module in _BY_ROWS else 1 if module in _BY_COLUMNS and len(size) > 1 else None
    if axis is not None:
        start[axis], count[axis] = chunk(size[axis], ranks, rank)
    return tuple(start), tuple(count)


def _add_experts(
    builder: MapBuilder, shape: ModelShape, moe: Moe, layer: int, parallel: TrainerParallel, shard: int, rank: int
) -> None:
    first, experts, low, width = _expert_share(moe, parallel, shard, rank)
    prefix = f"model.layers.{layer}.mlp.experts"
    if not experts:
        return

    def gate_up() -> Iterator[Piece]:
        for expert in range(first, first + experts):
            yield f"{prefix}.{expert}.gate_proj.weight", (low, 0), (width, shape.hidden)
            yield f"{prefix}.{expert}.up_proj.weight", (low, 0), (width, shape.hidden)

    down = [
        (f"{prefix}.{expert}.down_proj.weight", (0, low), (shape.hidden, width))
        for expert in range(first, first + experts)
    ]
    builder.add(f"{prefix}.gate_up_proj", (experts, 2 * width, shape.hidden), down[0][0], gate_up())
    builder.add(f"{prefix}.down_proj", (experts, shape.hidden, width), down[0][0], down)


def _expert_share(moe: Moe, parallel: TrainerParallel, shard: int, rank: int) -> tuple[int, int, int, int]:
    """First expert and number of experts, first inner feature and number of them."""
    if parallel.experts == 1:
        return *chunk(moe.experts, parallel.shards, shard), *chunk(moe.width, parallel.tensor, rank)
    group, member = divmod(shard * parallel.tensor + rank, parallel.experts)
    own = moe.experts // parallel.experts
    first, experts = chunk(own, parallel.shards * parallel.tensor // parallel.experts, group)
    return member * own + first, experts, 0, moe.width
