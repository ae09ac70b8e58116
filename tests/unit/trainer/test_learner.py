"""Whole training steps on one rank."""

import math

import msgspec
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlbridge.trainer.batch import collate_trajectories
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.learner import Learner
from rlbridge.trainer.losses.tokens import token_statistics
from rlbridge.trainer.policy import load_policy
from rlbridge.trainer.targets import rewards_at_the_end
from rlbridge.transport.errors import TrainingError

LOOSE = 1e9
"""A gradient bound that never clips."""


def rewards_for(trajectories):
    return [float(index % 3 == 0) for index in range(len(trajectories))]


def sampled_by(policy, trajectories, temperature):
    """The same trajectories with the policy's own log probabilities, as a sampler would report them."""
    batch = collate_trajectories(trajectories, [0.0] * len(trajectories))
    with torch.no_grad():
        logits, _ = policy(batch)
    logprobs = token_statistics(logits, batch.response_ids, temperature).logprobs
    return [
        msgspec.structs.replace(item, logprobs=logprobs[row, : len(item.response_ids)].tolist())
        for row, item in enumerate(trajectories)
    ]


def gradients_of_a_step(directory, trajectories, algorithm, **trainer):
    """Gradients at each update, in order, flat."""
    policy = load_policy(directory, with_values=algorithm.has_critic)
    seen = []

    def keep(optimizer, _args, _kwargs):
        seen.append(torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]]))

    handle = register_optimizer_step_pre_hook(keep)
    try:
        learner = Learner(policy, algorithm, TrainerConfig(max_grad_norm=LOOSE, **trainer), temperature=1.0)
        metrics = learner.step(collate_trajectories(trajectories, rewards_for(trajectories)), 0)
    finally:
        handle.remove()
    return seen, metrics


