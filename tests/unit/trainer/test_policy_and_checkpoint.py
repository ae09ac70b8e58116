"""The policy on one rank: what it computes, what sync probes, what a checkpoint holds."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbridge.trainer.batch import collate
from rlbridge.trainer.checkpoint import read_trainer_state, save_checkpoint
from rlbridge.trainer.policy import load_policy
from rlbridge.transport.errors import ConfigError, LayoutError


def test_padding_changes_no_logits(tiny_dir):
    """Each row of a ragged batch equals that sequence alone through the plain model."""
    policy = load_policy(tiny_dir, with_values=False)
    plain = AutoModelForCausalLM.from_pretrained(tiny_dir)
    prompts, responses = [[5, 6, 7], [8], [9, 10]], [[11, 1], [12, 13, 14, 1], [1]]
    logits, values = policy(collate(prompts, responses))
    assert values is None
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        alone = plain(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(logits[row, : len(response)], alone, rtol=0, atol=1e-5)


def test_values_are_read_before_each_token_and_after_the_last(tiny_dir):
    policy = load_policy(tiny_dir, with_values=True)
    torch.nn.init.normal_(policy.value_head.weight)
    _, values = policy(collate([[5, 6], [7]], [[8], [9, 10]]))
    hidden = policy.model.model(torch.tensor([[7, 9, 10]])).last_hidden_state[0]
    torch.testing.assert_close(values[1], policy.value_head(hidden).squeeze(-1), rtol=0, atol=1e-5)
    assert values[0, 1] == values[0, 2]  # a shorter row repeats its last state


def test_live_tensors_are_the_parameters_own_memory_and_the_critic_is_not_among_them(tiny_dir):
    policy = load_policy(tiny_dir, with_values=True)
    live = policy.live_tensors()
    assert set(live) == set(AutoModelForCausalLM.from_pretrained(tiny_dir).state_dict())
    assert not any(tensor.requires_grad for tensor in live.values())
    live["model.norm.weight"].fill_(3.0)
    assert policy.model.model.norm.weight.tolist() == [3.0] * 16


def test_tied_weights_are_live_once_and_load_under_either_name(tied_dir):
    policy = load_policy(tied_dir, with_values=False)
    assert len({name for name in policy.live_tensors() if "embed" in name or "lm_head" in name}) == 1
    for value, name in enumerate(("model.embed_tokens.weight", "lm_head.weight")):
        policy.load_weights([(name, torch.full((21, 16), float(value)))])
        assert policy.model.get_input_embeddings().weight.unique().tolist() == [value]
        assert policy.model.get_output_embeddings().weight.unique().tolist() == [value]


def test_loading_casts_and_keeps_every_bit(tiny_dir):
    policy = load_policy(tiny_dir, with_values=False)
    weights = {name: torch.randn_like(tensor).bfloat16() for name, tensor in policy.live_tensors().items()}
    policy.load_weights(weights.items())
    for name, tensor in policy.live_tensors().items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor.bfloat16(), weights[name])


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.norm.wieght", (16,), r"no weight 'model.norm.wieght'; did you mean 'model.norm.weight'\?"),
        ("model.norm.weight", (17,), r"'model.norm.weight' has shape \(17,\), the policy's has \(16,\)"),
    ],
)
def test_a_weight_that_does_not_fit_is_refused(tiny_dir, name, shape, message):
    with pytest.raises(LayoutError, match=message):
        load_policy(tiny_dir, with_values=False).load_weights([(name, torch.zeros(shape))])


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_directory_that_is_no_model_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load_policy(tmp_path, with_values=False)


@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_opens_as_the_very_same_model(request, tmp_path, tied):
    source = request.getfixturevalue("tied_dir" if tied else "tiny_dir")
    policy = load_policy(source, with_values=True)
    policy.load_weights([(name, torch.randn_like(tensor)) for name, tensor in policy.live_tensors().items()])
    target = tmp_path / "checkpoints" / "step-7"
    save_checkpoint(policy, source, target, version=7)
    reopened = AutoModelForCausalLM.from_pretrained(target)
    assert reopened.dtype == torch.float32
    for name, tensor in policy.model.state_dict().items():
        assert torch.equal(reopened.state_dict()[name], tensor)
    assert type(reopened).__name__ == "Qwen3ForCausalLM"
    assert (target / "tokenizer.json").read_text() == "{}"
    assert read_trainer_state(target).policy_version == 7
    assert [path.name for path in target.parent.iterdir()] == ["step-7"]


def test_a_checkpoint_never_replaces_another_one(tiny_dir, tmp_path):
    (tmp_path / "keep").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        save_checkpoint(load_policy(tiny_dir, with_values=False), tiny_dir, tmp_path, version=1)
    with pytest.raises(ConfigError, match="is no trainer state"):
        read_trainer_state(tmp_path)
