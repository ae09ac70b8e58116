"""Settings of optimisation and of the RL objective (config groups ``trainer`` and ``algorithm``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Advantage = Literal["group", "rloo", "reinforce_pp", "gae"]
Loss = Literal["ppo_clip", "dual_clip", "gspo", "cispo", "policy_gradient"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]
Correction = Literal["tis", "decoupled", "masked_token", "masked_sequence", "masked_geometric", "none"]
KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """The RL objective. ``docs/algorithms.md`` says what each choice computes and which presets there are.

    Attributes:
        prompts_per_step: prompts (groups) consumed by one training step.
        group_size: responses per prompt; at least 2 where advantages compare the responses of a group.
        advantage: ``group`` (GRPO and Dr. GRPO), ``rloo`` (leave-one-out), ``reinforce_pp`` (normalised over the batch)
            or ``gae`` (with a value head: PPO).
        normalize_std: ``group`` only: divide by the group's standard deviation.
        mask_truncated: leave responses that hit the token limit out of the loss.
        loss: ``ppo_clip``, ``dual_clip``, ``gspo``, ``cispo`` or ``policy_gradient``.
        clip_low, clip_high: the ratio current/old is clipped to ``[1 - clip_low, 1 + clip_high]``.
        dual_clip_bound: ``dual_clip`` only: largest ratio that a negative advantage is multiplied by, above 1.
        aggregation: ``token_mean`` (over the whole batch), ``sequence_mean`` or ``constant``.
        constant_tokens: ``constant`` only: the sum over a response's tokens is divided by this.
        correction: what makes up for tokens that another policy sampled: ``tis`` (truncated importance sampling),
            ``decoupled`` (the weight in full), ``masked_token``, ``masked_sequence``, ``masked_geometric`` (the weight,
            or nothing outside of ``[is_floor, is_cap]``) or ``none``.
        is_floor: least importance weight; masked corrections only.
        is_cap: largest importance weight; ``tis`` and masked corrections.
        allow_uncorrected: accept ``correction=none`` although staleness can exceed 0.
        default_max_staleness: bound used when ``sync.max_staleness`` is null and the mode is asynchronous.
        gamma: discount per token; ``gae`` and ``reinforce_pp``.
        gae_lambda, value_coef, value_clip: ``gae`` only.
        entropy_coef: weight of the entropy bonus.
        kl_coef: weight of the divergence from the reference model, the policy at version 0; 0 does without one.
        kl_estimator: ``k1``, ``k2`` or ``k3``.
        kl_in: ``loss`` (gradient flows through the estimate) or ``reward`` (subtracted from each token's reward).
    """

    prompts_per_step: int = 64
    group_size: int = 8
    advantage: Advantage = "group"
    normalize_std: bool = True
    mask_truncated: bool = False
    loss: Loss = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip_bound: float = 3.0
    aggregation: Aggregation = "token_mean"
    constant_tokens: int | None = None
    correction: Correction = "tis"
    is_floor: float = 0.5
    is_cap: float = 2.0
    allow_uncorrected: bool = False
    default_max_staleness: int = 4
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_coef: float = 0.5
    value_clip: float = 0.2
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_in: Literal["loss", "reward"] = "loss"

    @property
    def has_critic(self) -> bool:
        """Whether the policy needs a value head."""
        return self.advantage == "gae"


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
