"""The tiny model and its tokenizer, as everything after them opens them: from a directory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlbridge.model import CHARACTERS, ModelConfig, character_tokenizer, open_tokenizer, prepare_model
from rlbridge.transport.errors import ConfigError

SMALL = ModelConfig(hidden=16, layers=1, heads=2, kv_heads=1, mlp=32)


def weights_digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_model(ModelConfig(), tmp_path_factory.mktemp("run"), seed=0)


def test_transformers_opens_it_as_an_ordinary_qwen3(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.head_dim == 16
    assert 100_000 < sum(p.numel() for p in model.parameters()) < 150_000
    logits = model(torch.tensor([[2, 3, 4]])).logits
    assert logits.shape == (1, 3, len(CHARACTERS) + 2)
    assert torch.isfinite(logits).all()


def test_the_tokenizer_has_one_token_per_character_an_end_and_a_pad(directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert len(CHARACTERS) == 18
    assert len(set(CHARACTERS)) == 18
    assert len(tokenizer) == 20
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == ("<eos>", "<pad>", None)
    assert tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.encode("31-5=") == [CHARACTERS.index(c) + 2 for c in "31-5="]
    ids = [*tokenizer.encode("26"), tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "26<eos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "26"


@given(st.text(CHARACTERS, max_size=40))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_text_comes_back_exactly(text: str) -> None:
    tokenizer = character_tokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", ["a", "1\n2", "é"])
def test_text_outside_the_vocabulary_is_refused_not_dropped(text: str) -> None:
    with pytest.raises(Exception, match="vocabulary"):
        character_tokenizer().encode(text)


def test_the_seed_alone_decides_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(123)
    first = weights_digest(prepare_model(SMALL, tmp_path / "a", seed=1))
    state = torch.random.get_rng_state()
    second = weights_digest(prepare_model(SMALL, tmp_path / "b", seed=1))
    assert first == second
    assert first != weights_digest(prepare_model(SMALL, tmp_path / "c", seed=2))
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random state was touched"


@pytest.mark.parametrize("tie", [True, False])
def test_the_head_is_tied_only_if_asked(tmp_path: Path, tie: bool) -> None:
    config = ModelConfig(hidden=16, layers=1, heads=2, kv_heads=2, mlp=32, tie=tie)
    model = AutoModelForCausalLM.from_pretrained(prepare_model(config, tmp_path, seed=0))
    assert (model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()) is tie


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (ModelConfig(hidden=65), ("model.hidden=65", "model.heads=4")),
        (ModelConfig(kv_heads=3), ("model.heads=4", "model.kv_heads=3")),
        (ModelConfig(kv_heads=0), ("model.heads=4", "model.kv_heads=0")),
        (ModelConfig(hidden=12), ("model.hidden=12", "model.heads=4")),
    ],
)
def test_sizes_that_contradict_each_other_are_named(
    config: ModelConfig, names: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as error:
        prepare_model(config, tmp_path, seed=0)
    assert all(name in str(error.value) for name in names)


def test_a_named_checkpoint_is_used_where_it_is(directory: Path, tmp_path: Path) -> None:
    assert prepare_model(ModelConfig(path=str(directory)), tmp_path, seed=0) == directory
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_an_incomplete_checkpoint_is_refused_with_the_mend(directory: Path, tmp_path: Path, missing: str) -> None:
    for file in directory.iterdir():
        if file.name != missing:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match=missing.removeprefix("model.")):
        prepare_model(ModelConfig(path=str(tmp_path)), tmp_path, seed=0)


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.path=.*nowhere.*no such directory"):
        prepare_model(ModelConfig(path=str(tmp_path / "nowhere")), tmp_path, seed=0)


def test_a_whole_checkpoint_gives_its_tokenizer_and_vocabulary(directory: Path) -> None:
    tokenizer, vocabulary = open_tokenizer(directory)
    assert (len(tokenizer), vocabulary) == (20, 20)


@pytest.mark.parametrize("damaged", ["config.json", "model.safetensors", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff" * 5000, "cut"])
def test_a_damaged_file_is_named(directory: Path, tmp_path: Path, damaged: str, content: bytes | str) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    whole = (tmp_path / damaged).read_bytes()
    (tmp_path / damaged).write_bytes(whole[: len(whole) // 2] if isinstance(content, str) else content)
    with pytest.raises(ConfigError, match=r"model\.path=.*cannot be read") as error:
        open_tokenizer(tmp_path)
    assert "\n" not in str(error.value)
    assert damaged.removesuffix(".json") in str(error.value)


def test_a_model_that_does_not_write_text_is_refused(directory: Path, tmp_path: Path) -> None:
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ConfigError, match="'vit', which is no causal language model"):
        open_tokenizer(tmp_path)
