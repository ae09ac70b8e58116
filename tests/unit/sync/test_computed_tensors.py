"""Whole tensors on their way: announced, planned, counted, put together; and what is refused, with its mend."""

from __future__ import annotations

import msgspec
import pytest
import torch

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.coverage import coverage
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.member import Binding
from rlbridge.sync.opaque import (
    EXPORT,
    WHOLE,
    Exports,
    Loading,
    StagedWholes,
    WholeTensors,
    check_budget,
    check_live,
    inputs_of,
    refuse_without_export,
    with_virtual,
)
from rlbridge.sync.packing import pack
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.simulate import simulate
from rlbridge.transport.errors import LayoutError, PlanError, WorkerError
from rlbridge.transport.topology import Topology

SPEC = CheckpointSpec(
    {
        "w": TensorSpec((64, 32), "float32"),
        "norm": TensorSpec((32,), "float32"),
        "scale": TensorSpec((), "float32"),
        "none": TensorSpec((0, 4), "float32"),
    }
)
WIRE = dict.fromkeys(SPEC.tensors, "bfloat16")


def whole_box(runtime: str, tensor: str) -> Box:
    shape = SPEC.tensors[tensor].shape
    strides = (32, 1)[2 - len(shape) :]
    return Box(runtime, tensor, (0,) * len(shape), shape, (1,) * len(shape), 0, strides)


def trainer(rank: int) -> SourceMap:
    """Half of the rows of ``w``; rank 0 has the rest."""
    rows = Box("p.w", "w", (rank * 32, 0), (32, 32), (1, 1), 0, (32, 1))
    rest = [whole_box("p.norm", "norm"), whole_box("p.scale", "scale")] if rank == 0 else []
    runtime = {"p.w": TensorSpec((32, 32), "float32")}
    return SourceMap(runtime | {box.runtime: TensorSpec(box.count, "float32") for box in rest}, [rows, *rest])


ENGINE = SourceMap(
    {
        "w": TensorSpec((64, 32), "bfloat16"),
        "w_int8": TensorSpec((64, 32), "int8"),
        "norm": TensorSpec((34,), "bfloat16"),
        "a": TensorSpec((), "float32"),
    },
    [whole_box("w", "w")],
    [],
    [
        Opaque("w_int8", 0, (64, 32), (32, 1), ("w", "scale"), "aten.round"),
        Opaque("norm", 0, (32,), (1,), ("norm",), "aten.add"),
        Opaque("a", 0, (), (), ("scale", "none"), "aten.exp"),
    ],
)
INPUTS = inputs_of(SPEC, ENGINE.opaque_inputs, WIRE)


def planned(bucket_bytes: int = 256):
    senders = {"t0": trainer(0), "t1": trainer(1)}
    receivers = {"r": with_virtual(ENGINE, WHOLE, INPUTS)}
    found = correspond(SPEC, senders, receivers, WIRE)
    topology = Topology(dict.fromkeys(("t0", "t1", "r"), "node"))
    plan = plan_transfer(found, topology, bucket_bytes=bucket_bytes)
    return found, plan, senders, receivers


def test_whole_tensors_are_planned_like_any_other_and_travel_once() -> None:
    _, plan, senders, receivers = planned()
    programs = {worker: plan.program(worker) for worker in plan.workers}
    simulated = simulate(SPEC, senders, receivers, programs)
    assert simulated.received_bytes["r"] == (64 * 32 + 32 + 1) * 2, "w is needed twice and sent once"
    assert plan.report()["buckets"] > 8


