"""Supervised warm-up: a policy that is never right by chance learns nothing from exact-match rewards."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlbridge.trainer.batch import collate, plan_rows
from rlbridge.trainer.config import TrainerConfig
from rlbridge.trainer.learner import apply_gradients
from rlbridge.trainer.losses.aggregation import masked_mean
from rlbridge.trainer.losses.tokens import token_statistics
from rlbridge.trainer.messages import Example
from rlbridge.trainer.parallel import all_reduce, rank, world_size
from rlbridge.trainer.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUpResult:
    """Supervised updates made, and the expected accuracy after them (of the last batch measured)."""

    steps: int
    accuracy: float


class _WarmUp:
    def __init__(self, policy: Policy, config: TrainerConfig, temperature: float) -> None:
        self._policy = policy
        self._config = config
        self._temperature = temperature
        self._parameters = list(policy.parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.warmup_learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )

    def forward(self, examples: Sequence[Example]) -> tuple[torch.Tensor, float]:
        """This rank's share of the mean loss per answer token, and the expected accuracy over all ranks."""
        (mini,) = plan_rows(len(examples), mini_batches=1, micro_batch_rows=None, rank=rank(), world=world_size())
        (rows,) = mini.micro_batches
        batch = collate([item.prompt_ids for item in examples], [item.answer_ids for item in examples])
        micro = batch.select(rows) if rows else batch.filler()
        logits, _ = self._policy(micro)
        loss = masked_mean(-token_statistics(logits, micro.response_ids, 1.0).logprobs, micro.mask, batch.tokens)
        with torch.no_grad():
            sampled = token_statistics(logits, micro.response_ids, self._temperature).logprobs
            right = torch.where(micro.mask, sampled, 0.0).sum(dim=1).exp()
            total = all_reduce(right[: len(rows)].sum(), dist.ReduceOp.SUM)
        return loss, float(total) / len(examples)

    def learn(self, loss: torch.Tensor) -> None:
        loss.backward()
        apply_gradients(self._optimizer, self._parameters, self._config.max_grad_norm)


def warm_up(
    policy: Policy, examples: Sequence[Example], *, until: float, config: TrainerConfig, temperature: float, seed: int
) -> WarmUpResult:
    """Train on the examples until a sampled answer is right with probability ``until``. Collective over the ranks.

    The expected accuracy of sampling at ``temperature`` is the mean of ``exp(sum_t log p(answer_t))``: exact where
    each prompt has one right answer, and without generating anything. It is measured on each batch before training on
    it, so on examples not seen before until all have been used.

    Returns:
        the accuracy may still be below ``until`` after ``config.warmup_steps_max`` updates: the caller sees it.

    Raises:
        TrainingError: a gradient is not finite.
    """
    if until <= 0 or not examples:
        return WarmUpResult(steps=0, accuracy=0.0)
    run = _WarmUp(policy, config, temperature)
    batches = _batches(examples, config.warmup_batch, seed)
    for step in range(config.warmup_steps_max):
        loss, accuracy = run.forward(next(batches))
        if accuracy >= until:
            return WarmUpResult(steps=step, accuracy=accuracy)
        run.learn(loss)
    with torch.no_grad():
        _, accuracy = run.forward(next(batches))
    return WarmUpResult(steps=config.warmup_steps_max, accuracy=accuracy)


def _batches(examples: Sequence[Example], size: int, seed: int) -> Iterator[list[Example]]:
    """Endless batches: every example once in random order, then all of them again in another."""
    shuffle = random.Random(seed)  # ranks must draw the same order
    pending: list[Example] = []
    while True:
        while len(pending) < size:
            pending.extend(shuffle.sample(examples, len(examples)))
        yield pending[:size]
        del pending[:size]