@pytest.mark.parametrize("advantage", ["group", "gae"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_micro_batches_change_no_gradient_and_no_metric(tiny_dir, trajectories, advantage, rows):
    algorithm = AlgorithmConfig(advantage=advantage, entropy_coef=0.01)
    whole, expected = gradients_of_a_step(tiny_dir, trajectories, algorithm, mini_batches=1)
    parts, metrics = gradients_of_a_step(tiny_dir, trajectories, algorithm, mini_batches=1, micro_batch_rows=rows)
    torch.testing.assert_close(parts[0], whole[0], rtol=0, atol=1e-6)
    assert whole[0].abs().max() > 1e-3
    assert metrics == pytest.approx(expected, abs=1e-5)


def test_the_gradient_is_that_of_the_written_out_objective(tiny_dir, trajectories):
    """GRPO at lag 0: the gradient of the token mean of -w A log pi, through autograd of the plain model."""
    (gradient,), _ = gradients_of_a_step(tiny_dir, trajectories, AlgorithmConfig(), mini_batches=1)
    policy, rewards = load_policy(tiny_dir, with_values=False), rewards_for(trajectories)
    total, tokens = torch.zeros(()), 0
    for first in range(0, len(trajectories), 2):
        pair = torch.tensor(rewards[first : first + 2], dtype=torch.float64)
        spread = pair.std(correction=0)
        for row in (first, first + 1):
            item = trajectories[row]
            advantage = float((rewards[row] - pair.mean()) / spread) if spread > 0 else 0.0
            logits = policy.model(torch.tensor([item.prompt_ids + item.response_ids])).logits[0]
            logits = logits[len(item.prompt_ids) - 1 : -1]
            logprobs = logits.log_softmax(-1)[range(len(item.response_ids)), item.response_ids]
            weights = (logprobs.detach() - torch.tensor(item.logprobs)).exp().clamp(max=2.0)
            total = total - (weights * advantage * logprobs).sum()
            tokens += len(item.response_ids)
    (total / tokens).backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_at_lag_zero_trainer_and_sampler_agree_at_any_temperature(tiny_dir, trajectories, advantage, temperature):
    policy = load_policy(tiny_dir, with_values=advantage == "gae")
    own = sampled_by(policy, trajectories, temperature)
    learner = Learner(
        policy, AlgorithmConfig(advantage=advantage), TrainerConfig(mini_batches=1), temperature=temperature
    )
    metrics = learner.step(collate_trajectories(own, rewards_for(own)), 0)
    assert metrics["train/logprob_gap"] < 1e-4
    for key in ("ratio_mean", "ratio_max", "is_weight_mean", "is_weight_max"):
        assert metrics[f"train/{key}"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/clip_fraction"] == 0.0


def test_a_sampler_at_another_temperature_is_seen(tiny_dir, trajectories):
    policy = load_policy(tiny_dir, with_values=False)
    own = sampled_by(policy, trajectories, 0.6)
    learner = Learner(policy, AlgorithmConfig(), TrainerConfig(), temperature=1.0)
    assert learner.step(collate_trajectories(own, rewards_for(own)), 0)["train/logprob_gap"] > 0.05


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_the_old_policy_is_that_of_the_steps_start_for_every_mini_batch(tiny_dir, trajectories, advantage):
    """With a large rate the second mini-batch's ratio moves away from 1, while weights old/behaviour stay 1."""
    policy = load_policy(tiny_dir, with_values=advantage == "gae")
    own = sampled_by(policy, trajectories, 1.0)
    trainer = TrainerConfig(mini_batches=2, learning_rate=0.02)
    metrics = Learner(policy, AlgorithmConfig(advantage=advantage), trainer, temperature=1.0).step(
        collate_trajectories(own, rewards_for(own)), 0
    )
    assert metrics["train/is_weight_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["train/ratio_max"] > 1.05
    assert metrics["train/approx_kl"] > 1e-4
    assert metrics["train/updates_in_step"] == 2.0


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_training_makes_rewarded_answers_likelier(tiny_dir, trajectories, advantage):
    policy = load_policy(tiny_dir, with_values=advantage == "gae")
    rewards = rewards_for(trajectories)

    def mean_logprob(wanted):
        batch = collate_trajectories(trajectories, rewards)
        with torch.no_grad():
            logprobs = token_statistics(policy(batch)[0], batch.response_ids, 1.0).logprobs
        rows = batch.rewards == wanted
        return float(logprobs[rows][batch.mask[rows]].mean())

    before = mean_logprob(1.0) - mean_logprob(0.0)
    learner = Learner(policy, AlgorithmConfig(advantage=advantage), TrainerConfig(steps=20), temperature=1.0)
    for version in range(20):
        own = sampled_by(policy, trajectories, 1.0)
        learner.step(collate_trajectories(own, rewards), version)
    assert mean_logprob(1.0) - mean_logprob(0.0) > before + 0.3


def test_the_critic_learns_the_reward(tiny_dir, trajectories):
    policy = load_policy(tiny_dir, with_values=True)
    learner = Learner(
        policy, AlgorithmConfig(advantage="gae", value_clip=10.0), TrainerConfig(learning_rate=5e-3), temperature=1.0
    )
    losses = [
        learner.step(collate_trajectories(trajectories, [0.7] * 16), version)["train/value_loss"]
        for version in range(30)
    ]
    assert losses[-1] < losses[0] / 4


def test_equal_rewards_move_nothing_under_grpo(tiny_dir, trajectories):
    policy = load_policy(tiny_dir, with_values=False)
    before = {name: tensor.clone() for name, tensor in policy.live_tensors().items()}
    metrics = Learner(policy, AlgorithmConfig(), TrainerConfig(), temperature=1.0).step(
        collate_trajectories(trajectories, [0.1] * 16), 0
    )
    assert metrics["train/zero_advantage_fraction"] == 1.0
    assert metrics["train/grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.live_tensors().items())


@pytest.mark.parametrize("advantage", ["group", "gae"])
def test_responses_of_no_tokens_are_harmless(tiny_dir, trajectories, advantage):
    empty = [msgspec.structs.replace(item, response_ids=[], logprobs=[]) for item in trajectories]
    learner = Learner(
        load_policy(tiny_dir, with_values=advantage == "gae"),
        AlgorithmConfig(advantage=advantage),
        TrainerConfig(),
        temperature=1.0,
    )
    metrics = learner.step(collate_trajectories(empty, rewards_for(empty)), 0)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/tokens"] == 0.0


def test_divergence_is_an_error_before_the_weights_are_touched(tiny_dir, trajectories):
    policy = load_policy(tiny_dir, with_values=False)
    policy.load_weights([("model.norm.weight", torch.full((16,), float("inf")))])
    before = {name: tensor.clone() for name, tensor in policy.live_tensors().items()}
    learner = Learner(policy, AlgorithmConfig(), TrainerConfig(), temperature=1.0)
    with pytest.raises(TrainingError, match="gradient norm is nan"):
        learner.step(collate_trajectories(trajectories, rewards_for(trajectories)), 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.live_tensors().items())


def test_the_learning_rate_falls_linearly_to_its_final_fraction(tiny_dir, trajectories):
    trainer = TrainerConfig(steps=5, learning_rate=1e-3, final_lr_fraction=0.1)
    learner = Learner(load_policy(tiny_dir, with_values=False), AlgorithmConfig(), trainer, temperature=1.0)
    batch = collate_trajectories(trajectories, rewards_for(trajectories))
    rates = [learner.step(batch, version)["train/lr"] for version in (0, 2, 4, 9)]
    assert rates == pytest.approx([1e-3, 5.5e-4, 1e-4, 1e-4])


def test_metrics_tell_the_batch(tiny_dir, trajectories):
    cut = [msgspec.structs.replace(trajectories[0], finish_reason="length"), *trajectories[1:]]
    learner = Learner(load_policy(tiny_dir, with_values=False), AlgorithmConfig(), TrainerConfig(), temperature=1.0)
    metrics = learner.step(collate_trajectories(cut, rewards_for(cut)), 0)
    assert metrics["train/truncation_rate"] == pytest.approx(1 / 16)
    assert metrics["train/reward_mean"] == pytest.approx(6 / 16)
    assert metrics["train/tokens"] == sum(len(item.response_ids) for item in cut)
    assert metrics["train/is_weight_max"] <= 2.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_only_an_interrupted_response_is_valued_beyond_its_end(tiny_dir, trajectories):
    """A cut response was scored as it stands; one given back unfinished goes on in the critic's opinion."""
    losses = {}
    for reason in ("stop", "length", "abort"):
        policy = load_policy(tiny_dir, with_values=True)
        torch.nn.init.constant_(policy.value_head.bias, 2.0)
        ended = [msgspec.structs.replace(item, finish_reason=reason) for item in trajectories]
        learner = Learner(policy, AlgorithmConfig(advantage="gae"), TrainerConfig(mini_batches=1), temperature=1.0)
        losses[reason] = learner.step(collate_trajectories(ended, [0.0] * 16), 0)["train/value_loss"]
    assert losses["stop"] == losses["length"]
    assert losses["abort"] < losses["stop"] / 10


def test_a_reward_arrives_with_the_last_token(trajectories):
    batch = collate_trajectories(trajectories, [float(index + 1) for index in range(16)])
    arrived = rewards_at_the_end(batch)
    assert torch.equal(arrived.sum(1), batch.rewards)
    assert all(arrived[row, length - 1] == batch.rewards[row] for row, length in enumerate(batch.lengths.tolist()))
