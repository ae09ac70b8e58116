"""The model a run starts from: always a Hugging Face directory (config group ``model``).

Either a local checkpoint that the user names, used as it is, or a tiny Qwen3 with random weights and a character
tokenizer that is written into the run's folder before any worker starts. Everything after this knows only a path.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlbridge.transport.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*=>:, "
"""What the tiny model reads and writes: one token each."""
PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"

T = TypeVar("T")

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which policy is trained.

    Attributes:
        path: a local Hugging Face checkpoint with its tokenizer; ``None`` builds the tiny model below.
        hidden, layers, heads, kv_heads, mlp: sizes of the tiny Qwen3 (width, blocks, query heads, key-value heads,
            inner width of the MLP).
        tie: whether the tiny model's output head shares the embedding.
    """

    path: str | None = None
    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 4
    mlp: int = 256
    tie: bool = False


def prepare_model(config: ModelConfig, run_dir: Path, seed: int) -> Path:
    """Return the directory of the model, building the tiny one in ``run_dir/model`` if no path is given.

    The same ``config`` and ``seed`` give the same weights, byte for byte.

    Raises:
        ConfigError: ``model.path`` is not a usable checkpoint, or the tiny model's sizes contradict each other.
    """
    if config.path is not None:
        return _checked_checkpoint(Path(config.path).expanduser().absolute())
    directory = run_dir.absolute() / "model"
    _build_tiny_model(config, directory, seed)
    character_tokenizer().save_pretrained(directory)
    return directory


def open_tokenizer(directory: Path) -> tuple[PreTrainedTokenizerBase, int]:
    """The tokenizer of a checkpoint and the number of tokens that its model has embeddings for.

    Reads every file of the checkpoint far enough to know it is whole: here, a damaged one costs seconds and is named;
    in a worker it would cost the start of a whole run.

    Raises:
        ConfigError: a file is damaged, or the checkpoint is no causal language model.
    """
    from safetensors import safe_open
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoTokenizer

    config = _readable(directory, "config.json", lambda: AutoConfig.from_pretrained(directory))
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"model.path={directory}: config.json describes a {config.model_type!r}, which is no causal language "
            "model; give one that AutoModelForCausalLM opens"
        )
    for weights in sorted(directory.glob("*.safetensors")):
        with _readable(directory, weights.name, partial(safe_open, weights, framework="pt")):
            pass  # opening checks the header against the length of the file
    tokenizer = _readable(directory, "the tokenizer", lambda: AutoTokenizer.from_pretrained(directory))
    return tokenizer, config.get_text_config().vocab_size


def _readable(directory: Path, what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except Exception as error:  # the libraries raise almost anything on a damaged file
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigError(
            f"model.path={directory}: {what} cannot be read ({type(error).__name__}: {reason}); copy or save the "
            "checkpoint again"
        ) from error


def character_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character of ``CHARACTERS``; text outside of them raises.

    ``decode(encode(text)) == text`` for every text over ``CHARACTERS``; no token is added at either end.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate((PAD_TOKEN, EOS_TOKEN, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


def _build_tiny_model(config: ModelConfig, directory: Path, seed: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    _check_sizes(config)
    disable_progress_bar()  # the terminal belongs to rlbridge's own progress
    model_config = Qwen3Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=config.hidden,
        intermediate_size=config.mlp,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        max_position_embeddings=512,
        # The usual 10,000 turns too slowly to tell a dozen positions apart; with it, sorting is learnt more slowly.
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        tie_word_embeddings=config.tie,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(model_config)
    model.save_pretrained(directory)


def _check_sizes(config: ModelConfig) -> None:
    _check_multiple("model.hidden", config.hidden, "model.heads", config.heads)
    _check_multiple("model.heads", config.heads, "model.kv_heads", config.kv_heads)
    if (config.hidden // config.heads) % 2:
        raise ConfigError(
            f"model.hidden={config.hidden} over model.heads={config.heads} gives an odd head width; "
            "rotary positions need an even one"
        )


def _check_multiple(name: str, whole: int, part_name: str, part: int) -> None:
    if part < 1 or whole < 1 or whole % part:
        raise ConfigError(f"{name}={whole} must be a multiple of {part_name}={part}")


def _checked_checkpoint(directory: Path) -> Path:
    if not directory.is_dir():
        raise ConfigError(f"model.path={directory}: no such directory; give a local Hugging Face checkpoint")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"model.path={directory}: no config.json; is this a Hugging Face checkpoint?")
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"model.path={directory}: no *.safetensors file; write one with "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(DIR)"
        )
    if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        raise ConfigError(
            f"model.path={directory}: no tokenizer ({', '.join(_TOKENIZER_FILES)}); "
            "write it with AutoTokenizer.from_pretrained(...).save_pretrained(DIR)"
        )
    return directory
