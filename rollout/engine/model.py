"""Opening a Hugging Face directory for generation: architecture and stop tokens, never weights."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from rlbridge.transport.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class CausalModel:
    """A causal language model of any architecture that attends to its whole past, behind one ``forward``.

    Its weights are meaningless until they are loaded.

    Args:
        model_dir: a Hugging Face directory with ``config.json``.
        dtype: ``float32`` or ``bfloat16``.
        max_length: longest sequence that will be asked for.

    Raises:
        ConfigError: the directory holds no such model, or the model cannot serve ``max_length`` positions.
    """

    def __init__(self, model_dir: Path, dtype: str, max_length: int) -> None:
        if dtype not in _DTYPES:
            raise ConfigError(f"rollout.dtype={dtype} is unknown; choose one of {', '.join(_DTYPES)}")
        try:
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
            self.module: Any = AutoModelForCausalLM.from_config(config, dtype=_DTYPES[dtype]).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{model_dir} is not the directory of a causal language model: {error}") from error
        text_config = self.module.config.get_text_config()
        self.vocabulary: int = text_config.vocab_size
        self.dtype = _DTYPES[dtype]
        _check_attention(self.module.config, text_config, max_length)
        parameters = inspect.signature(self.module.forward).parameters
        # transformers renames ``past_key_values`` to ``cache`` from 5.24 on.
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}

    def last_logits(
        self, tokens: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor, cache: object
    ) -> torch.Tensor:
        """Logits at the last position of each row.

        Args:
            tokens, position_ids: int64 ``[B, T]``.
            mask: additive, in the model's dtype, ``[B, 1, T, L]``.
            cache: receives the keys and values.

        Returns:
            ``[B, V]``.
        """
        output = self.module(
            input_ids=tokens,
            position_ids=position_ids,
            attention_mask=mask,
            use_cache=True,
            **{self._cache_name: cache},
            **self._options,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


def stop_tokens(model_dir: Path) -> frozenset[int]:
    """The tokens that end a response: from the generation config, else the model's config, else the tokenizer.

    Raises:
        ConfigError: none of them names one.
    """
    if (model_dir / "generation_config.json").is_file():
        found = _as_tokens(GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id)
        if found:
            return found
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    found = _as_tokens(getattr(config.get_text_config(), "eos_token_id", None))
    if not found and (model_dir / "tokenizer_config.json").is_file():
        found = _as_tokens(AutoTokenizer.from_pretrained(model_dir, local_files_only=True).eos_token_id)
    if not found:
        raise ConfigError(f"{model_dir} names no end-of-sequence token; set eos_token_id in its config.json")
    return found


def _as_tokens(value: int | list[int] | None) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def _check_attention(config: Any, text_config: Any, max_length: int) -> None:
    """Refuse what the decode loop would get wrong: windows, recurrent layers, unknown attention, too few positions."""
    positions = getattr(text_config, "max_position_embeddings", None)
    if positions is not None and max_length > positions:
        raise ConfigError(f"rollout.max_length={max_length} exceeds the model's {positions} positions; lower it")
    kinds = set(getattr(text_config, "layer_types", None) or ["full_attention"])
    window = getattr(text_config, "sliding_window", None)
    if "sliding_attention" in kinds and window is not None and max_length > window:
        raise ConfigError(
            f"rollout.max_length={max_length} exceeds the model's sliding window of {window} tokens, "
            "beyond which this engine would attend too far; lower it"
        )
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"this engine decodes attention layers only; the model also has {', '.join(sorted(unknown))}")
    if config._attn_implementation not in ("sdpa", "eager"):
        raise ConfigError(f"attention {config._attn_implementation!r} takes no explicit mask; use sdpa or eager")
