"""Loaders with a fault, and trainers of another format: named before anything is written, or followed to the letter."""

from __future__ import annotations

import pytest
import torch
from engine_loaders import D, H, Megatron, Place, RowShards, Vllm, checkpoint_spec

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.coverage import coverage
from rlbridge.sync.layout.discover import discover, landed_nowhere
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError, LoaderFailedError

KV = 2
SPEC = checkpoint_spec(KV)
ALONE = Place(0, 1, KV)


def layout(worker, load=None) -> SourceMap:
    """The worker's layout; its weights must be as before, whatever comes of it."""
    for tensor in worker.live.values():
        tensor.fill_(3)
    try:
        return discover(SPEC, load or worker.load_weights, lambda: worker.live)
    finally:
        assert all((tensor == 3).all() for tensor in worker.live.values())


def without(worker, *dropped: str):
    """The worker's loader, which forgets some tensors."""
    return lambda weights: worker.load_weights((n, t) for n, t in weights if n not in dropped)


def trainers(ranks: int = 2) -> dict[str, SourceMap]:
    return {f"t{r}": layout(RowShards(Place(r, ranks, KV))) for r in range(ranks)}


def test_an_engine_that_drops_a_tensor_is_refused_by_name():
    engine = Vllm(ALONE)
    receiver = layout(engine, without(engine, "o", "norm"))
    with pytest.raises(LayoutError, match="stale") as caught:
        correspond(SPEC, trainers(), {"r": receiver})
    assert "r: o_proj [16, 32] bfloat16\n" in str(caught.value)
    assert "r: norm [16] bfloat16\n" in str(caught.value)
    assert "qkv_proj" not in str(caught.value)


def test_an_engine_that_drops_a_part_of_a_fused_tensor_shows_in_the_coverage():
    engine = Vllm(ALONE)
    whole, holed = layout(engine), layout(engine, without(engine, "v"))
    report = coverage(correspond(SPEC, trainers(), {"holed": holed, "whole": whole})).receivers
    missing = {it.worker: it.constant for it in report}
    assert missing["holed"] - missing["whole"] == KV * D * H
    assert landed_nowhere(SPEC, whole) == []
    assert landed_nowhere(SPEC, holed) == ["v"]


def test_a_trainer_that_drops_tensors_is_refused_by_name():
    senders = {}
    for rank in range(2):
        trainer = Megatron(Place(rank, 2, KV))
        senders[f"t{rank}"] = layout(trainer, without(trainer, "down", "experts.3.up"))
    with pytest.raises(LayoutError, match="no sender holds") as caught:
        correspond(SPEC, senders, {"r": layout(Vllm(ALONE))})
    assert "down: 384 elements needed by r (in down_proj)" in str(caught.value)
    assert "experts.3.up: 192 elements needed by r (in w13_weight)" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 3


def test_one_trainer_rank_that_drops_its_shard_is_noticed():
    trainer = RowShards(Place(1, 2, KV))
    senders = trainers() | {"t1": layout(trainer, without(trainer, "embed"))}
    with pytest.raises(LayoutError, match=r"embed: 400 elements needed by r \(in embed_tokens\)"):
        correspond(SPEC, senders, {"r": layout(Vllm(ALONE))})


def test_a_loader_that_writes_a_tensor_twice_is_the_same_loader():
    engine = Vllm(ALONE)

    def twice(weights):
        for name, tensor in weights:
            engine.load_weights([(name, tensor), (name, tensor)])

    assert layout(engine, twice) == layout(engine)


def test_a_loader_that_writes_one_tensor_over_another_is_followed_and_shows_what_it_lost():
    engine = Vllm(ALONE)

    def misled(weights):
        engine.load_weights(("up" if name == "gate" else "gate" if name == "up" else name, t) for name, t in weights)
        first, second = engine.live["gate_up_proj"].chunk(2)
        first.copy_(second)

    found = layout(engine, misled)
    boxes = [(box.tensor, box.offset) for box in found.boxes if box.runtime == "gate_up_proj"]
    assert boxes == [("gate", 0), ("gate", 24 * H)]
    assert landed_nowhere(SPEC, found) == ["up"]


@pytest.mark.parametrize("engine", [Megatron, Vllm])
def test_a_loader_for_another_shape_fails_with_its_own_words_and_the_tensor(engine):
    with pytest.raises(LoaderFailedError, match=r"had taken checkpoint tensor '\w+' \[.*(size|shape|length)"):
        layout(engine(Place(0, 1, 4)))


def test_an_engine_that_drops_packed_integers_is_refused_by_name():
    spec = CheckpointSpec({"q": TensorSpec((4, 4), "int32"), "w": TensorSpec((4, 4), "float32")})
    live = {
        "q": torch.zeros(4, 4, dtype=torch.int32),
        "w": torch.zeros(4, 4),
        "slots": torch.arange(4, dtype=torch.int32),
    }

    def load(weights):
        live["w"].copy_(dict(weights)["w"])

    receiver = discover(spec, load, lambda: live)
    holder = discover(spec, lambda weights: [live[n].copy_(t) for n, t in weights], lambda: live)
    with pytest.raises(LayoutError, match="stale") as caught:
        correspond(spec, {"t": holder}, {"r": receiver})
    assert "r: q [4, 4] int32" in str(caught.value)
    assert "slots" not in str(caught.value)


def test_a_trainer_of_integers_is_refused_by_name():
    trainer = RowShards(ALONE)
    trainer.live["o"] = trainer.live["o"].to(torch.int8)
    trainer.live["up"] = trainer.live["up"].to(torch.int8)
    with pytest.raises(LayoutError, match="another kind of numbers") as caught:
        correspond(SPEC, {"t": layout(trainer)}, {"r": layout(Vllm(ALONE))})
    assert str(caught.value).splitlines()[1:-1] == [
        "  t: o is int8, o travels as bfloat16",
        "  t: up is int8, up travels as bfloat16",
    ]
