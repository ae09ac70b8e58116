"""What is to be planned: two sides, by names of parallelisms or as saved layouts, placed on nodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from rlbridge.catalog.layouts import Placed, rollout_layouts, trainer_layouts
from rlbridge.catalog.models import MODELS, shape_of, spec_of
from rlbridge.catalog.shape import ModelShape
from rlbridge.config_parse import suggestion
from rlbridge.layout.saved import KnownLayout, load
from rlbridge.sync.correspondence import Correspondence, correspond, export_dtypes
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.opaque import EXPORT, WHOLE, inputs_of, with_virtual
from rlbridge.transport.errors import ConfigError
from rlbridge.transport.topology import NodeRates, Topology


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks.

    Attributes:
        model: a built-in name, a ``config.json`` or a model directory; ``None`` where both sides are saved layouts.
        trainer, rollout: the name of one parallelism, or one saved layout for each worker of the side.
        gpus_per_node: workers of a node; nodes are filled in order of rank.
        link_gbps, local_gbps: rate of a node's link, each way, and of each worker inside its node, in Gbit/s.
        colocated: rollouts fill the nodes from the trainers' first on, instead of nodes of their own.
        export_dtype: on the wire; ``None`` for the checkpoint's.
        bucket_bytes, staging_bytes: as in ``transport``.
        copy_gbps: at which a worker copies weights within its host or device, in Gbit/s; an assumption.
    """

    model: str | None
    trainer: tuple[str, ...]
    rollout: tuple[str, ...]
    gpus_per_node: int
    link_gbps: float
    local_gbps: float
    colocated: bool
    export_dtype: str | None
    bucket_bytes: int
    staging_bytes: int
    copy_gbps: float


class Job(NamedTuple):
    """The question with everything looked up: what the planner takes.

    Attributes:
        spec: the checkpoint.
        correspondence, topology: see there; nodes are called ``nodeN``, trainers' first.
    """

    spec: CheckpointSpec
    correspondence: Correspondence
    topology: Topology


def job_of(question: Question) -> Job:
    """Look up layouts, place the workers, and cut the weights into atoms.

    Raises:
        ConfigError: there is no such model, parallelism or file, or files contradict each other.
        LayoutError: a saved layout is damaged, or the trainers do not hold all that the rollouts need.
    """
    shape = shape_of(question.model) if question.model is not None else None
    saved: list[KnownLayout] = []
    trainers = _side(question, "trainer", shape, saved, first_node=0)
    first_node = 0 if question.colocated else 1 + trainers[-1].node
    rollouts = _side(question, "rollout", shape, saved, first_node)
    spec = _spec(question.model, saved, [*trainers, *rollouts])
    wire = export_dtypes(spec, question.export_dtype)

    def announced(side: list[Placed], kind: str) -> dict[str, SourceMap]:
        return {
            p.worker: with_virtual(p.layout, kind, inputs_of(spec, p.layout.opaque_inputs, wire))
            if p.layout.opaque
            else p.layout
            for p in side
        }

    correspondence = correspond(spec, announced(trainers, EXPORT), announced(rollouts, WHOLE), wire)
    digits = len(str(max(p.node for p in [*trainers, *rollouts])))
    nodes = {p.worker: f"node{p.node:0{digits}}" for p in [*trainers, *rollouts]}
    return Job(spec, correspondence, Topology(nodes, NodeRates.of_gbps(question.link_gbps, question.local_gbps)))


def _side(
    question: Question, side: str, shape: ModelShape | None, saved: list[KnownLayout], first_node: int
) -> list[Placed]:
    """The workers of one side; what is read from files is added to ``saved``."""
    names: Sequence[str] = getattr(question, side)
    files = [Path(name) for name in names if Path(name).is_file()]
    if len(files) == len(names):
        read = {file: load(file) for file in dict.fromkeys(files)}
        saved += read.values()
        return [
            Placed(f"{side}-{i}", first_node + i // question.gpus_per_node, read[file].layout)
            for i, file in enumerate(files)
        ]
    name = next(name for name in names if not Path(name).is_file())
    if len(names) > 1:
        last = names[-1]
        hint = f"; put the model first: rlbridge plan {last} --{side} {name}" if last in MODELS else ""
        raise ConfigError(f"--{side}: {name} is no saved layout; give one parallelism, or a file for each rank{hint}")
    if shape is None:
        raise ConfigError(
            f"--{side} {name}: no such file; for a parallelism give the model first: "
            f"rlbridge plan MODEL --{side} {name}"
        )
    layouts = trainer_layouts if side == "trainer" else rollout_layouts
    return layouts(shape, name, question.gpus_per_node, first_node)


def _spec(model: str | None, saved: Sequence[KnownLayout], placed: Sequence[Placed]) -> CheckpointSpec:
    """The model's own tensors, with those of saved layouts."""
    tensors: dict[str, TensorSpec] = dict(spec_of(model).tensors) if model is not None else {}
    for known in saved:
        for name, tensor in known.checkpoint.tensors.items():
            if tensors.setdefault(name, tensor) != tensor:
                was = tensors[name]
                raise ConfigError(
                    f"{known.title}: {name} is {list(tensor.shape)} {tensor.dtype}, elsewhere {list(was.shape)} "
                    f"{was.dtype}: these are layouts of different models"
                )
    layouts = {id(p.layout): p.layout for p in placed}.values()
    strange = next((box.tensor for layout in layouts for box in layout.boxes if box.tensor not in tensors), None)
    if strange is not None:
        raise ConfigError(
            f"{model}: its safetensors files have no {strange}, which its config.json asks for"
            f"{suggestion(strange, list(tensors))}; give the config.json alone, or layouts saved by "
            "`rlbridge layout --save`"
        )
    return CheckpointSpec(tensors)
