"""Settings of generation and of tasks (config groups ``rollout`` and ``task``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """How responses are generated.

    Attributes:
        replicas: number of rollout processes.
        dtype: ``float32`` or ``bfloat16``: the dtype of the engine's weights.
        max_rows: sequences that decode at once on one replica.
        max_length: longest prompt plus response, in tokens; sizes the KV cache.
        temperature, top_p, top_k: the sampling distribution of training rollouts.
        threads: compute threads of one replica.
    """

    replicas: int = 2
    dtype: Literal["float32", "bfloat16"] = "float32"
    max_rows: int = 256
    max_length: int = 32
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """What is asked and how answers are rewarded.

    Attributes:
        name: ``sort``, ``reverse``, ``addition`` or ``jsonl``.
        digits: length of the problem (built-in tasks).
        partial_credit: reward the share of right positions instead of exact match (built-in tasks).
        max_new_tokens: cut of a response; must cover the answer and the end-of-sequence token.
        eval_prompts: size of the held-out set.
        warmup_until: supervised warm-up before RL ends at this expected sampled accuracy; 0 means no warm-up.
        path: a JSONL file, one object with at least ``prompt`` a line (``jsonl``).
        reward: ``package.module:function`` called as ``f(prompt=..., response=..., record=...) -> float`` (``jsonl``).
        eval_fraction: share of the file held out for evaluation (``jsonl``).
        reward_timeout_s: longest time that scoring one batch of responses may take.
    """

    name: Literal["sort", "reverse", "addition", "jsonl"] = "sort"
    digits: int = 5
    partial_credit: bool = False
    max_new_tokens: int = 6
    eval_prompts: int = 1024
    warmup_until: float = 0.3
    path: str | None = None
    reward: str | None = None
    eval_fraction: float = 0.1
    reward_timeout_s: float = 300.0
