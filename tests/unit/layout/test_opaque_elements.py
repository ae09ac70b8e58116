"""Loaders that compute: what they compute is opaque, with its inputs, and a load of those alone renews it."""

from __future__ import annotations

import re

import pytest
import torch

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError

SPEC = CheckpointSpec(
    {
        "plain": TensorSpec((6, 4), "bfloat16"),
        "norm": TensorSpec((8,), "bfloat16"),
        "A_log": TensorSpec((5,), "float32"),
    }
)
METHODS = pytest.mark.parametrize("method", ["auto", "probe"])


def spec_of(*names: str, shape=(6, 4), dtype: str = "bfloat16") -> CheckpointSpec:
    return CheckpointSpec({name: TensorSpec(shape, dtype) for name in names})


def zeros(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape) for name, tensor in spec.tensors.items()}


def computed(layout, runtime: str) -> torch.Tensor:
    """Which elements of a runtime tensor are opaque."""
    mask = torch.zeros(layout.runtime[runtime].shape, dtype=torch.bool)
    for part in layout.opaque:
        if part.runtime == runtime:
            torch.as_strided(mask, part.count, part.strides, part.offset).fill_(True)
    return mask


def inputs(layout, runtime: str) -> set[str]:
    return {name for part in layout.opaque if part.runtime == runtime for name in part.inputs}


def last_element(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.reshape(-1)[:-1], x.reshape(-1)[-1:] + 1]).reshape(x.shape)


CHANGES = {
    "plus one": lambda x: x + 1,
    "negative exponential": lambda x: -torch.exp(x),
    "doubled": lambda x: x * 2,
    "a little smaller": lambda x: (x.bfloat16() * 0.997).float(),  # about half of the values stay as they are
    "absolute": torch.abs,
    "rounded": lambda x: x.to(torch.float8_e4m3fn).float(),
    "scaled by the largest": lambda x: x / x.abs().max().clamp(min=1e-3),
    "one element": last_element,
}


@METHODS
@pytest.mark.parametrize("changed", list(SPEC.tensors))
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_exactly_what_changes_is_opaque(changed, change, method):
    live = zeros(SPEC)

    def load(weights):
        for name, tensor in weights:
            live[name].copy_(change(tensor.float()) if name == changed else tensor)

    layout = discover(SPEC, load, lambda: live, method=method)
    expected = torch.ones(SPEC.tensors[changed].shape, dtype=torch.bool)
    if change is last_element:
        expected.reshape(-1)[:-1] = False
    assert torch.equal(computed(layout, changed), expected)
    assert {part.runtime for part in layout.opaque} == {changed}
    assert layout.opaque_inputs == {changed}
    copied = sum(torch.Size(box.count).numel() for box in layout.boxes if box.runtime == changed)
    assert copied == (~expected).sum()
    assert all((tensor == 0).all() for tensor in live.values())


@METHODS
def test_a_sum_names_both_inputs(method):
    spec = spec_of(*"abcdefgh")
    live = zeros(spec)

    def load(weights):
        found = dict(weights)
        for name in found:
            live[name].copy_(found[name])
        if found.keys() >= {"b", "g"}:  # whose indices differ in every bit but one
            live["b"].copy_(found["b"] + found["g"])

    layout = discover(spec, load, lambda: live, method=method)
    assert inputs(layout, "b") == {"b", "g"}
    assert {part.runtime for part in layout.opaque} == {"b"}


@METHODS
def test_block_scales_depend_on_their_tensor_only(method):
    """Quantisation after loading: the codes and the scales of each tensor."""
    spec = spec_of("up", "down", shape=(8, 8))
    live = {f"{n}.code": torch.zeros(8, 8, dtype=torch.float8_e4m3fn) for n in spec.tensors}
    live |= {f"{n}.scale": torch.zeros(2, 2) for n in spec.tensors}

    def load(weights):
        for name, tensor in weights:
            blocks = tensor.float().view(2, 4, 2, 4)
            scale = blocks.abs().amax((1, 3)) / 448
            live[f"{name}.scale"].copy_(scale)
            live[f"{name}.code"].copy_((blocks / scale[:, None, :, None]).reshape(8, 8))

    layout = discover(spec, load, lambda: live, method=method)
    assert layout.boxes == []
    for name in spec.tensors:
        for runtime in (f"{name}.code", f"{name}.scale"):
            assert computed(layout, runtime).all()
            assert inputs(layout, runtime) == {name}


