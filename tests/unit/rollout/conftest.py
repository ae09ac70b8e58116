"""Tiny models of three architectures on disk, and engines that hold their weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rlbridge.rollout.config import RolloutConfig
from rlbridge.rollout.engine.transformers_engine import TransformersEngine
from rlbridge.sync.config import KvCachePolicy

VOCABULARY = 20
EOS = 1

disable_progress_bar()
torch.set_num_threads(1)


def _qwen3(**changes: Any) -> Any:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": EOS, "bos_token_id": None}
    return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, **ids, "max_position_embeddings": 128, **changes}))


def _llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            eos_token_id=[EOS, 2],
            pad_token_id=None,
            bos_token_id=None,
        )
    )


def _gpt2() -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=2, eos_token_id=EOS, bos_token_id=EOS
        )
    )


_MAKERS: dict[str, Callable[[], Any]] = {
    "qwen3": _qwen3,
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True),
    "llama": _llama,
    "gpt2": _gpt2,
}


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``model_dir(name, seed=0)``: a checkpoint directory with weights wide enough that sequences differ."""
    made: dict[tuple[str, int], Path] = {}

    def make(name: str, seed: int = 0) -> Path:
        if (name, seed) not in made:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model = _MAKERS[name]()
                for parameter in model.parameters():
                    if parameter.ndim == 2:
                        parameter.data.normal_(std=0.15)
            made[name, seed] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name, seed])
        return made[name, seed]

    return make


@pytest.fixture
def make_engine(model_dir: Callable[..., Path]) -> Callable[..., TransformersEngine]:
    """``make_engine(name, seed=0, **rollout settings)``: an engine that holds version 0 of that checkpoint."""

    def make(name: str = "qwen3", seed: int = 0, **settings: Any) -> TransformersEngine:
        directory = model_dir(name, seed)
        engine = TransformersEngine(
            directory, RolloutConfig(**{"max_rows": 8, "max_length": 40, **settings}), replica=3
        )
        _load(engine, directory)
        engine.set_version(0, KvCachePolicy.KEEP)
        return engine

    return make


@pytest.fixture(scope="session")
def load_checkpoint() -> Callable[[TransformersEngine, Path], None]:
    """Bring a checkpoint's tensors into an engine, as the bridge would."""
    return _load


def _load(engine: TransformersEngine, directory: Path) -> None:
    engine.load_weights(load_file(directory / "model.safetensors").items())
