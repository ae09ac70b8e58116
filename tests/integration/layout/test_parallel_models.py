"""Real parallel models on real ranks: their own loaders are understood exactly, and any of them can feed any other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from delivery import Held, deliver
from ranks import run_ranks
from real_loaders import KINDS, TransformersModel, assert_equal, discovered, write_model

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.source_map import SourceMap

PROGRAM = Path(__file__).with_name("layout_ranks.py")
DEADLINE_S = 400.0

pytestmark = pytest.mark.timeout(450)  # the ranks of all of these tests start with the first one

ON_TRAINERS = [f"{how}-{kind}" for how in ("fsdp2", "fsdp4", "fsdp2tp2") for kind in KINDS] + ["hsdp", "policy"]
ON_ENGINES = [f"tp2-{kind}" for kind in KINDS] + ["pp2"]


@dataclass(frozen=True)
class Seen:
    """What the ranks of one layout left: maps, and the tensors that the engine itself had loaded."""

    kind: str
    ranks: list[Held]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models, and what all ranks found; every rank has compared its map with its engine, bit for bit."""
    folder = tmp_path_factory.mktemp("parallel")
    for kind in KINDS:
        write_model(folder / kind, kind)
    run_ranks(PROGRAM, 4, str(folder), folder=folder, deadline_s=DEADLINE_S)
    return folder


def seen(folder: Path, label: str) -> Seen:
    files = [torch.load(file, weights_only=True) for file in sorted(folder.glob(f"{label}-[0-9].pt"))]
    ranks = [Held(msgspec.msgpack.decode(file["layout"], type=SourceMap), file["live"]) for file in files]
    return Seen(files[0]["kind"], ranks)


@pytest.mark.parametrize("label", ON_TRAINERS + ON_ENGINES)
def test_ranks_together_hold_the_whole_checkpoint(folder, label):
    what = seen(folder, label)
    spec = read_spec(folder / what.kind)
    held = {name: torch.zeros(tensor.shape, dtype=torch.int32) for name, tensor in spec.tensors.items()}
    for rank in what.ranks:
        for box in [*rank.layout.boxes, *rank.layout.aliases]:
            area = zip(box.start, box.count, box.step, strict=True)
            held[box.tensor][tuple(slice(s, s + n * step, step) for s, n, step in area)] += 1
    assert [name for name, count in held.items() if (count == 0).any()] == []
    if label.startswith(("fsdp2-", "fsdp4-", "policy")):  # pure shards: nothing is held twice
        assert [name for name, count in held.items() if (count > 1).any()] == []


def test_loaders_that_communicate_are_understood_like_those_that_do_not(folder):
    expected = [rank.layout.boxes for rank in seen(folder, "policy").ranks]
    for label in ("scatter", "broadcast"):
        layouts = [rank.layout for rank in seen(folder, label).ranks]
        assert [layout.boxes for layout in layouts] == expected
        assert all(layout.probed.keys() == layout.runtime.keys() for layout in layouts)  # no trace of messages


def test_stages_of_a_pipeline_have_their_own_layers_only(folder):
    first, last = (set(rank.layout.runtime) for rank in seen(folder, "pp2").ranks)
    assert not first & last
    assert "model.embed_tokens.weight" in first
    assert "lm_head.weight" in last
    assert {name.split(".")[2] for name in first if ".layers." in name} == {"0"}
    assert {name.split(".")[2] for name in last if ".layers." in name} == {"1"}


def test_strided_shards_of_data_and_tensor_parallel(folder):
    """Placement (_StridedShard(0, split_factor=2), Shard(0)): tensor parallel cuts first, data parallel within."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows = [
        next(box for box in rank.layout.boxes if box.runtime == name) for rank in seen(folder, "fsdp2tp2-dense").ranks
    ]
    assert [(box.start[0], box.count[0]) for box in rows] == [(0, 8), (16, 8), (8, 8), (24, 8)]


def test_experts_are_stacked_and_cut_by_tensor_parallel(folder):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    for rank, held in enumerate(seen(folder, "tp2-moe").ranks):
        boxes = [box for box in held.layout.boxes if box.runtime == name]
        assert held.layout.runtime[name].shape == (4, 12, 16)
        assert len(boxes) == 8  # gate and up of four experts
        assert {(box.start[0], box.count[0]) for box in boxes} == {(rank * 6, 6)}


@pytest.mark.usefixtures("without_threads")
@pytest.mark.parametrize("trainer", ON_TRAINERS)
def test_every_trainer_feeds_every_engine(folder, trainer):
    source = seen(folder, trainer)
    directory = folder / source.kind
    alone = TransformersModel(directory, torch.bfloat16)
    engines = [what for label in ON_ENGINES if (what := seen(folder, label)).kind == source.kind]
    engines.append(Seen(source.kind, [Held(discovered(directory, alone), alone.live_tensors())]))
    senders = {f"t{rank}": held for rank, held in enumerate(source.ranks)}
    receivers = {
        f"r{replica}.{rank}": Held(held.layout, {n: torch.full_like(t, 7.0) for n, t in held.live.items()})
        for replica, engine in enumerate(engines)
        for rank, held in enumerate(engine.ranks)
    }
    deliver(read_spec(directory), senders, receivers, nodes=3, bucket_bytes=4096)
    for replica, engine in enumerate(engines):
        for rank, held in enumerate(engine.ranks):
            owners = {name: held.live[name] for name in held.layout.runtime}
            received = receivers[f"r{replica}.{rank}"].live
            assert_equal({name: received[name] for name in owners}, owners)
