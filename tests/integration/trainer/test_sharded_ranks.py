"""FSDP2 over gloo, real processes: any number of ranks trains, loads, publishes and saves what one rank would."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import msgspec
import pytest
import torch
from ranks import run_ranks
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlbridge.rollout.trajectory import Trajectory, VersionSpan

PROGRAM = Path(__file__).with_name("rank_program.py")
DEADLINE_S = 150.0
VOCABULARY, EOS = 21, 1  # 21 rows over 2 or 3 ranks, 1 row of the value head: shards are uneven, or empty

NEEDS_EVERY_RANK = {
    "advantage": "reinforce_pp",
    "loss": "gspo",
    "aggregation": "sequence_mean",
    "correction": "masked_geometric",
    "is_floor": 0.05,
    "kl_coef": 0.1,
    "kl_in": "reward",
}
"""Normalisation over the batch, a reference model, and denominators that depend on what every rank computes."""


def write_model(directory: Path, *, tied: bool) -> Path:
    disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=25,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


def make_trajectories(count: int) -> list[Trajectory]:
    dice = random.Random(0)
    made = []
    for index in range(count):
        tokens = [dice.randrange(2, VOCABULARY) for _ in range(dice.randrange(0, 5))] + [EOS]
        made.append(
            Trajectory(
                request_id=index,
                group=index // 2,
                sample=index % 2,
                prompt_ids=[dice.randrange(2, VOCABULARY) for _ in range(dice.randrange(1, 5))],
                response_ids=tokens,
                logprobs=[-3 * dice.random() for _ in tokens],
                versions=[VersionSpan(0, len(tokens), 0)],
                finish_reason="stop",
                replica=0,
            )
        )
    return made


def make_job(folder: Path, model: Path, algorithm: dict, trainer: dict) -> Path:
    folder.mkdir()
    trajectories = make_trajectories(13)  # 13 rows divide by nothing: a rank may be without a row in a micro-batch
    dice = random.Random(1)
    job = {
        "model": str(model),
        "folder": str(folder),
        "trajectories": trajectories,
        "rewards": [float(index % 3 == 0) for index in range(len(trajectories))],
        "examples": [{"prompt_ids": [t, 2], "answer_ids": [t, EOS]} for t in dice.choices(range(3, 21), k=64)],
        "algorithm": algorithm,
        "trainer": {"warmup_steps_max": 2, "warmup_batch": 5, "max_grad_norm": 1e9, "mini_batches": 2} | trainer,
    }
    file = folder / "job.json"
    file.write_bytes(msgspec.json.encode(job))
    return file


def run_alone(job: Path) -> dict:
    """Run the program on one rank, in this process."""
    spec = importlib.util.spec_from_file_location("rank_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    program.main(0, 1, msgspec.json.decode(job.read_bytes(), type=program.Job))
    return torch.load(job.with_name("rank-0.pt"), weights_only=False)


def run_together(job: Path, world: int) -> list[dict]:
    """Run the program on ``world`` ranks; returns what each saw."""
    run_ranks(PROGRAM, world, str(job), folder=job.parent, deadline_s=DEADLINE_S)
    return [torch.load(job.with_name(f"rank-{rank}.pt"), weights_only=False) for rank in range(world)]


@pytest.mark.parametrize(
    ("world", "choices", "tied", "micro_batch_rows"),
    [(2, {}, False, None), (3, {"advantage": "gae"}, True, 1), (2, NEEDS_EVERY_RANK, False, 3)],
    ids=["two ranks, grpo", "three ranks, ppo, tied, micro-batches of one row", "two ranks, statistics of all rows"],
)
def test_ranks_together_equal_one_rank(tmp_path, world, choices, tied, micro_batch_rows):
    model = write_model(tmp_path / "model", tied=tied)
    algorithm = {"entropy_coef": 0.01} | choices
    alone = run_alone(make_job(tmp_path / "alone", model, algorithm, {}))
    ranks = run_together(make_job(tmp_path / "ranks", model, algorithm, {"micro_batch_rows": micro_batch_rows}), world)
    for seen in ranks:
        assert_same_training(seen, alone)
    assert_shards_cover_the_model(ranks, alone)
    assert_checkpoint_opens(tmp_path / "ranks" / "checkpoint", ranks[0])


def assert_same_training(seen, alone):
    assert seen["warm_up"].steps == alone["warm_up"].steps == 2
    assert seen["warm_up"].accuracy == pytest.approx(alone["warm_up"].accuracy, abs=1e-6)
    assert seen["metrics"] == pytest.approx(alone["metrics"], abs=1e-4)
    first, expected = seen["gradients"][0], alone["gradients"][0]
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
    for parameter, gradient in expected.items():
        torch.testing.assert_close(first[parameter], gradient, rtol=0, atol=1e-6, msg=f"gradient of {parameter}")
    for parameter, weight in alone["full"].items():
        # AdamW divides by the gradient's size, so noise in a tiny gradient is as large as the rate.
        assert (seen["full"][parameter] - weight).abs().mean() < 1e-4, parameter


def assert_shards_cover_the_model(ranks, alone):
    """Every element of every weight is held by exactly one rank, in the place that layout discovery says."""
    for name, whole in alone["live"].items():
        shards = [seen["live"][name] for seen in ranks if name in seen["live"]]
        assert torch.equal(torch.cat(shards), whole), name
    held = dict.fromkeys(alone["live"], 0)
    for seen in ranks:
        for _runtime, tensor, start, count, *_ in seen["layout"]["boxes"]:
            held[tensor] += torch.Size(count).numel()
            own = seen["live"][tensor]
            assert torch.equal(own, alone["live"][tensor][start[0] : start[0] + count[0]]), tensor
    assert held == {name: whole.numel() for name, whole in alone["live"].items()}


def assert_checkpoint_opens(directory, seen):
    opened = AutoModelForCausalLM.from_pretrained(directory).state_dict()
    assert opened.keys() == seen["full"].keys()
    for name, tensor in seen["full"].items():
        assert torch.equal(opened[name], tensor), name
    assert msgspec.json.decode((directory / "trainer_state.json").read_bytes()) == {"policy_version": 1}
