"""Models as ``from_pretrained`` makes them on one rank: dense, tied, and with experts that it stacks at load."""

from __future__ import annotations

import pytest
import torch
from real_loaders import KINDS, TransformersModel, discovered, write_model

from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.discover import landed_nowhere


@pytest.mark.usefixtures("without_threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_every_element_is_found(tmp_path, kind, dtype):
    directory = write_model(tmp_path, kind)
    layout = discovered(directory, TransformersModel(directory, dtype))
    assert landed_nowhere(read_spec(directory), layout) == []
    # gate and up of four experts in one tensor, their down in another, in both layers; the rest is one to one
    assert len(layout.boxes) == len(layout.runtime) + (2 * (7 + 3) if kind == "moe" else 0)


def test_a_loader_that_casts_in_threads_is_understood_too(tmp_path):
    """A trace follows the loader's own thread only; what it gets wrong is noticed, and probed."""
    directory = write_model(tmp_path, "moe")
    discovered(directory, TransformersModel(directory, torch.float32), traceable=False)
