"""What discovery cannot do is refused by name, odd loaders are understood, and the live weights always come back."""

from __future__ import annotations

import pytest
import torch

from rlbridge.sync.layout.discover import discover, landed_nowhere
from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError, LoaderFailedError

SPEC = CheckpointSpec(
    {
        "plain": TensorSpec((6, 4), "bfloat16"),
        "norm": TensorSpec((8,), "bfloat16"),
        "A_log": TensorSpec((5,), "float32"),
    }
)


class Engine:
    """Loads by name."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.live = {f"p.{n}": torch.randn(t.shape, generator=generator) for n, t in SPEC.tensors.items()}
        self.live["p.plain"][0, 0] = float("nan")
        bit_view(self.live["p.plain"])[0, 1] = 0x7FC12345
        self.live["value_head"] = torch.randn(4, generator=generator).requires_grad_()
        self.before = {n: t.detach().clone() for n, t in self.live.items()}

    def load(self, weights) -> None:
        for name, tensor in weights:
            self.live[f"p.{name}"].copy_(tensor)

    def discover(self, **how):
        return discover(SPEC, self.load, lambda: self.live, **how)

    def untouched(self) -> bool:
        return all(torch.equal(bit_view(self.live[n].detach()), bit_view(t)) for n, t in self.before.items())


def test_a_copying_loader_is_accepted():
    engine = Engine()
    layout = engine.discover()
    assert {(box.runtime, box.tensor) for box in layout.boxes} == {(f"p.{n}", n) for n in SPEC.tensors}
    assert "value_head" in layout.runtime
    assert engine.untouched()
    assert engine.live["value_head"].requires_grad


@pytest.mark.parametrize("method", ["auto", "probe"])
@pytest.mark.parametrize("call", [2, 3])  # of a trace the first call is the trace's
def test_the_weights_come_back_when_the_loader_fails(call, method):
    engine = Engine()
    calls = 0

    def load(weights):
        nonlocal calls
        calls += 1
        engine.load(weights)
        if calls == call:
            raise RuntimeError("loader broke")

    with pytest.raises(LoaderFailedError, match=r"had taken checkpoint tensor '.*RuntimeError: loader broke"):
        discover(SPEC, load, lambda: engine.live)
    assert calls == call
    assert engine.untouched()


@pytest.mark.parametrize("constant", [0.0, 1.0, 2.0, 0.5])
def test_padding_filled_with_a_constant_is_no_weight(constant):
    spec = CheckpointSpec({"w": TensorSpec((5, 3), "float32")})
    live = {"padded": torch.randn(8, 3)}

    def load(weights):
        live["padded"].fill_(constant)
        live["padded"][2:7].copy_(dict(weights)["w"])

    (box,) = discover(spec, load, lambda: live).boxes
    assert (box.start, box.count, box.offset) == ((0, 0), (5, 3), 6)


def test_what_lands_nowhere_is_told():
    live = {"p.norm": torch.zeros(8)}

    def load(weights):
        live["p.norm"].copy_(dict(weights)["norm"])

    assert landed_nowhere(SPEC, discover(SPEC, load, lambda: live)) == ["plain", "A_log"]


def test_a_loader_that_replaces_parameters():
    parameter = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.bfloat16))
    before = parameter.detach().clone()
    spec = CheckpointSpec({"w": SPEC.tensors["plain"]})

    def load(weights):
        parameter.data = dict(weights)["w"]

    assert len(discover(spec, load, lambda: {"w": parameter}).boxes) == 1
    assert torch.equal(parameter.detach(), before)


def test_a_loader_that_changes_shapes_is_refused():
    live = {"w": torch.zeros(6, 4)}

    def load(weights):
        live["w"] = dict(weights)["plain"].T.contiguous()

    with pytest.raises(LayoutError, match=r"changed the shape.*: w;"):
        discover(SPEC, load, lambda: live)


def test_non_contiguous_tensors_are_addressed_by_logical_index():
    spec = CheckpointSpec({"w": TensorSpec((6, 4), "bfloat16")})
    live = {"w": torch.randn(4, 6).T}
    (box,) = discover(spec, lambda weights: live["w"].copy_(dict(weights)["w"]), lambda: live).boxes
    assert box.strides == (4, 1)


def test_integer_buffers_of_the_checkpoint_are_followed():
    spec = CheckpointSpec(
        {
            "w": TensorSpec((6,), "bfloat16"),
            "steps": TensorSpec((), "int64"),
            "table": TensorSpec((3, 5), "uint8"),
            "zero": TensorSpec((0, 3), "float32"),
        }
    )
    live = {
        "w": torch.zeros(6),
        "steps": torch.tensor(7),
        "table": torch.zeros(5, 3, dtype=torch.int32),
        "mask": torch.ones(4, dtype=torch.bool),
    }

    def load(weights):
        found = dict(weights)
        live["w"].copy_(found["w"])
        live["steps"].copy_(found["steps"])
        live["table"].copy_(found["table"].T)

    layout = discover(spec, load, lambda: live)
    assert [(box.runtime, box.tensor, box.strides) for box in layout.boxes] == [
        ("w", "w", (1,)),
        ("steps", "steps", ()),
        ("table", "table", (1, 3)),
    ]
    assert live["steps"] == 7
    assert live["mask"].all()


def test_tables_that_the_loader_reads_keep_their_values():
    spec = CheckpointSpec({"w": TensorSpec((4, 2), "float32")})
    live = {"w": torch.zeros(4, 2), "row_of": torch.tensor([2, 0, 3, 1])}
    layout = discover(spec, lambda weights: live["w"].copy_(dict(weights)["w"][live["row_of"]]), lambda: live)
    assert {box.runtime for box in layout.boxes} == {"w"}
    assert live["row_of"].tolist() == [2, 0, 3, 1]


def test_a_table_that_the_loader_computes_is_opaque():
    spec = CheckpointSpec({"w": TensorSpec((4,), "float32")})
    live = {"w": torch.zeros(4), "order": torch.zeros(4, dtype=torch.int64)}

    def load(weights):
        live["w"].copy_(dict(weights)["w"])
        live["order"].copy_(live["w"].argsort(descending=True))

    layout = discover(spec, load, lambda: live)
    assert {box.runtime for box in layout.boxes} == {"w"}
    assert [(part.runtime, part.inputs) for part in layout.opaque] == [("order", ("w",))]


ODD = ["bool", "complex64", "float8_e8m0fnu", "uint16", "int8", "float8_e5m2fnuz"]


@pytest.mark.parametrize("dtype", ODD)
def test_any_dtype_can_be_traced(dtype):
    spec = CheckpointSpec({"flags": TensorSpec((3, 4), dtype), "w": TensorSpec((5,), "bfloat16")})
    live = {"flags": torch.zeros(4, 3, dtype=getattr(torch, dtype)), "w": torch.zeros(5)}

    def load(weights):
        for name, tensor in weights:
            live[name].copy_(tensor.T if name == "flags" else tensor)

    layout = discover(spec, load, lambda: live)
    assert [(box.runtime, box.strides) for box in layout.boxes] == [("flags", (1, 3)), ("w", (1,))]
    assert not layout.probed

    probed = discover(spec, load, lambda: live, method="probe")
    carried = dtype not in ("bool", "complex64", "float8_e8m0fnu")
    assert {box.runtime for box in probed.boxes} == ({"flags", "w"} if carried else {"w"})
    assert [part.inputs for part in probed.opaque] == ([] if carried else [("flags",)])


def test_an_unknown_dtype_is_refused():
    with pytest.raises(LayoutError, match="float99"):
        discover(CheckpointSpec({"w": TensorSpec((4,), "float99")}), lambda _: None, lambda: {"w": torch.zeros(4)})


def test_tensors_without_memory_are_refused():
    with pytest.raises(LayoutError, match="'w' has no memory"):
        discover(SPEC, lambda _: None, lambda: {"w": torch.zeros(4, device="meta")})


def test_partly_overlapping_tensors_are_refused():
    base = torch.zeros(10)
    with pytest.raises(LayoutError, match="shares part of its memory"):
        discover(SPEC, lambda _: None, lambda: {"a": base[:6], "b": base[3:]})


def test_a_view_of_a_fused_tensor_has_no_elements_of_its_own():
    spec = CheckpointSpec({n: TensorSpec((2, 3), "float32") for n in ("k", "v")})
    fused = torch.zeros(4, 3)
    live = {"k": fused[:2], "fused": fused}

    def load(weights):
        found = dict(weights)
        fused.copy_(torch.cat([found["k"], found["v"]]))

    layout = discover(spec, load, lambda: live)
    assert list(layout.runtime) == ["fused"]
    assert len(layout.boxes) == 2
