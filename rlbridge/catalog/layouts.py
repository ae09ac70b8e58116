"""Source maps of a whole cluster from a model and the names of its parallelisms, without running any loader. Pure."""

from __future__ import annotations

from typing import NamedTuple

from rlbridge.catalog.parallel import RolloutParallel, TrainerParallel, rollout_parallel, trainer_parallel
from rlbridge.catalog.pieces import spread
from rlbridge.catalog.rollout_layouts import rollout_map
from rlbridge.catalog.shape import ModelShape
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.catalog.trainer_layouts import Stage, check, trainer_map
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import ConfigError


class Placed(NamedTuple):
    """A worker, where it stands and what it holds.

    Attributes:
        worker: ``trainer-RANK`` or ``rollout-REPLICA-RANK``.
        node: index of its node; a node has ``gpus_per_node`` workers, filled in order of rank.
        layout: shared by all workers that hold the same, which is how a plan finds its classes.
    """

    worker: str
    node: int
    layout: SourceMap


def trainer_layouts(shape: ModelShape, name: str, gpus_per_node: int, first_node: int = 0) -> list[Placed]:
    """All trainer ranks under the parallelism ``name``, see ``rlbridge.catalog.parallel``.

    Raises:
        ConfigError: the name cannot be read, or the model cannot be cut so.
    """
    parallel = trainer_parallel(name)
    check(shape, name, parallel)
    tensors = spec_of_shape(shape).tensors
    stages = _trainer_stages(shape, name, parallel, tensors)
    known: dict[tuple[int, int, int], SourceMap] = {}
    placed = []
    for index in range(parallel.ranks):
        rest, rank = divmod(index, parallel.tensor)
        rest, shard = divmod(rest, parallel.shards)
        stage = rest // parallel.replicas
        if (stage, shard, rank) not in known:
            known[stage, shard, rank] = trainer_map(tensors, shape, stages[stage], parallel, shard, rank)
        node = first_node + index // gpus_per_node
        placed.append(Placed(f"trainer-{index}", node, known[stage, shard, rank]))
    return placed


def rollout_layouts(shape: ModelShape, name: str, gpus_per_node: int, first_node: int = 0) -> list[Placed]:
    """All ranks of all rollout replicas under the parallelism ``name``, see ``rlbridge.catalog.parallel``.

    Raises:
        ConfigError: the name cannot be read, or the model cannot be cut so.
    """
    parallel = rollout_parallel(name)
    replica = _replica(shape, name, parallel)
    placed = []
    for index in range(parallel.replicas * parallel.ranks):
        number, rank = divmod(index, parallel.ranks)
        node = first_node + index // gpus_per_node
        placed.append(Placed(f"rollout-{number}-{rank}", node, replica[rank]))
    return placed


def _replica(shape: ModelShape, name: str, parallel: RolloutParallel) -> list[SourceMap]:
    """The layouts of one replica's ranks; without experts, ranks with the same slices share theirs."""
    tensors = spec_of_shape(shape).tensors
    layouts = []
    for stage in range(parallel.stages):
        layers = _stage_layers(shape, name, parallel.stages, stage)
        layouts += [rollout_map(tensors, shape, name, parallel, layers, rank) for rank in range(parallel.stage_ranks)]
    return layouts


def _stage_layers(shape: ModelShape, name: str, stages: int, stage: int) -> range:
    if stages > shape.layers:
        raise ConfigError(f"{name}: {shape.layers} layers are too few for pp{stages}")
    first, layers = spread(shape.layers, stages, stage)
    return range(first, first + layers)


def _trainer_stages(
    shape: ModelShape, name: str, parallel: TrainerParallel, tensors: dict[str, TensorSpec]
) -> list[Stage]:
    """Layers are spread evenly, the first stages getting one more; a tied embedding is in the last stage too."""
    layers = [_stage_layers(shape, name, parallel.stages, stage) for stage in range(parallel.stages)]
    stage_of = {layer: stage for stage, its in enumerate(layers) for layer in its}
    stages = [Stage([], [i for i in its if shape.moe and i in shape.moe.layers]) for its in layers]
    for tensor, spec in tensors.items():
        parts = tensor.split(".")
        if ".mlp.experts." in tensor:
            continue
        if parts[1] == "layers":
            homes = {stage_of[int(parts[2])]}
        elif parts[1] == "embed_tokens":
            homes = {0, parallel.stages - 1} if shape.tied else {0}
        else:
            homes = {parallel.stages - 1}
        for home in homes:
            stages[home].plain.append((tensor, spec.shape))
    return stages
