"""What an engine refuses, and how weights enter it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rlbridge.rollout.config import RolloutConfig
from rlbridge.rollout.engine.model import stop_tokens
from rlbridge.rollout.engine.transformers_engine import TransformersEngine
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams
from rlbridge.sync.config import KvCachePolicy
from rlbridge.transport.errors import ConfigError, LayoutError, SyncError, TaskError

MakeEngine = Callable[..., TransformersEngine]
ModelDir = Callable[..., Path]


def request(prompt: list[int], **sampling: Any) -> GenerationRequest:
    return GenerationRequest(12, 0, 0, prompt, 0, SamplingParams(**{"max_new_tokens": 6, **sampling}))


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (request([]), TaskError, "request 12: its prompt is empty"),
        (request([3] * 35), TaskError, "request 12: a prompt of 35 tokens .* raise it to 41"),
        (request([3, 20]), TaskError, "request 12: prompt token 20 is outside .* vocabulary of 20"),
        (request([-1]), TaskError, "prompt token -1"),
        (request([3], max_new_tokens=0), ConfigError, "max_new_tokens=0"),
        (request([3], top_p=0.0), ConfigError, "top_p=0.0"),
        (request([3], top_p=1.5), ConfigError, "top_p=1.5"),
        (request([3], top_k=-1), ConfigError, "top_k=-1"),
        (request([3], temperature=0.0), ConfigError, "temperature=0.0 .* greedy"),
        (request([3], temperature=float("nan")), ConfigError, "temperature=nan"),
    ],
)
def test_unusable_requests_are_refused_and_nothing_is_queued(
    bad: GenerationRequest, error: type[Exception], words: str, make_engine: MakeEngine
) -> None:
    engine = make_engine()
    with pytest.raises(error, match=words):
        engine.submit([request([3]), bad])
    assert not engine.has_work


def test_it_serves_nothing_before_it_holds_a_version(model_dir: ModelDir) -> None:
    engine = TransformersEngine(model_dir("qwen3"), RolloutConfig())
    engine.submit([request([3])])
    with pytest.raises(SyncError, match="no policy version yet"):
        engine.step()


def test_weights_on_disk_are_never_read(model_dir: ModelDir, tmp_path: Path) -> None:
    shutil.copy(model_dir("qwen3") / "config.json", tmp_path)
    assert TransformersEngine(tmp_path, RolloutConfig()).version is None


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "llama", "gpt2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_integers_written_by_a_probe_are_read_back(name: str, dtype: str, model_dir: ModelDir) -> None:
    engine = TransformersEngine(model_dir(name), RolloutConfig(dtype=dtype))
    checkpoint = load_file(model_dir(name) / "model.safetensors")
    sent = {key: (torch.arange(value.numel()) % 251).reshape(value.shape).float() for key, value in checkpoint.items()}
    for pair in sent.items():  # one tensor at a time: no call needs them all
        engine.load_weights([pair])
    live = engine.live_tensors()
    for key, value in sent.items():
        torch.testing.assert_close(live[key].float(), value, atol=0, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2"])
def test_a_tied_head_follows_the_embedding(name: str, make_engine: MakeEngine) -> None:
    """PrimeIntellect PR#2823: a cloned tied head stayed stale."""
    engine = make_engine(name)
    embedding = next(n for n in engine.live_tensors() if "embed_tokens" in n or "wte" in n or "lm_head" in n)
    logprobs = []
    for version in (1, 2):
        engine.set_version(version, KvCachePolicy.KEEP)
        engine.submit([request([3, 4], greedy=True, max_new_tokens=1)])
        logprobs.append(engine.step()[0].logprobs)
        before = engine.live_tensors()[embedding].clone()
        engine.load_weights([(embedding, before * 3)])
    assert logprobs[0] != logprobs[1]
    assert engine._model.module.get_output_embeddings().weight.data_ptr() == (
        engine._model.module.get_input_embeddings().weight.data_ptr()
    )


def test_unknown_names_and_wrong_shapes_are_named(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(LayoutError, match=r"no tensor 'model.norm.wieght'; the nearest name is 'model.norm.weight'"):
        engine.load_weights([("model.norm.wieght", torch.ones(64))])
    with pytest.raises(LayoutError, match=r"model.norm.weight: the checkpoint has shape \(1,\), the engine \(64,\)"):
        engine.load_weights([("model.norm.weight", torch.ones(1))])


def _copy(source: Path, target: Path) -> Path:
    return Path(shutil.copytree(source, target))


def _edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_stop_tokens_come_from_generation_config_then_config_then_nowhere(model_dir: ModelDir, tmp_path: Path) -> None:
    assert stop_tokens(model_dir("llama")) == {1, 2}
    edited = _copy(model_dir("qwen3"), tmp_path / "edited")
    _edit(edited / "generation_config.json", eos_token_id=[7, 8])
    assert stop_tokens(edited) == {7, 8}
    (edited / "generation_config.json").unlink()
    assert stop_tokens(edited) == {1}
    _edit(edited / "config.json", eos_token_id=None)
    with pytest.raises(ConfigError, match="names no end-of-sequence token; set eos_token_id"):
        stop_tokens(edited)


def test_models_it_would_get_wrong_are_refused(model_dir: ModelDir, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not the directory of a causal language model"):
        TransformersEngine(tmp_path, RolloutConfig())
    with pytest.raises(ConfigError, match="max_length=500 exceeds the model's 64 positions"):
        TransformersEngine(model_dir("gpt2"), RolloutConfig(max_length=500))
    windowed = _copy(model_dir("qwen3"), tmp_path / "windowed")
    kinds = ["full_attention", "sliding_attention"]
    _edit(windowed / "config.json", use_sliding_window=True, sliding_window=16, max_window_layers=1, layer_types=kinds)
    with pytest.raises(ConfigError, match="sliding window of 16 tokens"):
        TransformersEngine(windowed, RolloutConfig(max_length=32))
    assert TransformersEngine(windowed, RolloutConfig(max_length=16)).version is None
    with pytest.raises(ConfigError, match=r"rollout\.dtype=float16 is unknown"):
        TransformersEngine(model_dir("qwen3"), RolloutConfig(dtype="float16"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_rows=0"):
        TransformersEngine(model_dir("qwen3"), RolloutConfig(max_rows=0))