def test_staged_payloads_become_the_tensors_that_the_loader_asks_for() -> None:
    _, plan, *_ = planned()
    checkpoint = {name: torch.randn(tensor.shape) for name, tensor in SPEC.tensors.items()}
    live = [
        {"p.w": checkpoint["w"][:32].clone(), "p.norm": checkpoint["norm"], "p.scale": checkpoint["scale"]},
        {"p.w": checkpoint["w"][32:].clone()},
    ]
    payloads: dict[int, torch.Tensor] = {}
    for rank, tensors in enumerate(live):
        for bucket in plan.program(f"t{rank}").buckets:
            payloads[bucket.bucket] = torch.empty(bucket.payload_bytes, dtype=torch.uint8)
            pack(bucket, tensors, payloads[bucket.bucket])
    program = plan.program("r")
    wholes = StagedWholes(program, payloads.__getitem__, INPUTS)
    for name in SPEC.tensors:
        assert torch.equal(wholes.tensor(name), checkpoint[name].to(torch.bfloat16)), name
    engine = {"w": torch.zeros(64, 32, dtype=torch.bfloat16)}
    for number, bucket in Binding().to(program, engine).items():
        bucket.unpack(payloads[number])
    assert torch.equal(engine["w"], checkpoint["w"].to(torch.bfloat16)), "copies alone, without host buffers"


def test_binding_follows_the_one_tensor_that_moved() -> None:
    _, plan, *_ = planned()
    program, binding = plan.program("t0"), Binding()
    live = {"p.w": torch.ones(32, 32), "p.norm": torch.ones(32), "p.scale": torch.ones(())}
    before = dict(binding.to(program, live))
    live["p.norm"] = torch.full((32,), 2.0)
    after = binding.to(program, live)
    of_norm = {b.bucket for b in program.buckets if any(piece.runtime == "p.norm" for piece in b.pieces)}
    assert {number for number in after if after[number] is not before[number]} == of_norm
    assert binding.to(program, live) == after
    del live["p.w"]
    with pytest.raises(PlanError, match=r"p\.w"):
        Binding().to(program, live)


def test_coverage_accounts_for_every_element() -> None:
    found, *_ = planned()
    report = coverage(found)
    (engine,) = report.receivers
    assert (engine.copied, engine.computed, engine.constant, engine.whole) == (64 * 32, 64 * 32 + 32 + 1, 2, 4)
    assert engine.copied + engine.computed + engine.constant == 2 * 64 * 32 + 34 + 1
    assert [(s.worker, s.tensors, s.held, s.unused, s.exported) for s in report.senders] == [
        ("t0", 3, 3, 0, 0),
        ("t1", 1, 1, 0, 0),
    ]
    text = str(report)
    assert "r: w_int8: 2048 elements from w, scale (aten.round)" in text
    assert len({len(line) for line in text.splitlines()[:2]}) == 1, "columns line up"
    assert msgspec.json.decode(msgspec.json.encode(report), type=type(report)) == report


def test_replicated_elements_are_counted_whatever_their_shapes() -> None:
    twice = SourceMap(
        {"a": TensorSpec((64, 32), "float32"), "b": TensorSpec((10, 32), "float32")},
        [whole_box("a", "w"), Box("b", "w", (5, 0), (10, 32), (1, 1), 0, (32, 1))],
    )
    (engine,) = coverage(correspond(SPEC, {"t0": trainer(0), "t1": trainer(1)}, {"r": twice})).receivers
    assert engine.replicated == 10 * 32


def test_senders_exports_serve_what_their_loader_computed() -> None:
    part = msgspec.structs.replace(ENGINE.opaque[1], runtime="p.norm")
    computing = SourceMap({"p.norm": TensorSpec((32,), "float32")}, [], [], [part])
    sender = with_virtual(computing, EXPORT, inputs_of(SPEC, computing.opaque_inputs, WIRE))
    receiver = SourceMap({"norm": TensorSpec((32,), "bfloat16")}, [whole_box("norm", "norm")])
    found = correspond(SPEC, {"t": sender}, {"r": receiver}, WIRE)
    assert [(atom.tensor, atom.holders) for atom in found.atoms()] == [("norm", ("t",))]
    (counted,) = coverage(found).senders
    assert (counted.tensors, counted.held, counted.computed, counted.unused, counted.exported) == (1, 0, 1, 0, 1)
    with pytest.raises(LayoutError, match=r"p\.norm from norm \(aten.add\)[\s\S]*export"):
        raise refuse_without_export(computing)


