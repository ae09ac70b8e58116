"""Advantages against the formulas written out in NumPy, token by token."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.trainer.advantages import (
    batch_normalized_advantages,
    generalized_advantages,
    group_relative_advantages,
    leave_one_out_advantages,
)

REWARDS = st.floats(-10, 10, width=32)


def written_out_group_relative(rewards, groups, normalize_std):
    out = np.zeros(len(rewards))
    for group in set(groups):
        rows = [row for row, other in enumerate(groups) if other == group]
        own = np.array([rewards[row] for row in rows], dtype=np.float64)
        if own.min() == own.max():
            continue
        for row in rows:
            out[row] = rewards[row] - own.mean()
            if normalize_std:
                out[row] /= own.std()
    return out


@settings(deadline=None)
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=24), normalize_std=st.booleans())
def test_group_relative_advantages_follow_the_formula(rows, normalize_std):
    rewards, groups = zip(*rows, strict=True)
    got = group_relative_advantages(torch.tensor(rewards), torch.tensor(groups), normalize_std=normalize_std)
    expected = written_out_group_relative(rewards, groups, normalize_std)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exact_zeros_although_their_mean_is_rounded(normalize_std):
    rewards = torch.full((7,), 0.1)
    got = group_relative_advantages(rewards, torch.zeros(7, dtype=torch.long), normalize_std=normalize_std)
    assert got.tolist() == [0.0] * 7


def test_a_group_of_one_gets_zero_and_others_are_untouched():
    rewards, groups = torch.tensor([5.0, 0.0, 1.0]), torch.tensor([7, 3, 3])
    got = group_relative_advantages(rewards, groups, normalize_std=True)
    assert got.tolist() == [0.0, -1.0, 1.0]


def test_no_rows_give_no_advantages():
    got = group_relative_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), normalize_std=True)
    assert got.shape == (0,)


@settings(deadline=None)
@given(rows=st.lists(st.tuples(REWARDS, st.integers(0, 3)), min_size=1, max_size=24))
def test_leave_one_out_advantages_follow_the_formula(rows):
    rewards, groups = zip(*rows, strict=True)
    expected = []
    for row, group in enumerate(groups):
        others = [rewards[other] for other, its in enumerate(groups) if its == group and other != row]
        expected.append(rewards[row] - np.mean(others, dtype=np.float64) if others else 0.0)
    got = leave_one_out_advantages(torch.tensor(rewards), torch.tensor(groups))
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5, atol=1e-5)


def test_leave_one_out_gives_exact_zeros_for_equal_rewards_and_for_a_group_of_one():
    rewards, groups = torch.tensor([0.1] * 7 + [5.0]), torch.tensor([0] * 7 + [1])
    assert leave_one_out_advantages(rewards, groups).tolist() == [0.0] * 8


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), tokens=st.integers(1, 7), gamma=st.floats(0, 1))
def test_batch_normalized_advantages_follow_the_formula(seed, rows, tokens, gamma):
    numbers = np.random.default_rng(seed)
    rewards, mask = numbers.normal(size=(rows, tokens)), numbers.random((rows, tokens)) < 0.6
    returns = np.zeros_like(rewards)
    for row, kept in enumerate(mask):
        chosen = np.flatnonzero(kept)
        for k, t in enumerate(chosen):
            returns[row, t] = sum(gamma**n * rewards[row, later] for n, later in enumerate(chosen[k:]))
    kept = returns[mask]
    spread = kept.std() if len(kept) > 1 else 0.0
    expected = np.where(mask, (returns - kept.mean()) / spread, 0.0) if spread > 0 else np.zeros_like(rewards)
    loud = torch.where(torch.tensor(mask), torch.tensor(rewards), 100.0)
    got = batch_normalized_advantages(loud, torch.tensor(mask), gamma=gamma)
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize(("rows", "tokens"), [(3, 2), (2, 0), (0, 3)])
@pytest.mark.parametrize("kept", [True, False])
def test_batch_normalized_advantages_of_equal_or_no_rewards_are_exactly_zero(rows, tokens, kept):
    """A mean of equal numbers is rounded; what is left of them must not be blown up by their standard deviation."""
    rewards, mask = torch.zeros(rows, tokens), torch.full((rows, tokens), kept)
    rewards[:, -1:] = 0.1
    assert not batch_normalized_advantages(rewards, mask, gamma=1.0).any()


def written_out_gae(rewards, values, bootstrap, mask, gamma, gae_lambda):
    """Equation 16: the discounted sum of all later deltas, over the chosen tokens of each row alone."""
    advantages = np.zeros_like(values)
    for row in range(len(values)):
        chosen = np.flatnonzero(mask[row])
        after = [*values[row, chosen[1:]], bootstrap[row]]
        deltas = [
            rewards[row, t] + gamma * following - values[row, t] for t, following in zip(chosen, after, strict=True)
        ]
        for k, t in enumerate(chosen):
            advantages[row, t] = sum((gamma * gae_lambda) ** n * delta for n, delta in enumerate(deltas[k:]))
    return advantages


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 4),
    tokens=st.integers(1, 7),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_gae_follows_the_formula_over_chosen_tokens(seed, rows, tokens, gamma, gae_lambda):
    numbers = np.random.default_rng(seed)
    rewards, values = numbers.normal(size=(2, rows, tokens))
    bootstrap, mask = numbers.normal(size=rows), numbers.random((rows, tokens)) < 0.6
    mask[:, 0] = True
    advantages, returns = generalized_advantages(
        *map(torch.tensor, (rewards, values, bootstrap, mask)), gamma=gamma, gae_lambda=gae_lambda
    )
    expected = written_out_gae(rewards, values, bootstrap, mask, gamma, gae_lambda)
    np.testing.assert_allclose(advantages.numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(returns.numpy(), np.where(mask, expected + values, 0.0), atol=1e-9)


def test_masked_tokens_are_neither_read_nor_written():
    """An observation in the middle and padding at the end, both with value 100, and a reward before the observation."""
    mask = torch.tensor([[True, True, False, False, True, False]])
    rewards = torch.tensor([[0.0, 0.5, 0.0, 0.0, 1.0, 0.0]])
    quiet = torch.tensor([[0.1, 0.2, 0.0, 0.0, 0.3, 0.0]])
    loud = torch.where(mask, quiet, 100.0)
    terminal = torch.zeros(1)
    clean = generalized_advantages(rewards, quiet, terminal, mask, gamma=0.9, gae_lambda=0.8)
    dirty = generalized_advantages(rewards, loud, terminal, mask, gamma=0.9, gae_lambda=0.8)
    for ours, theirs in zip(clean, dirty, strict=True):
        assert torch.equal(ours, theirs)
        assert not theirs[~mask].any()
    # The reward before the observation reaches its own token: delta_1 = 0.5 + 0.9 * 0.3 - 0.2.
    assert clean[0][0, 1].item() == pytest.approx(0.57 + 0.72 * 0.7, abs=1e-6)


def test_termination_ends_the_sum_and_truncation_goes_on_with_the_critic():
    rewards, values, mask = torch.zeros(2, 1), torch.full((2, 1), 0.25), torch.ones(2, 1, dtype=torch.bool)
    advantages, returns = generalized_advantages(
        rewards, values, torch.tensor([0.0, 2.0]), mask, gamma=0.5, gae_lambda=0.95
    )
    assert advantages.squeeze(1).tolist() == [-0.25, 0.75]
    assert returns.squeeze(1).tolist() == [0.0, 1.0]
