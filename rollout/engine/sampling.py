"""Drawing tokens: truncated distributions, random streams that belong to a request, inverse transform sampling.

Notation: ``B`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from rlbridge.rollout.trajectory import SamplingParams
from rlbridge.transport.errors import ConfigError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def check_sampling(params: SamplingParams, who: str) -> None:
    """Refuse parameters that no distribution has.

    Raises:
        ConfigError: names ``who`` and the parameter.
    """
    if params.max_new_tokens < 1:
        raise ConfigError(f"{who}: max_new_tokens={params.max_new_tokens}, but a response has at least 1 token")
    if not 0.0 < params.top_p <= 1.0:
        raise ConfigError(f"{who}: top_p={params.top_p} is outside (0, 1]; 1 keeps everything")
    if params.top_k < 0:
        raise ConfigError(f"{who}: top_k={params.top_k} is negative; 0 keeps everything")
    if not params.greedy and not 0.0 < params.temperature < float("inf"):
        raise ConfigError(f"{who}: temperature={params.temperature} is not positive; use greedy=true for argmax")


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of ``B`` rows, as columns (``[B]`` each; greedy rows: temperature 1, no truncation)."""

    temperature: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    greedy: torch.Tensor


def uniforms(seeds: npt.NDArray[np.uint64], counters: npt.NDArray[np.int64]) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64 ``[B]``: number ``counters[i]`` of the stream ``seeds[i]``.

    Counter-based, so a row's numbers depend on nothing but its own seed and position: element ``c`` of SplitMix64
    (Steele, Lea & Flood 2014) started from the mixed seed. 32 bits, so that ``u * total < total`` in float64.
    """
    with np.errstate(over="ignore"):
        mixed = _mix64(_mix64(seeds + _GOLDEN) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def log_probabilities(logits: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Log of the distribution that tokens are drawn from, float32 ``[B, V]``; ``-inf`` where it was truncated.

    ``softmax(logits / temperature)``, cut to the ``top_k`` likeliest tokens, then to the smallest set of the likeliest
    that holds mass ``top_p`` of the rest (Holtzman et al. 2020), renormalised.
    """
    scaled = logits.float() / sampling.temperature.unsqueeze(1)
    if bool((sampling.top_k > 0).any()) or bool((sampling.top_p < 1.0).any()):
        scaled = scaled.masked_fill(~_kept(scaled, sampling), float("-inf"))
    return scaled.log_softmax(dim=-1)


def _kept(scaled: torch.Tensor, sampling: RowSampling) -> torch.Tensor:
    """Which tokens survive top-k and top-p, bool ``[B, V]``. The likeliest one always does."""
    vocabulary = scaled.shape[1]
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, vocabulary).unsqueeze(1)
    in_top_k = torch.arange(vocabulary) < top_k
    mass = ordered.masked_fill(~in_top_k, float("-inf")).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    mass_before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    top_p = sampling.top_p.unsqueeze(1)
    kept = in_top_k & ((mass_before < top_p) | (top_p >= 1.0))
    return torch.empty_like(kept).scatter_(1, order, kept)


def draw(logits: torch.Tensor, sampling: RowSampling, uniform: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token per row.

    Args:
        logits: ``[B, V]``, any floating dtype.
        sampling: parameters of the rows.
        uniform: float64 ``[B]`` in [0, 1), one number per row; greedy rows ignore theirs.

    Returns:
        Tokens int64 ``[B]`` and the log probability of each under the distribution it was drawn from, float32 ``[B]``.
    """
    log_probs = log_probabilities(logits, sampling)
    cumulative = log_probs.exp().cumsum(dim=-1, dtype=torch.float64)
    # The first index whose cumulative mass exceeds the target has a probability above zero, so it was not cut.
    target = uniform.unsqueeze(1) * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[1] - 1)
    if bool(sampling.greedy.any()):
        drawn = torch.where(sampling.greedy.unsqueeze(1), log_probs.argmax(dim=-1, keepdim=True), drawn)
    return drawn.squeeze(1), log_probs.gather(1, drawn).squeeze(1)
