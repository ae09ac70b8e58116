"""Every random loader is recovered exactly, by the probe and by the trace; exactly what it computes is opaque."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from random_loaders import SKIPS_WHAT_IS_INCOMPLETE, VALUE_DEPENDENT, RandomLoader, random_loaders

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import paint
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.values import RandomBits

some = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
METHODS = pytest.mark.parametrize("method", ["auto", "probe"])


def discovered(loader: RandomLoader, method: str) -> SourceMap:
    before = {name: tensor.clone() for name, tensor in loader.live.items()}
    layout = discover(loader.spec, loader.load_weights, loader.live_tensors, method=method)
    assert all(torch.equal(bit_view(before[n]), bit_view(t)) for n, t in loader.live.items())
    return layout


def opaque_inputs(layout: SourceMap, runtime: str, size: int) -> dict[int, frozenset[str]]:
    """Opaque element to its inputs; pieces must not overlap."""
    found: dict[int, frozenset[str]] = {}
    for part in layout.opaque:
        if part.runtime == runtime:
            places = torch.as_strided(torch.arange(size), part.count, part.strides, part.offset).reshape(-1).tolist()
            assert found.keys().isdisjoint(places)
            found |= dict.fromkeys(places, frozenset(part.inputs))
    return found


def used(loader: RandomLoader) -> set[str]:
    """The checkpoint tensors that the loader looks at: one that wants the whole mapping misses no others."""
    return {source for recipe in loader.recipes for part in recipe.parts for source in part.sources}


@METHODS
def test_moves_are_recovered_exactly(method):
    @given(random_loaders())
    @some
    def check(loader):
        layout = discovered(loader, method)
        painted = paint(loader.spec, layout.runtime, layout.boxes)
        for name, expected in loader.expected().items():
            assert painted[name].tolist() == expected.ids.tolist()
        assert layout.opaque == []

    check()


@METHODS
def test_exactly_the_touched_elements_are_opaque(method):
    @given(random_loaders(arithmetic=True))
    @some
    def check(loader):
        layout = discovered(loader, method)
        painted = paint(loader.spec, layout.runtime, layout.boxes)
        for name, expected in loader.expected().items():
            opaque = opaque_inputs(layout, name, expected.ids.numel())
            touched = set(expected.touched.nonzero().reshape(-1).tolist())
            copied = dict(enumerate(expected.ids.tolist()))
            if loader.arithmetic in VALUE_DEPENDENT:  # what escapes by its value may take its neighbours with it
                assert opaque.keys() >= touched
                assert all(painted[name][at] == (0 if at in opaque else copied[at]) for at in copied)
                continue
            assert opaque.keys() == touched
            assert painted[name].tolist() == expected.ids.tolist()
            if loader.style == "whole mapping" and not used(loader) <= set().union(*expected.inputs.values()):
                assert all(names == frozenset(loader.spec.tensors) for names in opaque.values())
            elif loader.style in SKIPS_WHAT_IS_INCOMPLETE:
                assert all(opaque[at] >= names for at, names in expected.inputs.items())
            else:
                assert opaque == expected.inputs

    check()


def test_a_receiver_that_writes_copies_and_loads_opaque_inputs_has_everything():
    @given(random_loaders(arithmetic=True))
    @some
    def check(loader):
        layout = discovered(loader, "auto")
        old, new = RandomBits(loader.spec, 7), RandomBits(loader.spec, 8)
        loader.load_weights((name, new(name)) for name in loader.spec.tensors)
        expected = {name: tensor.clone() for name, tensor in loader.live.items()}
        loader.load_weights((name, old(name)) for name in loader.spec.tensors)
        for box in layout.boxes:
            axes = zip(box.start, box.count, box.step, strict=True)
            values = new(box.tensor)[tuple(slice(a, a + (n - 1) * s + 1, s) for a, n, s in axes)]
            _write(loader.live[box.runtime], box, values)
        inputs = [name for name in loader.spec.tensors if name in layout.opaque_inputs]
        if inputs:
            loader.load_weights((name, new(name)) for name in inputs)
        claimed = {name: opaque_inputs(layout, name, tensor.numel()).keys() for name, tensor in expected.items()}
        painted = paint(loader.spec, layout.runtime, layout.boxes)
        for name in layout.runtime:
            same = bit_view(loader.live[name]).reshape(-1) == bit_view(expected[name]).reshape(-1)
            assert all(same[at] for at in range(same.numel()) if painted[name][at] or at in claimed[name])

    check()


def _write(live: torch.Tensor, box, values: torch.Tensor) -> None:
    flat = live.reshape(-1).clone()
    torch.as_strided(flat, box.count, box.strides, box.offset).copy_(values)
    live.copy_(flat.reshape(live.shape))
