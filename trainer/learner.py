"""One training step: advantages, old log probabilities, then a few clipped updates.

PPO (arXiv:1707.06347) with a critic that shares the policy's trunk, or GRPO (arXiv:2402.03300) without one. Each rank
holds the whole batch and computes its own rows; gradients, and hence weights, are the same for any number of ranks and
any size of micro-batch.

Notation: ``B`` responses (rows), ``T`` tokens of the longest response.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbridge.trainer.advantages import generalized_advantages, group_relative_advantages
from rlbridge.trainer.batch import Batch, MiniBatchPlan, plan_rows
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.losses import token_statistics
from rlbridge.trainer.metrics import Statistics
from rlbridge.trainer.objective import Targets, objective
from rlbridge.trainer.parallel import rank, world_size
from rlbridge.trainer.policy import Policy
from rlbridge.transport.errors import TrainingError


class Learner:
    """Trains a policy on batches; each batch makes one policy version.

    Args:
        policy: with a value head for PPO, without for GRPO.
        temperature: of the sampler; log probabilities are those of the distribution that tokens were drawn from.
    """

    def __init__(
        self, policy: Policy, algorithm: AlgorithmConfig, trainer: TrainerConfig, *, temperature: float
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._trainer = trainer
        self._temperature = temperature
        self._parameters = list(policy.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=trainer.learning_rate,
            betas=(trainer.beta1, trainer.beta2),
            weight_decay=trainer.weight_decay,
        )

    def step(self, batch: Batch, version: int) -> dict[str, float]:
        """Turn policy ``version`` into ``version + 1``. Collective over the trainer ranks; every rank passes all rows.

        Returns:
            metrics named ``train/...``, equal on all ranks.

        Raises:
            TrainingError: a loss or a gradient is not finite; the update that it belongs to is not made.
        """
        plan = plan_rows(
            batch.rows,
            mini_batches=self._trainer.mini_batches,
            micro_batch_rows=self._trainer.micro_batch_rows,
            rank=rank(),
            world=world_size(),
        )
        rate = self._set_learning_rate(version)
        targets = self._targets(batch, plan)
        statistics = Statistics()
        # GRPO's first mini-batch meets the old weights themselves (see _targets).
        norms = [
            self._update(batch, targets, mini, statistics, old_is_current=index == 0 and not self._has_critic)
            for index, mini in enumerate(plan)
        ]
        metrics = self._summary(statistics.reduce(), batch)
        metrics |= {"grad_norm": sum(norms) / len(norms), "lr": rate, "updates_in_step": float(len(norms))}
        return {f"train/{name}": value for name, value in metrics.items()}

    @property
    def _has_critic(self) -> bool:
        return self._algorithm.name == "ppo"

    def _set_learning_rate(self, version: int) -> float:
        """Linear, from the peak at version 0 to its final fraction at the last step."""
        done = min(1.0, version / max(1, self._trainer.steps - 1))
        rate = self._trainer.learning_rate * (1.0 - (1.0 - self._trainer.final_lr_fraction) * done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _targets(self, batch: Batch, plan: list[MiniBatchPlan]) -> Targets:
        """Advantages, and what the old weights say wherever that is needed before the first update moves them.

        PPO needs values of all rows for its advantages. GRPO's first mini-batch is computed with the old weights
        anyway: its own forward serves, and one forward of the batch's share is saved.
        """
        if not self._has_critic:
            old_logprobs, _ = self._snapshot(batch, plan[1:])
            relative = group_relative_advantages(
                batch.rewards, batch.groups, normalize_std=self._algorithm.normalize_std
            )
            zeros = torch.zeros_like(old_logprobs)
            advantages = relative[:, None].expand_as(zeros)
            return Targets(advantages=advantages, returns=zeros, old_logprobs=old_logprobs, old_values=zeros)
        old_logprobs, values = self._snapshot(batch, plan)
        advantages, returns = generalized_advantages(
            rewards_at_the_end(batch),
            values[:, :-1],
            # A response that hit the token limit was scored as it stands, so its episode is over; one that the engine
            # gave back unfinished would have gone on.
            torch.where(batch.interrupted, values.gather(1, batch.lengths[:, None]).squeeze(1), 0.0),
            batch.mask,
            gamma=self._algorithm.gamma,
            gae_lambda=self._algorithm.gae_lambda,
        )
        return Targets(advantages=advantages, returns=returns, old_logprobs=old_logprobs, old_values=values[:, :-1])

    @torch.no_grad()
    def _snapshot(self, batch: Batch, plan: list[MiniBatchPlan]) -> tuple[Tensor, Tensor]:
        """Log probabilities ``[B, T]`` and values ``[B, T + 1]`` under the present weights, own rows only."""
        logprobs = torch.zeros(batch.mask.shape)
        values = torch.zeros(batch.positions.shape)
        for rows in (rows for mini in plan for rows in mini.micro_batches):
            micro = batch.select(rows) if rows else batch.filler()
            logits, row_values = self._policy(micro)
            if rows:
                logprobs[rows] = token_statistics(logits, micro.response_ids, self._temperature).logprobs
            if rows and row_values is not None:
                values[rows] = row_values
        return logprobs, values

    def _update(
        self, batch: Batch, targets: Targets, mini: MiniBatchPlan, statistics: Statistics, *, old_is_current: bool
    ) -> float:
        """One optimiser update; returns the gradient norm before clipping."""
        tokens = int(batch.lengths[mini.rows].sum())
        for rows in mini.micro_batches:
            micro = batch.select(rows) if rows else batch.filler()
            logits, values = self._policy(micro)
            loss = objective(
                logits,
                values,
                micro,
                targets.select(rows or [0]),
                self._algorithm,
                temperature=self._temperature,
                mini_batch_tokens=tokens,
                old_is_current=old_is_current,
                statistics=statistics,
            )
            loss.backward()
        return apply_gradients(self._optimizer, self._parameters, self._trainer.max_grad_norm)

    def _summary(self, means: dict[str, float], batch: Batch) -> dict[str, float]:
        mean, square = means["advantage_mean"], means.pop("advantage_square")
        value_loss, algorithm = means.get("value_loss", 0.0), self._algorithm
        return means | {
            "loss": means["policy_loss"]
            + algorithm.value_coef * value_loss
            - algorithm.entropy_coef * means["entropy"],
            "advantage_std": math.sqrt(max(0.0, square - mean * mean)),
            "reward_mean": float(batch.rewards.mean()),
            "response_length": float(batch.lengths.float().mean()),
            "truncation_rate": float(batch.truncated.float().mean()),
            "tokens": float(batch.tokens),
        }


def rewards_at_the_end(batch: Batch) -> Tensor:
    """``[B, T]``: the reward of a response arrives with its last token."""
    last = torch.arange(batch.mask.shape[1]) == batch.lengths[:, None] - 1
    return torch.where(last, batch.rewards[:, None], 0.0)


def apply_gradients(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], max_norm: float) -> float:
    """Clip, update, forget the gradients; returns their norm before clipping. Collective over the trainer ranks.

    Raises:
        TrainingError: the norm is not finite; the weights are as before.
    """
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    whole = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    if not math.isfinite(whole):
        raise TrainingError(f"the gradient norm is {whole}; lower the learning rate, or look at the rewards")
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return whole
