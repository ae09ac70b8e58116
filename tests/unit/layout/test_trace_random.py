"""Random loaders are traced exactly: every copy with its place, every computed element with its inputs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from random_loaders import RandomLoader, random_loaders

from rlbridge.sync.layout.dtypes import bit_view
from rlbridge.sync.layout.elements import paint, strided
from rlbridge.sync.layout.live import owners, specs
from rlbridge.sync.layout.trace import Traced, trace


def check(loader: RandomLoader) -> Traced:
    """Compare a trace with the oracle, element by element."""
    before = {name: tensor.clone() for name, tensor in loader.live.items()}
    traced = trace(loader.spec, loader.load_weights, loader.live_tensors)
    assert traced.untraced == {}
    runtime = specs(owners(loader.live_tensors()))
    painted = paint(loader.spec, runtime, traced.boxes)
    expected = loader.expected()
    for name in runtime:
        want = expected[name]
        assert painted[name].tolist() == want.ids.tolist(), loader
        opaque = [part for part in traced.opaque if part.runtime == name]
        found = {}
        for part in opaque:
            index = np.arange(want.ids.numel(), dtype=np.int64)
            for at in strided(index, part.offset, part.count, part.strides).reshape(-1).tolist():
                assert at not in found
                found[at] = frozenset(part.inputs)
        assert found == want.inputs, loader
    for name, tensor in loader.live.items():
        assert torch.equal(bit_view(tensor.contiguous()), bit_view(before[name].contiguous()))
    return traced


@settings(max_examples=60, deadline=None)
@given(random_loaders())
def test_copies_are_traced_exactly(loader):
    assert check(loader).opaque == []


@settings(max_examples=60, deadline=None)
@given(random_loaders(arithmetic=True))
def test_exactly_the_touched_elements_are_opaque(loader):
    check(loader)
