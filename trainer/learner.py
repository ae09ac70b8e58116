"""One training step: what the old weights say, targets, then a few updates.

PPO (arXiv:1707.06347) with a critic that shares the policy's trunk, or an algorithm without one, such as GRPO
(arXiv:2402.03300). Each rank holds the whole batch and computes its own rows; gradients, and hence weights, are the
same for any number of ranks and any size of micro-batch.

Notation: ``B`` responses (rows), ``T`` tokens of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlbridge.trainer.batch import Batch, MiniBatchPlan, plan_rows
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.losses.aggregation import denominator_of
from rlbridge.trainer.losses.tokens import token_statistics
from rlbridge.trainer.metrics import Statistics
from rlbridge.trainer.objective import objective
from rlbridge.trainer.parallel import all_reduce, rank, world_size
from rlbridge.trainer.policy import Policy
from rlbridge.trainer.targets import Snapshot, Targets, asks_first, make_targets, wants_reference
from rlbridge.transport.errors import TrainingError


class Learner:
    """Trains a policy on batches; each batch makes one policy version.

    Args:
        policy: with a value head where ``algorithm.has_critic``.
        temperature: of the sampler; log probabilities are those of the distribution that tokens were drawn from.
    """

    def __init__(
        self, policy: Policy, algorithm: AlgorithmConfig, trainer: TrainerConfig, *, temperature: float
    ) -> None:
        self._policy = policy
        self._algorithm = algorithm
        self._trainer = trainer
        self._temperature = temperature
        self._reference: Policy | None = None
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
        self._ensure_reference(version)
        trained = batch.without(batch.truncated) if self._algorithm.mask_truncated else batch
        targets = make_targets(trained, self._take_snapshot(trained, plan), self._algorithm)
        statistics = Statistics()
        first_is_old = not asks_first(self._algorithm)  # see _take_snapshot
        norms = [
            self._update(trained, targets, mini, statistics, old_is_current=first_is_old and index == 0)
            for index, mini in enumerate(plan)
        ]
        metrics = self._summary(statistics.reduce(), batch, updates=len(norms))
        metrics["tokens"] = float(targets.kept.sum())
        metrics |= {"grad_norm": sum(norms) / len(norms), "lr": rate, "updates_in_step": float(len(norms))}
        return {f"train/{name}": value for name, value in metrics.items()}

    @property
    def reference(self) -> Policy | None:
        """The frozen policy of version 0 that the policy is held near to; ``None`` where no coefficient asks for it."""
        return self._reference

    def load_reference(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Restore the reference from full checkpoint tensors, before a step at a version above 0.

        Raises:
            LayoutError: a name that the model does not have, or another shape.
        """
        self._reference = self._policy.frozen_copy()
        self._reference.load_weights(weights)

    def _ensure_reference(self, version: int) -> None:
        if self._reference is not None or not wants_reference(self._algorithm):
            return
        if version > 0:
            raise TrainingError(
                f"algorithm.kl_coef={self._algorithm.kl_coef} holds the policy near version 0, but training goes on "
                f"at version {version} without that version's weights; restore them, or set algorithm.kl_coef=0"
            )
        self._reference = self._policy.frozen_copy()

    def _set_learning_rate(self, version: int) -> float:
        """Linear, from the peak at version 0 to its final fraction at the last step."""
        done = min(1.0, version / max(1, self._trainer.steps - 1))
        rate = self._trainer.learning_rate * (1.0 - (1.0 - self._trainer.final_lr_fraction) * done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _take_snapshot(self, batch: Batch, plan: list[MiniBatchPlan]) -> Snapshot:
        """What is needed before the first update moves the weights; the same on all ranks.

        Unless the algorithm asks first, the first mini-batch is computed with the old weights anyway: its own forward
        serves, and one forward of the batch's share is saved.
        """
        logprobs, values = self._opinion(self._policy, batch, plan if asks_first(self._algorithm) else plan[1:])
        reference = torch.zeros_like(logprobs)
        if self._reference is not None:
            reference, _ = self._opinion(self._reference, batch, plan)
        return Snapshot(logprobs=logprobs, values=values, reference=reference)

    @torch.no_grad()
    def _opinion(self, policy: Policy, batch: Batch, plan: list[MiniBatchPlan]) -> tuple[Tensor, Tensor]:
        """Log probabilities ``[B, T]`` and values ``[B, T + 1]`` under ``policy``, of the plan's rows on all ranks."""
        logprobs = torch.zeros(batch.mask.shape)
        values = torch.zeros(batch.positions.shape)
        for rows in (rows for mini in plan for rows in mini.micro_batches):
            micro = batch.select(rows) if rows else batch.filler()
            logits, row_values = policy(micro)
            if rows:
                logprobs[rows] = token_statistics(logits, micro.response_ids, self._temperature).logprobs
            if rows and row_values is not None:
                values[rows] = row_values
        # Every row is computed by one rank and 0 on the others.
        return all_reduce(logprobs, dist.ReduceOp.SUM), all_reduce(values, dist.ReduceOp.SUM)

    def _update(
        self, batch: Batch, targets: Targets, mini: MiniBatchPlan, statistics: Statistics, *, old_is_current: bool
    ) -> float:
        """One optimiser update; returns the gradient norm before clipping."""
        denominator = denominator_of(targets.kept[mini.rows], self._algorithm)
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
                denominator=denominator,
                old_is_current=old_is_current,
                statistics=statistics,
            )
            loss.backward()
        return apply_gradients(self._optimizer, self._parameters, self._trainer.max_grad_norm)

    def _summary(self, means: dict[str, float], batch: Batch, *, updates: int) -> dict[str, float]:
        mean, square = means["advantage_mean"], means.pop("advantage_square")
        weight, weight_square = means["is_weight_mean"], means.pop("is_weight_square")
        return means | {
            "loss": means["loss"] / updates,
            "advantage_std": math.sqrt(max(0.0, square - mean * mean)),
            # Kish's effective sample size, as a fraction of the tokens: 1 where all weigh the same.
            "ess": weight * weight / weight_square if weight_square else 0.0,
            "reward_mean": float(batch.rewards.mean()),
            "reward_std": float(batch.rewards.std(correction=0)),
            "response_length": float(batch.lengths.float().mean()),
            "truncation_rate": float(batch.truncated.float().mean()),
        }


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
