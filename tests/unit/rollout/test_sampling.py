"""Truncated distributions and random streams, without a model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.rollout.engine.sampling import RowSampling, draw, log_probabilities, uniforms

FOUR = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()


def columns(
    rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, greedy: bool = False
) -> RowSampling:
    return RowSampling(
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
        torch.full((rows,), greedy),
    )


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (columns(1), [0.5, 0.3, 0.15, 0.05]),
        (columns(1, temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
        (columns(1, top_k=2), [0.625, 0.375, 0.0, 0.0]),
        (columns(1, top_p=0.79), [0.625, 0.375, 0.0, 0.0]),
        (columns(1, top_p=0.01), [1.0, 0.0, 0.0, 0.0]),
        (columns(1, top_k=3, top_p=0.6), [0.625, 0.375, 0.0, 0.0]),  # mass is counted after top-k: 0.526, 0.842
        (columns(1, top_k=99), [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_the_distribution_is_tempered_and_cut(sampling: RowSampling, expected: list[float]) -> None:
    torch.testing.assert_close(log_probabilities(FOUR, sampling).exp(), torch.tensor([expected]))


def test_each_row_has_its_own_parameters() -> None:
    sampling = RowSampling(
        torch.tensor([1.0, 0.5, 1.0]),
        torch.tensor([1.0, 1.0, 0.6]),
        torch.tensor([0, 0, 0]),
        torch.tensor([False, False, False]),
    )
    together = log_probabilities(FOUR.expand(3, -1), sampling)
    alone = [columns(1), columns(1, temperature=0.5), columns(1, top_p=0.6)]
    torch.testing.assert_close(together, torch.cat([log_probabilities(FOUR, each) for each in alone]))


def test_frequencies_follow_the_distribution() -> None:
    count = 40_000
    numbers = uniforms(np.arange(count, dtype=np.uint64), np.zeros(count, dtype=np.int64))
    tokens, logprobs = draw(FOUR.expand(count, -1), columns(count, top_k=3), numbers)
    frequencies = torch.bincount(tokens, minlength=4) / count
    expected = torch.tensor([0.5, 0.3, 0.15, 0.0]) / 0.95
    assert (frequencies - expected).abs().max() < 5 * (0.25 / count) ** 0.5
    torch.testing.assert_close(logprobs, expected.log()[tokens])


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32),
    temperature=st.floats(0.05, 20.0),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 12),
    uniform=st.sampled_from([0.0, 2.0**-32, 0.5, 1.0 - 2.0**-32]),
)
def test_no_draw_ever_leaves_the_support(
    seed: int, temperature: float, top_p: float, top_k: int, uniform: float
) -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(seed)) * 5
    sampling = columns(5, temperature, top_p, top_k)
    tokens, logprobs = draw(logits, sampling, torch.full((5,), uniform, dtype=torch.float64))
    assert torch.isfinite(logprobs).all()
    expected = log_probabilities(logits, sampling)
    assert (expected.isfinite().sum(-1) <= (top_k or 11)).all()
    torch.testing.assert_close(logprobs, expected[range(5), tokens])


def test_streams_are_counter_based_and_uniform() -> None:
    seeds = np.array([3, 4, 2**64 - 1, 3], dtype=np.uint64)
    counters = np.array([0, 0, 5, 1], dtype=np.int64)
    together = uniforms(seeds, counters)
    for i in range(4):
        assert uniforms(seeds[i : i + 1], counters[i : i + 1])[0] == together[i]
    assert len(set(together.tolist())) == 4
    grid = uniforms(np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200), 200)).reshape(200, 200)
    assert abs(grid.mean().item() - 0.5) < 0.01
    assert abs(torch.corrcoef(torch.stack([grid[:-1].flatten(), grid[1:].flatten()]))[0, 1].item()) < 0.02
    assert abs(torch.corrcoef(torch.stack([grid[:, :-1].flatten(), grid[:, 1:].flatten()]))[0, 1].item()) < 0.02
