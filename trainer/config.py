"""Settings of optimisation and of the RL objective (config groups ``trainer`` and ``algorithm``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The RL objective.

    Attributes:
        name: ``grpo`` (group-relative advantages) or ``ppo`` (value head and GAE).
        prompts_per_step: prompts (groups) consumed by one training step.
        group_size: responses per prompt; at least 2 for GRPO.
        clip_low, clip_high: PPO ratio is clipped to ``[1 - clip_low, 1 + clip_high]``.
        normalize_std: GRPO: divide by the group's standard deviation.
        correction: off-policy correction: ``tis`` (truncated importance sampling) or ``none``.
        tis_cap: truncation of the importance weight.
        allow_uncorrected: accept ``correction=none`` although staleness can exceed 0.
        default_max_staleness: bound used when ``sync.max_staleness`` is null and the mode is asynchronous.
        gamma, gae_lambda, value_coef, value_clip: PPO only.
        entropy_coef: weight of the entropy bonus.
    """

    name: Literal["grpo", "ppo"] = "grpo"
    prompts_per_step: int = 64
    group_size: int = 8
    clip_low: float = 0.2
    clip_high: float = 0.2
    normalize_std: bool = True
    correction: Literal["tis", "none"] = "tis"
    tis_cap: float = 2.0
    allow_uncorrected: bool = False
    default_max_staleness: int = 4
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2
    entropy_coef: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How the policy is optimised.

    Attributes:
        ranks: trainer processes; more than one shards the model with FSDP2 over gloo.
        steps: training steps, each of one admitted batch; the policy version grows by one each.
        mini_batches: optimiser updates within a step.
        micro_batch_rows: rows per forward; ``None`` takes a whole mini-batch. Changes memory, not gradients.
        learning_rate: peak AdamW learning rate.
        final_lr_fraction: the rate falls linearly to this fraction at the last step.
        beta1, beta2, weight_decay: AdamW.
        max_grad_norm: gradient clipping.
        warmup_steps_max: most supervised warm-up steps (where the task asks for warm-up).
        warmup_batch: examples per warm-up step.
        warmup_learning_rate: AdamW rate of the warm-up.
        checkpoint_every: steps between checkpoints; 0 writes only the last one.
        threads: compute threads of one rank.
    """

    ranks: int = 1
    steps: int = 140
    mini_batches: int = 2
    micro_batch_rows: int | None = None
    learning_rate: float = 5e-4
    final_lr_fraction: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    warmup_steps_max: int = 200
    warmup_batch: int = 64
    warmup_learning_rate: float = 1e-3
    checkpoint_every: int = 0
    threads: int = 1
