"""Values, divergences, weights and means against the formulas written out in NumPy, with gradients by hand."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.losses.aggregation import aggregate, denominator_of, masked_mean
from rlbridge.trainer.losses.correction import importance_weights, rejects
from rlbridge.trainer.losses.divergence import kl_estimate
from rlbridge.trainer.losses.tokens import token_statistics
from rlbridge.trainer.losses.value import clipped_value_loss

SEEDS = st.integers(0, 2**32 - 1)
FLOOR, CAP = 0.5, 2.0
EMPTY = pytest.mark.parametrize(
    ("rows", "tokens"), [(2, 3), (2, 0), (0, 3)], ids=["all masked", "zero length", "no rows"]
)


def made(seed, rows=3, tokens=4):
    numbers = np.random.default_rng(seed)
    logprobs, other = -np.abs(numbers.normal(size=(2, rows, tokens)))
    return logprobs, other, numbers.normal(size=(rows, tokens)), numbers.random((rows, tokens)) < 0.7


def tensors(*arrays):
    return [torch.tensor(array) for array in arrays]


def test_value_loss_follows_the_formula_and_finite_differences():
    values, old, returns, mask = made(6)
    leaf, *rest = tensors(values, old, returns, mask)
    leaf.requires_grad_()
    near = old + np.clip(values - old, -0.2, 0.2)
    expected = np.where(mask, 0.5 * np.maximum((values - returns) ** 2, (near - returns) ** 2), 0.0)
    got = clipped_value_loss(leaf, *rest, clip=0.2)
    np.testing.assert_allclose(got.detach().numpy(), expected, atol=1e-12)
    assert torch.autograd.gradcheck(lambda own: clipped_value_loss(own, *rest, clip=0.2), leaf)


KL_FORMULAS = {
    # With r = reference / policy; the slope is d / d log pi, and d log r / d log pi = -1.
    "k1": (lambda log_r: -log_r, lambda _: 1.0),
    "k2": (lambda log_r: log_r**2 / 2, lambda log_r: -log_r),
    "k3": (lambda log_r: math.exp(log_r) - 1 - log_r, lambda log_r: 1 - math.exp(log_r)),
}


@pytest.mark.parametrize("estimator", KL_FORMULAS)
@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_kl_estimates_and_their_gradients_follow_the_formulas(estimator, seed):
    logprobs, reference, _, mask = made(seed)
    formula, slope_of = KL_FORMULAS[estimator]
    leaf, other, kept = tensors(logprobs, reference, mask)
    estimate = kl_estimate(leaf.requires_grad_(), other, kept, estimator)
    estimate.sum().backward()
    expected, slope = np.zeros(mask.shape), np.zeros(mask.shape)
    for place in zip(*np.nonzero(mask), strict=True):
        log_r = reference[place] - logprobs[place]
        expected[place], slope[place] = formula(log_r), slope_of(log_r)
    np.testing.assert_allclose(estimate.detach().numpy(), expected, atol=1e-12)
    np.testing.assert_allclose(leaf.grad.numpy(), slope, atol=1e-12)


def test_k1_and_k3_are_unbiased_and_the_gradient_of_k2_is_that_of_the_divergence():
    """Expectations over a small vocabulary, exactly."""
    numbers = np.random.default_rng(2)
    logits, reference_logits = numbers.normal(size=(2, 6))
    policy, reference = (np.exp(row) / np.exp(row).sum() for row in (logits, reference_logits))
    divergence = (policy * np.log(policy / reference)).sum()
    leaf = torch.tensor(logits, requires_grad=True)
    sampled = torch.log_softmax(leaf, 0)[None]
    reference_logprobs, everything = torch.tensor(np.log(reference))[None], torch.ones(1, 6, dtype=torch.bool)
    for unbiased in ("k1", "k3"):
        estimate = kl_estimate(sampled.detach(), reference_logprobs, everything, unbiased).numpy()
        assert (policy * estimate).sum() == pytest.approx(divergence, abs=1e-12)
    estimate = kl_estimate(sampled, reference_logprobs, everything, "k2")
    (gradient,) = torch.autograd.grad((torch.tensor(policy) * estimate).sum(), leaf)
    np.testing.assert_allclose(gradient.numpy(), policy * (np.log(policy / reference) - divergence), atol=1e-12)


def within(weight):
    return weight if FLOOR <= weight <= CAP else 0.0


def whole(row):
    return np.prod(row)


def geometric(row):
    return np.prod(row) ** (1 / len(row))


WEIGHT_FORMULAS = {
    # Weight of token ``t`` from the ratios old / behaviour of its response's kept tokens.
    "none": lambda row, t: 1.0,
    "tis": lambda row, t: min(row[t], CAP),
    "decoupled": lambda row, t: row[t],
    "masked_token": lambda row, t: within(row[t]),
    "masked_sequence": lambda row, t: within(whole(row)),
    "masked_geometric": lambda row, t: within(geometric(row)),
}


@pytest.mark.parametrize("correction", WEIGHT_FORMULAS)
@settings(deadline=None, max_examples=50)
@given(seed=SEEDS)
def test_importance_weights_follow_the_formulas_without_gradient(correction, seed):
    old, behaviour, _, mask = made(seed)
    algorithm = AlgorithmConfig(correction=correction, is_floor=FLOOR, is_cap=CAP)
    leaf, *rest = tensors(old, behaviour, mask)
    weights = importance_weights(leaf.requires_grad_(), *rest, algorithm)
    assert not weights.requires_grad
    expected = np.ones(mask.shape)
    for row, kept in enumerate(mask):
        ratios = np.exp(old[row, kept] - behaviour[row, kept])
        for position, t in enumerate(np.flatnonzero(kept)):
            expected[row, t] = WEIGHT_FORMULAS[correction](ratios, position)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-9)
    assert rejects(algorithm) == correction.startswith("masked")


@pytest.mark.parametrize("correction", WEIGHT_FORMULAS)
def test_a_token_that_one_policy_found_impossible_has_a_finite_weight(correction):
    algorithm = AlgorithmConfig(correction=correction)
    weights = importance_weights(*tensors([[0.0, -1e30]], [[-1e30, 0.0]], [[True, True]]), algorithm)
    assert weights.isfinite().all()
    if correction == "tis":
        assert weights[0, 0] == algorithm.is_cap


@EMPTY
@pytest.mark.parametrize("correction", WEIGHT_FORMULAS)
def test_what_is_masked_weighs_one(correction, rows, tokens):
    unread, nothing = torch.full((rows, tokens), torch.nan), torch.zeros(rows, tokens, dtype=torch.bool)
    weights = importance_weights(unread, unread, nothing, AlgorithmConfig(correction=correction))
    assert (weights == 1).all()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_token_statistics_are_those_of_the_tempered_distribution(temperature):
    numbers = np.random.default_rng(3)
    logits, ids = numbers.normal(size=(2, 3, 5)), numbers.integers(0, 5, size=(2, 3))
    powers = np.exp(logits / temperature)
    distribution = powers / powers.sum(-1, keepdims=True)
    leaf = torch.tensor(logits, requires_grad=True)
    got = token_statistics(leaf, torch.tensor(ids), temperature)
    expected = np.log(np.take_along_axis(distribution, ids[..., None], -1))[..., 0]
    entropy = -(distribution * np.log(distribution)).sum(-1)
    np.testing.assert_allclose(got.logprobs.detach().numpy(), expected, atol=1e-5)
    np.testing.assert_allclose(got.entropy.detach().numpy(), entropy, atol=1e-5)
    (slope,) = torch.autograd.grad(got.entropy.sum(), leaf, retain_graph=True)
    by_hand = -distribution * (np.log(distribution) + entropy[..., None]) / temperature
    np.testing.assert_allclose(slope.numpy(), by_hand, atol=1e-5)
    (slope,) = torch.autograd.grad(got.logprobs.sum(), leaf)
    np.testing.assert_allclose(slope.numpy(), (np.eye(5)[ids] - distribution) / temperature, atol=1e-5)


MEANS = {
    "token_mean": lambda values, mask: values[mask].sum() / max(1, mask.sum()),
    "sequence_mean": lambda values, mask: np.mean([v[m].mean() for v, m in zip(values, mask, strict=True) if m.any()]),
    "constant": lambda values, mask: np.mean([v[m].sum() / 5 for v, m in zip(values, mask, strict=True)]),
}


@pytest.mark.parametrize("aggregation", MEANS)
@settings(deadline=None, max_examples=50)
@given(seed=SEEDS, cut=st.integers(0, 4))
def test_shares_of_any_split_add_up_to_the_formula(aggregation, seed, cut):
    """Half of the tokens are masked, and a whole row: they are in no numerator and in no denominator."""
    values, _, _, mask = made(seed, rows=4)
    mask[0], mask[1, 0] = False, True
    algorithm = AlgorithmConfig(aggregation=aggregation, constant_tokens=5)
    leaf, kept = torch.tensor(np.where(mask, values, np.nan), requires_grad=True), torch.tensor(mask)
    denominator = denominator_of(kept, algorithm)
    shares = [aggregate(leaf[rows], kept[rows], denominator, algorithm) for rows in (slice(cut), slice(cut, None))]
    total = sum(shares)
    assert total.item() == pytest.approx(MEANS[aggregation](values, mask), abs=1e-12)
    total.backward()
    per_row = {"token_mean": mask.sum(), "sequence_mean": mask.any(1).sum() * mask.sum(1), "constant": 4 * 5}
    slope = np.where(mask, 1 / np.maximum(1, np.reshape(per_row[aggregation], (-1, 1))), 0.0)
    np.testing.assert_allclose(leaf.grad.numpy(), slope, atol=1e-12)


@EMPTY
@pytest.mark.parametrize("aggregation", MEANS)
def test_nothing_kept_is_zero_with_zero_gradient(aggregation, rows, tokens):
    algorithm = AlgorithmConfig(aggregation=aggregation, constant_tokens=5)
    mask = torch.zeros(rows, tokens, dtype=torch.bool)
    leaf, constant = torch.full((rows, tokens), torch.nan, requires_grad=True), torch.zeros(rows, tokens)
    terms = [clipped_value_loss(leaf, constant, constant, mask, clip=0.2)]
    terms += [kl_estimate(leaf, constant, mask, estimator) for estimator in KL_FORMULAS]
    loss = sum(aggregate(term, mask, denominator_of(mask, algorithm), algorithm) for term in [leaf, *terms])
    loss.backward()
    assert loss.item() == 0.0
    assert not leaf.grad.any()


def test_the_mean_counts_kept_tokens_in_numerator_and_denominator():
    values, half = torch.tensor([[1.0, 2.0, 100.0, float("nan")]]), torch.tensor([[True, True, False, False]])
    assert masked_mean(values, half).item() == 1.5
    assert masked_mean(values, half, 8).item() == 3.0 / 8