def test_senders_that_hold_another_kind_of_numbers_are_named() -> None:
    integers = SourceMap({"p.norm": TensorSpec((32,), "int8")}, [whole_box("p.norm", "norm")])
    receiver = SourceMap({"norm": TensorSpec((32,), "bfloat16")}, [whole_box("norm", "norm")])
    with pytest.raises(LayoutError, match=r"t: p\.norm is int8, norm travels as bfloat16"):
        correspond(SPEC, {"t": integers}, {"r": receiver}, WIRE)


def test_a_live_tensor_must_not_look_like_a_virtual_one() -> None:
    layout = SourceMap({"whole:w": TensorSpec((64, 32), "float32")}, [])
    with pytest.raises(LayoutError, match="whole:w"):
        with_virtual(layout, WHOLE, INPUTS)


def test_budget_names_bytes_and_mend() -> None:
    needed = (64 * 32 + 32 + 1) * 2
    assert check_budget(INPUTS, 100, needed + 100) == needed
    assert check_budget({}, 100, 10) == 0
    with pytest.raises(LayoutError, match=f"{needed} bytes .*staging_bytes={needed + 99}.*at least {needed + 100}"):
        check_budget(INPUTS, 100, needed + 99)


def test_live_tensors_that_changed_are_named() -> None:
    live = {
        "w": torch.zeros(32, 64, dtype=torch.bfloat16),
        "w_int8": torch.zeros(64, 32),
        "norm": torch.zeros(34, dtype=torch.bfloat16),
    }
    with pytest.raises(LayoutError) as caught:
        check_live(ENGINE, live)
    assert "w was [64, 32] bfloat16, is [32, 64] bfloat16" in str(caught.value)
    assert "w_int8 was [64, 32] int8, is [64, 32] float32" in str(caught.value)
    assert "a was [] float32, is gone" in str(caught.value)


def test_loaders_may_iterate_twice_or_ask_for_the_next_one() -> None:
    made: list[str] = []

    def make(name: str) -> torch.Tensor:
        made.append(name)
        return torch.zeros(1)

    weights = WholeTensors(["a", "b"], make)
    assert made == []
    assert next(weights)[0] == "a"
    assert made == ["a"], "one at a time"
    assert [name for name, _ in weights] == [name for name, _ in weights] == ["a", "b"]


def test_what_the_engine_raises_names_version_and_step() -> None:
    def load(weights: object) -> None:
        raise KeyError("w_int8")

    with pytest.raises(WorkerError, match=r"version 7: load_weights on .*norm.* raised KeyError: 'w_int8'"):
        Loading(INPUTS, load, None).finish(7, lambda name: torch.zeros(1))
    with pytest.raises(WorkerError, match="version 8: after_load raised ZeroDivisionError"):
        Loading({}, load, lambda: 1 / 0).finish(8, lambda name: torch.zeros(1))


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (torch.zeros(31), r"\[31\] float32, but the checkpoint has \[32\]"),
        (torch.zeros(32, dtype=torch.int8), r"\[32\] int8"),
        (torch.zeros(32, device="meta"), "full_tensor"),
        (None, "NoneType, not a tensor"),
    ],
)
def test_exports_of_another_form_are_refused_by_name(returned: object, words: str) -> None:
    exports = Exports(inputs_of(SPEC, ["norm"], WIRE), {"norm"}, lambda name: returned)
    with pytest.raises(LayoutError, match=rf"export\('norm'\) returned .*{words}"):
        list(exports.take(0))


def test_snapshots_of_exports_have_the_wire_dtype_and_keep_their_memory() -> None:
    value = torch.randn(32, requires_grad=True)
    exports = Exports(inputs_of(SPEC, ["norm", "w"], WIRE), {"norm"}, lambda name: value)
    snapshot: dict[str, torch.Tensor] = {}
    places = []
    for version in range(2):
        for virtual, tensor in exports.take(version):
            exports.copy(tensor, virtual, snapshot)
        places.append(snapshot["export:norm"].data_ptr())
    assert list(snapshot) == ["export:norm"], "the others only take part"
    assert torch.equal(snapshot["export:norm"], value.detach().to(torch.bfloat16))
    assert places[0] == places[1]
