"""The reference model: a frozen copy of version 0, there only if asked for, in the loss or in the reward."""

import numpy as np
import pytest
import torch

from rlbridge.trainer.batch import collate_trajectories
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.learner import Learner
from rlbridge.trainer.policy import load_policy
from rlbridge.trainer.targets import Snapshot, advantages_and_returns
from rlbridge.transport.errors import LayoutError, TrainingError

WITH_KL = {"kl_coef": 0.1}


@pytest.fixture
def batch(trajectories):
    return collate_trajectories(trajectories, [float(index % 3 == 0) for index in range(len(trajectories))])


def learner_of(policy, **choices):
    return Learner(policy, AlgorithmConfig(**choices), TrainerConfig(learning_rate=0.01), temperature=1.0)


@pytest.mark.parametrize("with_values", [False, True])
def test_a_frozen_copy_says_the_same_and_stays_when_the_policy_moves(tied_dir, batch, with_values):
    policy = load_policy(tied_dir, with_values=with_values)
    dice = torch.get_rng_state()
    frozen = policy.frozen_copy()
    assert torch.equal(torch.get_rng_state(), dice)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    before, values = frozen(batch)
    assert values is None
    torch.testing.assert_close(before, policy(batch)[0], rtol=0, atol=0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1)
    assert torch.equal(frozen(batch)[0], before)
    assert not torch.equal(policy(batch)[0], before)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_policy_leaves_version_0_and_the_reference_does_not(tiny_dir, batch, kl_in):
    policy = load_policy(tiny_dir, with_values=False)
    start = {name: tensor.clone() for name, tensor in policy.live_tensors().items()}
    learner = learner_of(policy, kl_in=kl_in, **WITH_KL)
    seen = [learner.step(batch, version)["train/reference_kl"] for version in range(3)]
    assert seen[2] > seen[0] >= 0.0
    assert seen[2] > 1e-4
    reference = learner.reference.live_tensors()
    assert all(torch.equal(reference[name], tensor) for name, tensor in start.items())
    assert not any(torch.equal(policy.live_tensors()[name], tensor) for name, tensor in start.items())


def test_without_a_coefficient_there_is_no_reference(tiny_dir, batch, monkeypatch):
    policy = load_policy(tiny_dir, with_values=False)
    monkeypatch.setattr(policy, "frozen_copy", lambda: pytest.fail("a copy was made"))
    learner = learner_of(policy)
    assert "train/reference_kl" not in learner.step(batch, 0)
    assert learner.reference is None


def test_a_large_coefficient_holds_the_policy_back(tiny_dir, batch):
    left = {}
    for coefficient in (1e-6, 10.0):
        learner = learner_of(load_policy(tiny_dir, with_values=False), kl_coef=coefficient)
        left[coefficient] = [learner.step(batch, version) for version in range(6)][-1]["train/reference_kl"]
    assert left[10.0] < left[1e-6] / 2


def test_a_run_that_goes_on_needs_version_0_back(tiny_dir, batch):
    policy = load_policy(tiny_dir, with_values=False)
    first = learner_of(policy, **WITH_KL)
    first.step(batch, 0)
    version_0 = first.reference.full_state()
    learner = learner_of(policy, **WITH_KL)
    with pytest.raises(TrainingError, match=r"algorithm\.kl_coef=0\.1 .* version 1 "):
        learner.step(batch, 1)
    with pytest.raises(LayoutError, match="no weight"):
        learner.load_reference([("nothing", torch.zeros(1))])
    learner.load_reference(version_0.items())
    assert learner.step(batch, 1)["train/reference_kl"] > 0.0
    assert all(torch.equal(tensor, version_0[name]) for name, tensor in learner.reference.full_state().items())


@pytest.mark.parametrize("advantage", ["group", "rloo", "reinforce_pp", "gae"])
def test_a_penalty_in_the_reward_is_subtracted_token_by_token(batch, advantage):
    """r_t - kl_coef (log pi_old - log pi_ref), with k1, before any advantage; groups see the sum over the response."""
    numbers = np.random.default_rng(0)
    old, reference = -np.abs(numbers.normal(size=(2, *batch.mask.shape)))
    values = np.zeros((batch.rows, batch.mask.shape[1] + 1))
    snapshot = Snapshot(
        **{
            name: torch.tensor(v)
            for name, v in zip(("logprobs", "reference", "values"), (old, reference, values), strict=True)
        }
    )
    algorithm = AlgorithmConfig(
        advantage=advantage, kl_coef=0.5, kl_in="reward", kl_estimator="k1", normalize_std=False, gae_lambda=1.0
    )
    got, _ = advantages_and_returns(batch, snapshot, algorithm)
    mask, expected = batch.mask.numpy(), np.zeros(batch.mask.shape)
    to_go = np.zeros(batch.mask.shape)
    for row, length in enumerate(batch.lengths.tolist()):
        rewards = -0.5 * (old - reference)[row, :length]
        rewards[-1] += batch.rewards[row].item()
        to_go[row, :length] = np.cumsum(rewards[::-1])[::-1]
    whole = to_go[:, 0]
    for row, group in enumerate(batch.groups.tolist()):
        partner = next(other for other, its in enumerate(batch.groups.tolist()) if its == group and other != row)
        expected[row] = {
            "group": (whole[row] - whole[partner]) / 2,
            "rloo": whole[row] - whole[partner],
            "reinforce_pp": (to_go[row] - to_go[mask].mean()) / to_go[mask].std(),
            "gae": to_go[row],
        }[advantage]
    np.testing.assert_allclose(got.numpy()[mask], expected[mask], atol=1e-5)
