"""Layout discovery on vLLM's own loaders, at one and two tensor-parallel ranks, against what vLLM loads by itself."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from real_engines import UNUSED, run_programs, run_rlbridge, write_checkpoint, write_job
from safetensors.torch import load_file

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.codec import map_hash
from rlbridge.sync.layout.discover import landed_nowhere
from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.source_map import Box, SourceMap

pytestmark = pytest.mark.timeout(900)
DEADLINE_S = 600.0  # two processes import vLLM and build five models: a minute on two quiet cores

CHECKPOINTS = {
    "tied, one kv head": {"kind": "dense", "kv_heads": 1, "tied": True},
    "tied, both heads stored": {"kind": "dense", "tied": True, "both_heads": True},
    "untied, float32": {"kind": "dense", "dtype": torch.float32},
    "experts": {"kind": "moe", "kv_heads": 1},
}
APART = "experts apart"
"""The checkpoint "experts" with whole experts on each rank instead of a slice of every one."""
CASES = [*itertools.product((1, 2), CHECKPOINTS), (2, APART)]
VOCABULARY, PADDED, HIDDEN = 200, 256, 64


@dataclass(frozen=True)
class Rank:
    """What one rank found, beside what vLLM loaded into it."""

    layouts: dict[str, SourceMap]
    disturbed: list[str]
    loaded: dict[str, torch.Tensor]

    @property
    def layout(self) -> SourceMap:
        """What ``discover`` says by itself."""
        return self.layouts["auto"]

    def boxes(self, tensor: str) -> list[Box]:
        """Where a checkpoint tensor lands on this rank."""
        return [box for box in self.layout.boxes if box.tensor == tensor]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {name: write_checkpoint(folder / name, seed=0, **how) for name, how in CHECKPOINTS.items()}
    return made | {APART: made["experts"]}


@pytest.fixture(scope="session")
def one_rank(checkpoints, tmp_path_factory) -> dict[str, list[Rank]]:
    return discovered(1, checkpoints, tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def two_ranks(checkpoints, tmp_path_factory) -> dict[str, list[Rank]]:
    return discovered(2, checkpoints, tmp_path_factory.mktemp("two-ranks"))


@pytest.fixture
def ranks(request, world, case) -> list[Rank]:
    """What each rank of one case found."""
    return request.getfixturevalue("one_rank" if world == 1 else "two_ranks")[case]


def discovered(world: int, checkpoints: dict[str, Path], folder: Path) -> dict[str, list[Rank]]:
    """All cases of one number of ranks, in one process for each rank: importing vLLM costs more than all the rest."""
    cases = [
        {"name": name, "model": str(checkpoints[name]), "dtype": "bfloat16", "experts_apart": name == APART}
        for ranks, name in CASES
        if ranks == world
    ]
    job = write_job(folder / "job.json", folder=str(folder), ranks=world, cases=cases, deadline_s=DEADLINE_S)
    run_programs("loader_rank.py", [[str(rank), job] for rank in range(world)], folder, DEADLINE_S)
    return {case["name"]: [read_rank(folder / case["name"], rank) for rank in range(world)] for case in cases}


def read_rank(folder: Path, rank: int) -> Rank:
    found = msgspec.msgpack.decode((folder / f"rank-{rank}.found").read_bytes())
    layouts = msgspec.convert(found["layouts"], dict[str, SourceMap])
    return Rank(layouts, found["disturbed"], load_file(folder / f"rank-{rank}.safetensors"))


each_case = pytest.mark.parametrize(("world", "case"), CASES)


@each_case
def test_map_rebuilds_what_vllm_loads(ranks, case, checkpoints):
    checkpoint = load_file(checkpoints[case] / "model.safetensors")
    for rank in ranks:
        for name, tensor in rebuilt(rank.layout, checkpoint).items():
            assert torch.equal(bit_view(tensor), bit_view(rank.loaded[name])), name


@each_case
def test_trace_follows_vllm_and_agrees_with_the_probe(ranks, case):
    methods = {"auto", "probe", "trace"} | (set() if case == APART else {"trace without weights"})
    for rank in ranks:
        assert set(rank.layouts) == methods
        assert not rank.layout.probed, "the trace could not follow, and the probe had to help"
        for layout in rank.layouts.values():
            assert not layout.opaque
            assert layout.runtime == rank.layout.runtime
            assert sorted(layout.boxes, key=str) == sorted(rank.layout.boxes, key=str)


@each_case
def test_every_parameter_is_in_the_map_once(ranks, case):
    second_names = {
        "tied, one kv head": {"lm_head.weight": "model.embed_tokens.weight"},
        "experts": {"model.layers.1.mlp.experts.gate.weight": "model.layers.1.mlp.gate.weight"},
        APART: {"model.layers.1.mlp.experts.gate.weight": "model.layers.1.mlp.gate.weight"},
    }.get(case, {})
    for rank in ranks:
        assert set(rank.layout.runtime) == set(rank.loaded) - set(second_names)
        for second, first in second_names.items():
            assert torch.equal(rank.loaded[second], rank.loaded[first])


@each_case
def test_only_padding_of_the_vocabulary_comes_from_nowhere(ranks, world):
    for index, rank in enumerate(ranks):
        first, last = index * PADDED // world, (index + 1) * PADDED // world
        padding = (last - max(first, VOCABULARY)) * HIDDEN if last > VOCABULARY else 0
        heads = {"model.embed_tokens.weight", "lm_head.weight"} & set(rank.layout.runtime)
        assert unfilled(rank.layout) == (dict.fromkeys(heads, padding) if padding else {})


@each_case
def test_ranks_together_hold_the_whole_checkpoint(ranks, case, checkpoints):
    spec = read_spec(checkpoints[case])
    held = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in spec.tensors.items()}
    for rank in ranks:
        for box in rank.layout.boxes:
            held[box.tensor][elements(box)] = True
    nowhere = set.intersection(*(set(landed_nowhere(spec, rank.layout)) for rank in ranks))
    assert nowhere == ({UNUSED} if case == "tied, both heads stored" else set())
    assert {name for name, where in held.items() if not where.all()} == nowhere


@each_case
def test_discovery_gives_the_weights_back(ranks):
    assert [rank.disturbed for rank in ranks] == [[] for _ in ranks]


@pytest.mark.parametrize(("world", "case"), [(2, "tied, one kv head")])
def test_kv_head_is_whole_on_both_ranks_when_there_are_fewer_heads_than_ranks(ranks):
    for layer, which in itertools.product((0, 1), "kv"):
        tensor = f"model.layers.{layer}.self_attn.{which}_proj.weight"
        counts = [[box.count for box in rank.boxes(tensor)] for rank in ranks]
        assert counts == [[(32, HIDDEN)]] * 2


@pytest.mark.parametrize(("world", "case", "width", "holders"), [(2, "experts", 32, [2] * 4), (2, APART, 64, [1] * 4)])
def test_experts_are_sliced_or_apart(ranks, width, holders):
    gates = [f"model.layers.1.mlp.experts.{expert}.gate_proj.weight" for expert in range(4)]
    found = [[box for rank in ranks for box in rank.boxes(gate)] for gate in gates]
    assert [len(boxes) for boxes in found] == holders
    assert {box.count for boxes in found for box in boxes} == {(width, HIDDEN)}


@pytest.mark.parametrize(("world", "case"), [(1, "experts")])
def test_layout_command_shows_the_same_map(ranks, case, checkpoints):
    shown = json.loads(
        run_rlbridge("layout", str(checkpoints[case]), "--engine", "vllm", "--json", deadline_s=DEADLINE_S)
    )
    assert shown["hash"] == map_hash(ranks[0].layout)
    assert [tensor["name"] for tensor in shown["tensors"]] == list(ranks[0].layout.runtime)
    assert not shown["nowhere"]
    assert not shown["probed"]


def rebuilt(layout: SourceMap, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the map says of every runtime tensor, padding as zeros."""
    made = {name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype)) for name, t in layout.runtime.items()}
    for box in layout.boxes:
        made[box.runtime].as_strided(box.count, box.strides, box.offset).copy_(checkpoint[box.tensor][elements(box)])
    return made


def unfilled(layout: SourceMap) -> dict[str, int]:
    """How many elements of each runtime tensor are in no box, where there are any."""
    filled = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in layout.runtime.items()}
    for box in layout.boxes:
        filled[box.runtime].as_strided(box.count, box.strides, box.offset).fill_(True)
    return {name: int((~where).sum()) for name, where in filled.items() if not where.all()}


def elements(box: Box) -> tuple[slice, ...]:
    """The checkpoint elements of ``box`` as an index."""
    return tuple(
        slice(start, start + count * step, step)
        for start, count, step in zip(box.start, box.count, box.step, strict=True)
    )
