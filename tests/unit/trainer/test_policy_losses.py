"""Policy losses against the papers' equations written out in NumPy, token by token, with their gradients by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses import policy

SEEDS = st.integers(0, 2**32 - 1)
LOW, HIGH, BOUND = 0.2, 0.3, 2.0
CLIP = {"clip_low": LOW, "clip_high": HIGH}


def made(seed, rows=3, tokens=4):
    """Log probabilities, old ones, advantages, mask: float64, ratios from 0.1 to 10."""
    numbers = np.random.default_rng(seed)
    logprobs, old = -np.abs(numbers.normal(size=(2, rows, tokens)))
    return logprobs, old, numbers.normal(size=(rows, tokens)), numbers.random((rows, tokens)) < 0.7


def clipped(ratio, advantage):
    return min(ratio * advantage, np.clip(ratio, 1 - LOW, 1 + HIGH) * advantage)


def inside(ratio, advantage):
    """Whether equation 7 of PPO lets gradient through."""
    return ratio <= 1 + HIGH if advantage > 0 else ratio >= 1 - LOW


# Each gives (loss, d loss / d log pi) of one token from its row: log probabilities, old ones, advantage, position.


def ppo_clip(logprobs, old, advantage, t):
    ratio = np.exp(logprobs[t] - old[t])
    return -clipped(ratio, advantage), -ratio * advantage * inside(ratio, advantage)


def dual_clip(logprobs, old, advantage, t):
    ratio = np.exp(logprobs[t] - old[t])
    if advantage >= 0:
        return ppo_clip(logprobs, old, advantage, t)
    objective = max(clipped(ratio, advantage), BOUND * advantage)
    return -objective, -ratio * advantage * (inside(ratio, advantage) and ratio <= BOUND)


def gspo(logprobs, old, advantage, t):
    """GSPO-token: the value of the sequence's ratio, the gradient of the token's own."""
    ratio = (np.exp(logprobs.sum()) / np.exp(old.sum())) ** (1 / len(logprobs))
    return -clipped(ratio, advantage), -ratio * advantage * inside(ratio, advantage)


def cispo(logprobs, old, advantage, t):
    weight = np.clip(np.exp(logprobs[t] - old[t]), 1 - LOW, 1 + HIGH)
    return -weight * advantage * logprobs[t], -weight * advantage


def policy_gradient(logprobs, old, advantage, t):
    return -advantage * logprobs[t], -advantage


FORMULAS = [ppo_clip, dual_clip, gspo, cispo, policy_gradient]


def ours(name, *arrays):
    algorithm = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, dual_clip_bound=BOUND)
    logprobs, *rest = (torch.tensor(array) for array in arrays)
    result = policy.policy_loss(logprobs.requires_grad_(), *rest, algorithm)
    result.loss.sum().backward()
    return result, logprobs.grad.numpy()


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda formula: formula.__name__)
@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_loss_and_gradient_follow_the_paper(formula, seed):
    logprobs, old, advantages, mask = made(seed)
    result, gradient = ours(formula.__name__, logprobs, old, advantages, mask)
    expected, slope = np.zeros(mask.shape), np.zeros(mask.shape)
    for row, kept in enumerate(mask):
        for position, t in enumerate(np.flatnonzero(kept)):
            own = formula(logprobs[row, kept], old[row, kept], advantages[row, t], position)
            expected[row, t], slope[row, t] = own
    np.testing.assert_allclose(result.loss.detach().numpy(), expected, atol=1e-9)
    np.testing.assert_allclose(gradient, slope, atol=1e-9)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip"])
def test_gradient_equals_finite_differences(name):
    algorithm = AlgorithmConfig(loss=name, clip_low=LOW, clip_high=HIGH, dual_clip_bound=BOUND)
    leaf, *rest = (torch.tensor(array) for array in made(5))
    assert torch.autograd.gradcheck(lambda own: policy.policy_loss(own, *rest, algorithm).loss, leaf.requires_grad_())


@settings(deadline=None, max_examples=30)
@given(seed=SEEDS)
def test_gspo_is_the_sequence_objective_where_a_response_has_one_advantage(seed):
    """Equation 5 of GSPO, its gradient by finite differences, against the sequence mean of the token form."""
    logprobs, old, advantages, mask = made(seed)
    mask[:, 0] = True
    one = advantages[:, :1]

    def written_out(values):
        total = 0.0
        for row, kept in enumerate(mask):
            ratio = np.exp((values[row, kept] - old[row, kept]).mean())
            total -= clipped(ratio, one[row, 0])
        return total

    leaf = torch.tensor(logprobs, requires_grad=True)
    loss = policy.gspo(leaf, torch.tensor(old), torch.tensor(one), torch.tensor(mask), **CLIP).loss
    mean = (loss.sum(1) / torch.tensor(mask).sum(1)).sum()
    assert mean.item() == pytest.approx(written_out(logprobs), abs=1e-9)
    mean.backward()
    ratios = np.array([np.exp((logprobs[r, k] - old[r, k]).mean()) for r, k in enumerate(mask)])
    if np.abs(np.subtract.outer(ratios, [1 - LOW, 1 + HIGH])).min() < 1e-3:
        return  # at a kink finite differences mean nothing
    for place in zip(*np.nonzero(mask), strict=True):
        step = np.zeros_like(logprobs)
        step[place] = 1e-6
        slope = (written_out(logprobs + step) - written_out(logprobs - step)) / 2e-6
        assert leaf.grad.numpy()[place] == pytest.approx(slope, abs=1e-5)


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_what_is_counted_as_clipped_is_what_lost_its_gradient(seed):
    logprobs, old, advantages, mask = made(seed)
    result, gradient = ours("ppo_clip", logprobs, old, advantages, mask)
    lost = mask & (gradient == 0)
    np.testing.assert_array_equal((result.clipped_low | result.clipped_high).numpy(), lost)
    np.testing.assert_array_equal(result.clipped_low.numpy(), lost & (np.exp(logprobs - old) < 1 - LOW))


def test_a_likelier_bad_token_has_a_bounded_loss_under_dual_clip_and_counts_as_clipped():
    result, gradient = ours("dual_clip", *(np.array([[value]]) for value in (-0.1, -5.0, -1.0)), np.array([[True]]))
    assert result.loss.item() == BOUND
    assert gradient.item() == 0.0
    assert result.clipped_high.item()


@pytest.mark.parametrize("name", [formula.__name__ for formula in FORMULAS])
@pytest.mark.parametrize(("rows", "tokens"), [(2, 3), (2, 0), (0, 3)], ids=["all masked", "zero length", "no rows"])
def test_nothing_kept_is_zero_with_zero_gradient(name, rows, tokens):
    unread = np.full((rows, tokens), np.nan)
    result, gradient = ours(name, unread, unread, unread, np.zeros((rows, tokens), dtype=bool))
    assert not result.loss.any()
    assert not gradient.any()
    assert not (result.clipped_low | result.clipped_high).any()


@pytest.mark.parametrize("name", [formula.__name__ for formula in FORMULAS])
def test_an_impossible_token_leaves_loss_and_gradient_finite(name):
    logprobs, old = np.array([[-1e4, -0.1]]), np.array([[-0.1, -1e4]])
    result, gradient = ours(name, logprobs, old, np.array([[1.0, -1.0]]), np.ones((1, 2), dtype=bool))
    assert result.loss.isfinite().all()
    assert np.isfinite(gradient).all()
