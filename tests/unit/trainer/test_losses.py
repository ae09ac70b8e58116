"""Losses against the formulas written out in NumPy; gradients against finite differences and hand-made forms."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.trainer.losses import (
    approximate_kl,
    clipped_policy_loss,
    clipped_value_loss,
    masked_mean,
    token_statistics,
    truncated_importance_weights,
)

SEEDS = st.integers(0, 2**32 - 1)
CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def made(seed, rows=3, tokens=4):
    numbers = np.random.default_rng(seed)
    logprobs, old = -np.abs(numbers.normal(size=(2, rows, tokens)))
    return logprobs, old, numbers.normal(size=(rows, tokens)), numbers.random((rows, tokens)) < 0.7


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_policy_loss_and_its_gradient_follow_the_formula(seed):
    logprobs, old, advantages, mask = made(seed)
    weights = np.random.default_rng(seed + 1).random(mask.shape) * 2
    leaf, *rest = tensors(logprobs, old, advantages, weights, mask)
    leaf.requires_grad_()
    result = clipped_policy_loss(leaf, *rest, **CLIP)
    expected, gradient = np.zeros(mask.shape), np.zeros(mask.shape)
    for place in zip(*np.nonzero(mask), strict=True):
        ratio = np.exp(logprobs[place] - old[place])
        free, bounded = ratio * advantages[place], np.clip(ratio, 0.8, 1.3) * advantages[place]
        expected[place] = -weights[place] * min(free, bounded)
        gradient[place] = 0.0 if bounded < free else -weights[place] * free  # d ratio / d logprob = ratio
        assert result.clipped[place] == (bounded < free)
    np.testing.assert_allclose(result.loss.detach().numpy(), expected, atol=1e-12)
    result.loss.sum().backward()
    np.testing.assert_allclose(leaf.grad.numpy(), gradient, atol=1e-12)


def test_policy_loss_gradient_equals_finite_differences():
    logprobs, old, advantages, mask = made(5)
    leaf, *rest = tensors(logprobs, old, advantages, np.ones(mask.shape), mask)
    leaf.requires_grad_()
    assert torch.autograd.gradcheck(lambda own: clipped_policy_loss(own, *rest, **CLIP).loss, leaf)


def test_value_loss_follows_the_formula_and_finite_differences():
    values, old, returns, mask = made(6)
    leaf, *rest = tensors(values, old, returns, mask)
    leaf.requires_grad_()
    near = old + np.clip(values - old, -0.2, 0.2)
    expected = np.where(mask, 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2), 0.0)
    got = clipped_value_loss(leaf, *rest, clip=0.2)
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-12)
    assert torch.autograd.gradcheck(lambda own: clipped_value_loss(own, *rest, clip=0.2), leaf)


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, cap=st.floats(0.5, 5))
def test_importance_weights_are_truncated_ratios_without_gradient(seed, cap):
    old, behaviour, _, mask = made(seed)
    leaf, *rest = tensors(old, behaviour, mask)
    weights = truncated_importance_weights(leaf.requires_grad_(), *rest, cap=cap)
    assert not weights.requires_grad
    expected = np.minimum(np.exp(np.where(mask, old - behaviour, 0.0)), cap)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-12)


def test_a_token_that_the_sampler_found_impossible_gets_the_cap():
    weights = truncated_importance_weights(
        torch.tensor([[0.0]]), torch.tensor([[-1e30]]), torch.tensor([[True]]), cap=2.0
    )
    assert weights.item() == 2.0


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_token_statistics_are_those_of_the_tempered_distribution(temperature):
    numbers = np.random.default_rng(3)
    logits, ids = numbers.normal(size=(2, 3, 5)), numbers.integers(0, 5, size=(2, 3))
    powers = np.exp(logits / temperature)
    distribution = powers / powers.sum(-1, keepdims=True)
    got = token_statistics(*tensors(logits, ids), temperature)
    expected = np.log(np.take_along_axis(distribution, ids[..., None], -1))[..., 0]
    np.testing.assert_allclose(got.logprobs.numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(got.entropy.numpy(), -(distribution * np.log(distribution)).sum(-1), atol=1e-5)


def test_the_mean_counts_kept_tokens_in_numerator_and_denominator():
    values, half = torch.tensor([[1.0, 2.0, 100.0, float("nan")]]), torch.tensor([[True, True, False, False]])
    assert masked_mean(values, half).item() == 1.5
    assert masked_mean(values, half, 8).item() == 3.0 / 8


@pytest.mark.parametrize(("rows", "tokens"), [(2, 3), (2, 0), (0, 3)], ids=["all masked", "zero length", "no rows"])
def test_nothing_kept_is_zero_with_zero_gradient(rows, tokens):
    mask = torch.zeros(rows, tokens, dtype=torch.bool)
    leaf = torch.full((rows, tokens), float("nan"), requires_grad=True)
    constant = torch.zeros(rows, tokens)
    loss = masked_mean(clipped_policy_loss(leaf, constant, constant, constant + 1, mask, **CLIP).loss, mask)
    loss = loss + masked_mean(clipped_value_loss(leaf, constant, constant, mask, clip=0.2), mask)
    assert loss.item() == 0.0
    loss.backward()
    assert not leaf.grad.any()
    assert not approximate_kl(leaf, constant, mask).any()


@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_approximate_kl_is_never_negative(seed):
    logprobs, old, _, mask = made(seed)
    estimate = approximate_kl(*tensors(logprobs, old, mask)).numpy()
    ratio = np.exp(np.where(mask, logprobs - old, 0.0))
    np.testing.assert_allclose(estimate, ratio - 1 - np.log(ratio), atol=1e-12)
    assert estimate.min() >= 0.0