@METHODS
def test_one_of_several_stacked_experts_is_computed(method):
    spec = spec_of("e0", "e1", "e2")
    live = {"w13": torch.zeros(3, 4, 6)}

    def load(weights):
        for name, tensor in weights:
            e = int(name[1])
            live["w13"][e].copy_((tensor * 2 if e == 1 else tensor).T)

    layout = discover(spec, load, lambda: live, method=method)
    assert computed(layout, "w13").flatten(1).all(1).tolist() == [False, True, False]
    assert len(layout.opaque) == 1
    assert layout.opaque_inputs == {"e1"}
    assert {box.tensor for box in layout.boxes} == {"e0", "e2"}


def swapping(spec: CheckpointSpec, computes: bool):
    """A kernel layout made in place on every call (the halves of ``w13`` swap), and perhaps a computed norm."""
    live = zeros(spec)

    def load(weights):
        for name, tensor in weights:
            live[name].copy_(tensor + 1 if name == "norm" and computes else tensor)
        live["w13"].copy_(live["w13"].roll(3, 0))

    return live, load


@METHODS
def test_a_swap_on_each_call_is_loaded_along(method):
    spec = spec_of("w13", "norm", "other")
    live, load = swapping(spec, computes=False)
    plain = discover(spec, load, lambda: live, method=method)
    assert plain.opaque == []
    assert len([box for box in plain.boxes if box.runtime == "w13"]) == 2

    live, load = swapping(spec, computes=True)
    layout = discover(spec, load, lambda: live, method=method)
    assert computed(layout, "w13").all()
    assert layout.opaque_inputs == {"norm", "w13"}
    assert [box.runtime for box in layout.boxes] == ["other"]


@METHODS
def test_a_loader_that_computes_and_wants_everything(method):
    spec = spec_of("a", "b")
    live = zeros(spec)

    def load(weights):
        found = dict(weights)
        live["a"].copy_(found["a"] + 1)
        live["b"].copy_(found["b"])

    layout = discover(spec, load, lambda: live, method=method)
    assert [(part.runtime, part.inputs) for part in layout.opaque] == [("a", ("a", "b"))]
    assert re.search(r"wants the whole checkpoint: .*KeyError: 'b'", layout.opaque[0].reason)
    assert [box.runtime for box in layout.boxes] == ["b"]


@METHODS
def test_a_loader_that_adds_to_what_is_there_is_refused(method):
    spec = spec_of("w", dtype="float32")
    live = zeros(spec)

    def load(weights):
        live["w"].add_(dict(weights)["w"])

    with pytest.raises(LayoutError, match=r"twice gives different results.*: w;"):
        discover(spec, load, lambda: live, method=method)
    assert (live["w"] == 0).all()


@METHODS
def test_the_backends_own_tables_are_no_weights(method):
    spec = spec_of("w")
    live = zeros(spec) | {"loads": torch.zeros(()), "table": torch.ones(5)}

    def load(weights):
        live["w"].copy_(dict(weights)["w"])
        live["loads"].add_(1)

    layout = discover(spec, load, lambda: live, method=method)
    assert {box.runtime for box in layout.boxes} == {"w"}
    assert layout.opaque == []
    assert live["loads"] == 0


def test_nothing_is_loaded_again_without_opaque_elements():
    spec = spec_of("w")
    live, loads = zeros(spec), []

    def load(weights):
        loads.append([name for name, tensor in weights if live[name].copy_(tensor) is not None])

    discover(spec, load, lambda: live, method="probe")
    assert len(loads) == 1 + 2  # one digit, two proofs
    loads.clear()
    discover(spec, load, lambda: live)
    assert len(loads) == 1 + 2  # the trace, two proofs


@METHODS
def test_a_computed_value_whose_digits_lead_beyond_the_checkpoint(method):
    spec = CheckpointSpec({"a": TensorSpec((6,), "float32"), "b": TensorSpec((6,), "float32")})
    live = {"a": torch.zeros(6), "b": torch.zeros(6, dtype=torch.float8_e4m3fn)}

    def load(weights):
        for name, tensor in weights:
            live[name].copy_(tensor * 2 if name == "a" else tensor)

    layout = discover(spec, load, lambda: live, method=method)
    assert [(part.runtime, part.count, part.inputs) for part in layout.opaque] == [("a", (6,), ("a",))]
    assert [box.runtime for box in layout.boxes] == ["b"]
