"""Backends that would be written wrongly, or believed wrongly, without a word."""

from __future__ import annotations

import pytest
import torch

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.layout.values import RandomBits
from rlbridge.transport.errors import LayoutError

METHODS = pytest.mark.parametrize("method", ["auto", "probe"])


def spec_of(*names: str, shape: tuple[int, ...] = (8, 32)) -> CheckpointSpec:
    return CheckpointSpec({name: TensorSpec(shape, "bfloat16") for name in names})


def zeros(spec: CheckpointSpec) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in spec.tensors.items()}


@pytest.mark.parametrize(
    "copied", [lambda t: t.clone(), lambda t: t.float(), lambda t: t.t().contiguous()], ids=["clone", "cast", "moved"]
)
def test_copies_of_live_tensors_are_refused_before_anything_is_written(copied):
    spec, weight = spec_of("w"), torch.ones(8, 32, dtype=torch.bfloat16)
    calls = []

    def load(weights):
        calls.append(1)
        for _, tensor in weights:
            weight.copy_(tensor)

    with pytest.raises(LayoutError, match=r"other memory at each call for w; .*no \.to\(dtype\)"):
        discover(spec, load, lambda: {"w": copied(weight)})
    assert not calls
    assert (weight == 1).all()


@METHODS
def test_nothing_beside_a_strided_tensor_is_written(method):
    """A column of a larger tensor, beside a computed tensor, which makes discovery write copies itself."""
    spec = CheckpointSpec({"b": TensorSpec((64,), "bfloat16"), "u": TensorSpec((4, 8), "bfloat16")})
    around = torch.full((64, 16), 5.0, dtype=torch.bfloat16)
    live = {"b": around[:, 3], "u": torch.zeros(4, 8, dtype=torch.bfloat16)}

    def load(weights):
        for name, tensor in weights:
            live[name].copy_(tensor if name == "b" else tensor * 2)

    layout = discover(spec, load, lambda: live, method=method)
    assert (around == 5).all()
    assert [box.tensor for box in layout.boxes] == ["b"]
    assert layout.opaque_inputs == {"u"}
    assert "b" not in layout.probed


@METHODS
def test_a_loader_may_go_through_its_weights_twice(method):
    spec = spec_of("a", "b")
    live = zeros(spec)

    def load(weights):
        names = [name for name, _ in weights]
        for name, tensor in weights:
            assert name in names
            live[name].copy_(tensor)

    layout = discover(spec, load, lambda: live, method=method)
    assert sorted(box.tensor for box in layout.boxes) == ["a", "b"]
    assert layout.opaque == []


def test_a_loader_may_take_single_weights():
    spec = spec_of("a", "b")
    live = zeros(spec)

    def load(weights):
        for _ in range(2):
            name, tensor = next(weights)
            live[name].copy_(tensor)

    assert sorted(box.tensor for box in discover(spec, load, lambda: live).boxes) == ["a", "b"]


@METHODS
def test_a_scale_read_out_in_python_depends_on_its_tensor(method):
    """The largest magnitude of a tensor as a number: no trace sees it, and it must not look like a constant."""
    spec = spec_of("w", shape=(64, 64))
    live = {"q": torch.zeros(64, 64, dtype=torch.int8), "scale": torch.zeros(1)}

    def load(weights):
        for _, tensor in weights:
            scale = tensor.float().abs().max().item() / 127
            live["q"].copy_((tensor.float() / scale).round())
            live["scale"].fill_(scale)

    layout = discover(spec, load, lambda: live, method=method)
    assert {part.runtime: part.inputs for part in layout.opaque} == {"q": ("w",), "scale": ("w",)}
    assert layout.boxes == []


def test_the_largest_magnitude_changes_with_every_flip():
    spec = spec_of(*(f"t{i}" for i in range(20)))
    for seed in range(3):
        for name in spec.tensors:
            plain, flipped = RandomBits(spec, seed)(name).clone(), RandomBits(spec, seed, [name])(name)
            ratio = (plain.abs().max() / flipped.abs().max()).item()
            assert ratio > 8 or ratio < 1 / 8
