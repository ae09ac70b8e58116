"""Random layouts and topologies, and what follows from their elements alone: an oracle that knows no planner."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from rlbridge.sync.layout.dtypes import item_bytes
from rlbridge.sync.layout.elements import count_ids, first_ids, paint, row_major_strides
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.topology import NodeRates, Topology

Slice = tuple[int, int, int]
"""Dimension, parts, which part: a block of it, or every so-manieth row if the dimension is negative."""


@dataclass(frozen=True)
class Job:
    """What is planned for."""

    spec: CheckpointSpec
    senders: dict[str, SourceMap]
    receivers: dict[str, SourceMap]
    topology: Topology
    bucket_bytes: int

    def elements(self, workers: dict[str, SourceMap]) -> dict[str, set[int]]:
        """Node to the checkpoint elements that its workers among ``workers`` have."""
        found: dict[str, set[int]] = defaultdict(set)
        for worker, layout in workers.items():
            for ids in paint(self.spec, layout.runtime, layout.boxes).values():
                found[self.topology.nodes[worker]] |= set(ids[ids > 0].tolist())
        return found

    def size_bytes(self, elements: set[int]) -> int:
        """Bytes of ``elements`` on the wire."""
        widths = np.zeros(count_ids(self.spec) + 1, np.int64)
        for name, first in first_ids(self.spec).items():
            tensor = self.spec.tensors[name]
            widths[first : first + int(np.prod(tensor.shape))] = item_bytes(tensor.dtype)
        return int(widths[list(elements)].sum())


def box(name: str, tensor: TensorSpec, cut: Slice) -> Box:
    """The part of a tensor that ``cut`` names, packed tightly at run time."""
    dim, parts, part = cut
    start, count, step = [0] * len(tensor.shape), list(tensor.shape), [1] * len(tensor.shape)
    d = abs(dim) - 1
    if dim > 0:
        first, last = (tensor.shape[d] * i // parts for i in (part, part + 1))
        start[d], count[d] = first, last - first
    else:
        start[d], step[d] = part, parts
        count[d] = len(range(part, tensor.shape[d], parts))
    strides = tuple(s if n > 1 else 0 for s, n in zip(row_major_strides(tuple(count)), count, strict=True))
    steps = tuple(s if n > 1 else 1 for s, n in zip(step, count, strict=True))
    return Box(name, name, tuple(start), tuple(count), steps, 0, strides)


def layout(spec: CheckpointSpec, cuts: dict[str, Slice]) -> SourceMap:
    """A worker that has one part of each tensor in ``cuts``."""
    boxes = [box(name, spec.tensors[name], cut) for name, cut in cuts.items()]
    return SourceMap({b.runtime: TensorSpec(b.count, spec.tensors[b.tensor].dtype) for b in boxes}, boxes)


@st.composite
def slices(draw, tensor: TensorSpec, parts: int) -> Slice:
    dim = draw(st.sampled_from([d + 1 for d in range(len(tensor.shape))] + [-1]))
    return dim, parts, draw(st.integers(0, parts - 1))


@st.composite
def jobs(draw) -> Job:
    """Any sharding on both sides, workers anywhere, links of any speed."""
    shapes = st.tuples(st.sampled_from([8, 24, 60]), st.sampled_from([8, 20, 32]))
    kinds = st.tuples(shapes, st.sampled_from(["float32", "bfloat16"]))
    spec = CheckpointSpec({f"w{i}": TensorSpec(*draw(kinds)) for i in range(draw(st.integers(1, 4)))})
    n_senders, n_receivers = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    sending: list[dict[str, Slice]] = [{} for _ in range(n_senders)]
    for name in spec.tensors:
        parts = draw(st.sampled_from([n for n in (1, 2, 3, 4) if n <= n_senders]))
        dim = draw(st.sampled_from([1, 2, -1]))
        for i in range(n_senders):  # more senders than parts are replicas; the first of each part always has it
            if i < parts or draw(st.booleans()):
                sending[i][name] = (dim, parts, i % parts)
    senders = {f"t{i}": layout(spec, cuts) for i, cuts in enumerate(sending)}
    receivers = {}
    alike = layout(spec, _needs(draw, spec))
    for i in range(n_receivers):
        receivers[f"r{i}"] = alike if draw(st.booleans()) else layout(spec, _needs(draw, spec))
    n_nodes = draw(st.integers(1, 5))
    nodes = {worker: f"n{draw(st.integers(0, n_nodes - 1))}" for worker in [*senders, *receivers]}
    rate = st.sampled_from([1e6, 1e6, 2e6, 5e6, 1e7])
    overrides = {f"n{i}": NodeRates(draw(rate), draw(rate), draw(rate)) for i in range(n_nodes) if draw(st.booleans())}
    topology = Topology(nodes, NodeRates(1e6, 1e6, 5e6), overrides)
    return Job(spec, senders, receivers, topology, draw(st.sampled_from([64, 512, 4096])))


def _needs(draw, spec: CheckpointSpec) -> dict[str, Slice]:
    some = [name for name in spec.tensors if draw(st.integers(0, 3))] or list(spec.tensors)[:1]
    return {name: draw(slices(spec.tensors[name], draw(st.integers(1, 3)))) for name in some}
