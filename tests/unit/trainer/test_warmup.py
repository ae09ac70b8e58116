"""The supervised warm-up on one rank."""

import random

import pytest
import torch

from rlbridge.trainer.config import TrainerConfig
from rlbridge.trainer.messages import Example
from rlbridge.trainer.policy import load_policy
from rlbridge.trainer.warmup import warm_up

CONFIG = TrainerConfig(warmup_batch=16, warmup_learning_rate=5e-3, warmup_steps_max=150)
MARK = 2


@pytest.fixture
def echo_examples():
    """Repeat what stands before the mark, then stop."""
    dice = random.Random(1)
    return [Example([token, MARK], [token, 1]) for token in (dice.randrange(3, 21) for _ in range(2000))]


def run(directory, examples, until, config=CONFIG, temperature=1.0):
    policy = load_policy(directory, with_values=False)
    return policy, warm_up(policy, examples, until=until, config=config, temperature=temperature, seed=0)


def test_the_expected_accuracy_is_what_sampling_reaches(tiny_dir, echo_examples):
    policy, result = run(tiny_dir, echo_examples, until=0.3)
    assert 0 < result.steps < CONFIG.warmup_steps_max
    assert result.accuracy >= 0.3
    torch.manual_seed(0)
    prompts = torch.cartesian_prod(torch.arange(3, 21).repeat(50), torch.tensor([MARK]))
    with torch.no_grad():
        first = torch.distributions.Categorical(logits=policy.model(prompts).logits[:, -1]).sample()[:, None]
        logits = policy.model(torch.cat([prompts, first], dim=1)).logits[:, -1]
        second = torch.distributions.Categorical(logits=logits).sample()
    right = ((first == prompts[:, :1]).squeeze(1) & (second == 1)).float().mean()
    assert float(right) == pytest.approx(result.accuracy, abs=0.12)


def test_it_gives_up_at_the_most_steps_and_says_how_far_it_came(tiny_dir, echo_examples):
    _, result = run(tiny_dir, echo_examples, until=0.9, config=TrainerConfig(warmup_batch=16, warmup_steps_max=3))
    assert result.steps == 3
    assert 0 < result.accuracy < 0.9


def test_fewer_examples_than_a_batch_are_used_again(tiny_dir, echo_examples):
    _, result = run(tiny_dir, echo_examples[:5], until=0.3)
    assert result.accuracy >= 0.3


@pytest.mark.parametrize("until", [0.0, 0.5])
def test_without_a_goal_or_examples_nothing_happens(tiny_dir, echo_examples, until):
    policy, result = run(tiny_dir, echo_examples if until == 0 else [], until)
    assert (result.steps, result.accuracy) == (0, 0.0)
    untouched = load_policy(tiny_dir, with_values=False).live_tensors()
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in policy.live_tensors().items())


def test_the_same_seed_gives_the_same_weights(tiny_dir, echo_examples):
    (first, _), (second, _) = (run(tiny_dir, echo_examples, until=0.2) for _ in range(2))
    for name, tensor in first.live_tensors().items():
        assert torch.equal(tensor, second.live_tensors()[name])
