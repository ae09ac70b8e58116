"""A tiny Qwen3 on disk, and trajectories to train it on."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlbridge.rollout.trajectory import Trajectory, VersionSpan

torch.set_num_threads(1)
disable_progress_bar()

PAD, EOS, VOCABULARY = 0, 1, 21


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """An untied checkpoint with a file beside the weights."""
    return _write(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="session")
def tied_dir(tmp_path_factory) -> Path:
    return _write(tmp_path_factory.mktemp("tied"), tied=True)


def _write(directory: Path, *, tied: bool) -> Path:
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    return directory


@pytest.fixture
def trajectories() -> list[Trajectory]:
    """Eight groups of two, prompts and responses of differing lengths, random logprobs."""
    dice = random.Random(0)
    made = []
    for index in range(16):
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
