"""Every preset, and odd combinations, through whole training steps: splits change nothing, odd batches are harmless."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from torch.optim.optimizer import register_optimizer_step_pre_hook

import rlbridge.conf
from rlbridge.config_parse import parse_dataclass
from rlbridge.trainer.batch import collate_trajectories
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.learner import Learner
from rlbridge.trainer.losses.tokens import token_statistics
from rlbridge.trainer.policy import load_policy

EOS = 1
PRESETS = sorted(path.stem for path in (Path(rlbridge.conf.__path__[0]) / "algorithm").glob("*.yaml"))
NO_CLIP = {"max_grad_norm": 1e9}


def preset(name, **changes):
    """The preset as a job has it whose responses are at most six tokens long."""
    file = Path(rlbridge.conf.__path__[0]) / "algorithm" / f"{name}.yaml"
    algorithm = OmegaConf.create({"task": {"max_new_tokens": 6}, "algorithm": OmegaConf.load(file)}).algorithm
    values = OmegaConf.to_container(algorithm, resolve=True)
    return parse_dataclass(AlgorithmConfig, {**values, **changes})


def train(directory, trajectories, rewards, algorithm, *, temperature=1.0, steps=1, **trainer):
    """Gradients of each update in order, flat, and the metrics of the last step."""
    policy = load_policy(directory, with_values=algorithm.has_critic)
    seen = []

    def keep(optimizer, _args, _kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        seen.append(torch.cat([p.grad.flatten() if p.grad is not None else p.flatten() * 0 for p in parameters]))

    handle = register_optimizer_step_pre_hook(keep)
    try:
        learner = Learner(policy, algorithm, TrainerConfig(**NO_CLIP | trainer), temperature=temperature)
        batch = collate_trajectories(trajectories, rewards)
        for version in range(steps):
            metrics = learner.step(batch, version)
    finally:
        handle.remove()
    return seen, metrics


def on_policy(directory, trajectories, temperature):
    """The same trajectories, as if the policy had just sampled them."""
    policy = load_policy(directory, with_values=False)
    batch = collate_trajectories(trajectories, [0.0] * len(trajectories))
    with torch.no_grad():
        logprobs = token_statistics(policy(batch)[0], batch.response_ids, temperature).logprobs
    return [
        msgspec.structs.replace(item, logprobs=logprobs[row, : len(item.response_ids)].tolist())
        for row, item in enumerate(trajectories)
    ]


def mixed(count):
    return [float(index % 3 == 0) for index in range(count)]


def everything_finite(gradients, metrics):
    return all(gradient.isfinite().all() for gradient in gradients) and all(map(math.isfinite, metrics.values()))


ANY_ALGORITHM = st.builds(
    AlgorithmConfig,
    advantage=st.sampled_from(["group", "rloo", "reinforce_pp", "gae"]),
    loss=st.sampled_from(["ppo_clip", "dual_clip", "gspo", "cispo", "policy_gradient"]),
    aggregation=st.sampled_from(["token_mean", "sequence_mean", "constant"]),
    correction=st.sampled_from(["tis", "decoupled", "masked_token", "masked_sequence", "masked_geometric", "none"]),
    kl_estimator=st.sampled_from(["k1", "k2", "k3"]),
    kl_in=st.sampled_from(["loss", "reward"]),
    kl_coef=st.sampled_from([0.0, 0.1]),
    entropy_coef=st.sampled_from([0.0, 0.01]),
    mask_truncated=st.booleans(),
    constant_tokens=st.just(6),
    is_floor=st.just(0.05),
    is_cap=st.just(5.0),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(algorithm=ANY_ALGORITHM, rows=st.integers(1, 7), mini_batches=st.integers(1, 3))
def test_micro_batches_change_no_gradient_and_no_metric(tiny_dir, trajectories, algorithm, rows, mini_batches):
    """Forward by forward and accumulated, or in one piece: the same. A rate of 0 keeps later updates comparable."""
    cut = [msgspec.structs.replace(item, finish_reason="length") for item in trajectories[:3]] + trajectories[3:]
    shape = {"mini_batches": mini_batches, "learning_rate": 0.0}
    whole, expected = train(tiny_dir, cut, mixed(16), algorithm, **shape)
    parts, metrics = train(tiny_dir, cut, mixed(16), algorithm, micro_batch_rows=rows, **shape)
    assert len(parts) == len(whole) == mini_batches
    scale = max(1.0, max(float(gradient.abs().max()) for gradient in whole))
    for part, gradient in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, gradient, rtol=0, atol=1e-6 * scale)
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_makes_rewarded_answers_likelier(tiny_dir, trajectories, name):
    algorithm, own = preset(name), on_policy(tiny_dir, trajectories, 1.0)
    policy = load_policy(tiny_dir, with_values=algorithm.has_critic)
    batch = collate_trajectories(own, mixed(16))
    rewarded = batch.rewards > 0

    def gap():
        with torch.no_grad():
            logprobs = token_statistics(policy(batch)[0], batch.response_ids, 1.0).logprobs
        means = torch.where(batch.mask, logprobs, 0.0).sum(1) / batch.lengths
        return float(means[rewarded].mean() - means[~rewarded].mean())

    before = gap()
    learner = Learner(policy, algorithm, TrainerConfig(mini_batches=1), temperature=1.0)
    learner.step(batch, 0)
    assert gap() > before + 1e-3


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("name", PRESETS)
def test_at_lag_zero_all_ratios_and_weights_are_one_at_any_temperature(tiny_dir, trajectories, name, temperature):
    own = on_policy(tiny_dir, trajectories, temperature)
    algorithm = preset(name)
    _, metrics = train(tiny_dir, own, mixed(16), algorithm, temperature=temperature, mini_batches=1)
    for key in ("ratio_mean", "ratio_max", "is_weight_mean", "is_weight_max", "ess"):
        assert metrics[f"train/{key}"] == pytest.approx(1.0, abs=1e-4)
    for key in ("logprob_gap", "clip_fraction", "rejected_fraction"):
        assert metrics[f"train/{key}"] == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "ppo"])
def test_equal_rewards_teach_nothing(tiny_dir, trajectories, name):
    (gradient,), metrics = train(tiny_dir, trajectories, [0.1] * 16, preset(name, kl_coef=0.0), mini_batches=1)
    assert metrics["train/zero_advantage_fraction"] == 1.0
    assert not gradient.any()


@pytest.mark.parametrize("name", PRESETS)
def test_groups_of_one_are_harmless(tiny_dir, trajectories, name):
    alone = [msgspec.structs.replace(item, group=item.request_id) for item in trajectories]
    assert everything_finite(*train(tiny_dir, alone, mixed(16), preset(name)))


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kind", ["all empty", "some empty", "all truncated", "all interrupted", "one row"])
def test_odd_batches_have_finite_losses_and_gradients(tiny_dir, trajectories, name, kind):
    def without_tokens(item):
        return msgspec.structs.replace(item, response_ids=[], logprobs=[])

    odd = {
        "all empty": [without_tokens(item) for item in trajectories],
        "some empty": [without_tokens(item) if item.sample else item for item in trajectories],
        "all truncated": [msgspec.structs.replace(item, finish_reason="length") for item in trajectories],
        "all interrupted": [msgspec.structs.replace(item, finish_reason="abort") for item in trajectories],
        "one row": trajectories[:1],
    }[kind]
    algorithm = preset(name, mask_truncated=True, entropy_coef=0.01, kl_coef=0.1)
    gradients, metrics = train(tiny_dir, odd, mixed(len(odd)), algorithm, mini_batches=1)
    assert everything_finite(gradients, metrics)
    if kind in ("all empty", "all truncated"):
        assert metrics["train/tokens"] == 0.0
        assert not gradients[0].any()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_masked_response_is_in_no_numerator_and_in_no_denominator(tiny_dir, trajectories, aggregation):
    """Masking the truncated responses is training without them. Their groups are whole, so no advantage changes."""
    algorithm = AlgorithmConfig(mask_truncated=True, aggregation=aggregation, entropy_coef=0.01)
    cut = [msgspec.structs.replace(item, finish_reason="length" if item.group % 2 else "stop") for item in trajectories]
    (masked,), metrics = train(tiny_dir, cut, mixed(16), algorithm, mini_batches=1)
    rest = [(item, reward) for item, reward in zip(cut, mixed(16), strict=True) if item.finish_reason == "stop"]
    (without,), _ = train(tiny_dir, *map(list, zip(*rest, strict=True)), algorithm, mini_batches=1)
    torch.testing.assert_close(masked, without, rtol=0, atol=1e-6)
    assert metrics["train/tokens"] == sum(len(item.response_ids) for item, _ in rest)
    assert metrics["train/truncation_rate"] == 0.5


@pytest.mark.parametrize("correction", ["masked_token", "masked_sequence", "masked_geometric"])
def test_a_rejected_response_is_in_no_numerator_and_in_no_denominator(tiny_dir, trajectories, correction):
    own = on_policy(tiny_dir, trajectories, 1.0)
    strange = [
        msgspec.structs.replace(item, logprobs=[-50.0] * len(item.logprobs)) if item.group % 2 else item for item in own
    ]
    algorithm = AlgorithmConfig(correction=correction)
    (masked,), metrics = train(tiny_dir, strange, mixed(16), algorithm, mini_batches=1)
    rest = [(item, reward) for item, reward in zip(own, mixed(16), strict=True) if item.group % 2 == 0]
    (without,), _ = train(tiny_dir, *map(list, zip(*rest, strict=True)), algorithm, mini_batches=1)
    torch.testing.assert_close(masked, without, rtol=0, atol=1e-6)
    tokens = sum(len(item.response_ids) for item, _ in rest)
    assert metrics["train/tokens"] == tokens
    everything = sum(len(item.response_ids) for item in own)
    assert metrics["train/rejected_fraction"] == pytest.approx(1 - tokens / everything)
    assert metrics["train/ess"] == pytest.approx(tokens / everything, abs=1e-4)


def test_the_end_of_sequence_token_keeps_its_loss_where_it_is_also_the_pad_token(tiny_dir, trajectories):
    """Padding is known from lengths, so what the pad token's number is changes nothing: no token is lost to it."""
    assert all(item.response_ids[-1] == EOS for item in trajectories)
    _, metrics = train(tiny_dir, trajectories, mixed(16), AlgorithmConfig())
    as_pad = [
        msgspec.structs.replace(item, response_ids=[token - 1 for token in item.response_ids]) for item in trajectories
    ]
    assert all(item.response_ids[-1] == 0 for item in as_pad)  # what rows are padded with
    _, padded = train(tiny_dir, as_pad, mixed(16), AlgorithmConfig())
    assert padded["train/tokens"] == metrics["train/tokens"] == sum(len(item.response_ids) for item in trajectories)
