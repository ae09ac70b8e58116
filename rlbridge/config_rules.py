"""What settings may be, alone and together. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlbridge.transport.config import parse_node_gbps
from rlbridge.transport.errors import ConfigError

if TYPE_CHECKING:
    from rlbridge.config import JobConfig
    from rlbridge.trainer.config import AlgorithmConfig


def _of(group: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{group}.{name}" for name in names)


_AT_LEAST_ONE = (
    *_of("sync", "batches_ahead"),
    *_of("algorithm", "prompts_per_step", "group_size", "constant_tokens"),
    *_of("model", "layers", "mlp"),
    *_of("task", "digits", "max_new_tokens", "eval_prompts"),
    *_of("trainer", "ranks", "steps", "mini_batches", "micro_batch_rows", "warmup_batch", "threads"),
    *_of("rollout", "replicas", "max_rows", "max_length", "threads"),
    *_of("sync", "memory_bytes"),
    *_of("transport", "bucket_bytes", "staging_bytes"),
)
_AT_LEAST_ZERO = (
    "seed",
    *_of("algorithm", "clip_high", "default_max_staleness", "value_coef", "value_clip", "entropy_coef", "kl_coef"),
    *_of("algorithm", "is_floor"),
    *_of("trainer", "learning_rate", "weight_decay", "warmup_steps_max", "warmup_learning_rate", "checkpoint_every"),
    *_of("rollout", "top_k"),
    *_of("sync", "max_staleness"),
    *_of("tracking", "plain_every_s"),
)
_ABOVE_ZERO = (
    *_of("algorithm", "is_cap"),
    *_of("trainer", "max_grad_norm"),
    *_of("rollout", "temperature", "top_p"),
    *_of("task", "eval_fraction", "reward_timeout_s"),
    *_of("transport", "external_gbps", "local_gbps"),
    *_of("transport", "heartbeat_s", "dead_after_s", "connect_timeout_s", "update_timeout_s"),
    *_of("launcher", "start_timeout_s", "worker_timeout_s", "stop_timeout_s"),
)
_ZERO_TO_ONE = (
    *_of("algorithm", "gamma", "gae_lambda", "clip_low"),
    *_of("trainer", "final_lr_fraction"),
    *_of("rollout", "top_p"),
    *_of("task", "warmup_until"),
)
_BELOW_ONE = (*_of("trainer", "beta1", "beta2"), *_of("task", "eval_fraction"))

_RANGES: tuple[tuple[tuple[str, ...], Callable[[float], bool], str], ...] = (
    (_AT_LEAST_ONE, lambda x: x >= 1, "at least 1"),
    (_AT_LEAST_ZERO, lambda x: x >= 0, "at least 0"),
    (_ABOVE_ZERO, lambda x: x > 0, "more than 0"),
    (_ZERO_TO_ONE, lambda x: 0 <= x <= 1, "between 0 and 1"),
    (_BELOW_ONE, lambda x: 0 <= x < 1, "at least 0 and less than 1"),
)

_BUILT_IN_ANSWERS = {"sort": 0, "reverse": 0, "addition": 1}
"""Digits that the answer may have more than the problem's ``task.digits``."""
_EXPORT_DTYPES = ("float32", "bfloat16", "float16")


def validate(job: JobConfig) -> None:
    """Check a resolved job.

    Raises:
        ConfigError: one line for each contradiction; it names every setting involved and a mend.
    """
    problems = [
        *_out_of_range(job),
        *_algorithm(job),
        *_batches(job),
        *_task(job),
        *_sampling(job),
        *_bytes_and_time(job),
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def check_prompt_length(job: JobConfig, longest_prompt: int) -> None:
    """Check that the longest prompt of the task, in tokens, leaves room for a whole response.

    Raises:
        ConfigError: ``rollout.max_length`` is too small.
    """
    needed = longest_prompt + job.task.max_new_tokens
    if job.rollout.max_length < needed:
        raise ConfigError(
            f"rollout.max_length={job.rollout.max_length} cannot hold the longest prompt ({longest_prompt} tokens) "
            f"plus task.max_new_tokens={job.task.max_new_tokens}; set rollout.max_length to at least {needed}"
        )


def _get(job: JobConfig, key: str) -> Any:
    value: Any = job
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _out_of_range(job: JobConfig) -> Iterator[str]:
    seen: set[str] = set()
    for keys, holds, wanted in _RANGES:
        for key in keys:
            value = _get(job, key)
            if value is not None and key not in seen and not holds(value):
                seen.add(key)
                yield f"{key}={value}: must be {wanted}"


def _algorithm(job: JobConfig) -> Iterator[str]:
    algorithm, bound = job.algorithm, job.sync.max_staleness
    fitting = "ppo" if algorithm.has_critic else "grpo"
    if job.recipe in ("grpo", "ppo") and job.recipe != fitting:
        yield (
            f"algorithm.advantage={algorithm.advantage} contradicts recipe={job.recipe}, which trains "
            f"{'without' if algorithm.has_critic else 'with'} a value head; use `rlbridge run {fitting}`"
        )
    if algorithm.advantage in ("group", "rloo") and algorithm.group_size < 2:
        yield (
            f"algorithm.group_size={algorithm.group_size} is too small for algorithm.advantage={algorithm.advantage}: "
            "advantages compare the responses of one group; use at least 2"
        )
    if algorithm.aggregation == "constant" and algorithm.constant_tokens is None:
        yield (
            "algorithm.aggregation=constant needs algorithm.constant_tokens=N to divide by, e.g. "
            f"algorithm.constant_tokens={job.task.max_new_tokens}"
        )
    if algorithm.loss == "dual_clip" and algorithm.dual_clip_bound <= 1 + algorithm.clip_high:
        yield (
            f"algorithm.dual_clip_bound={algorithm.dual_clip_bound} must be more than "
            f"1 + algorithm.clip_high={algorithm.clip_high}"
        )
    yield from _correction(algorithm, bound)


def _correction(algorithm: AlgorithmConfig, bound: int | None) -> Iterator[str]:
    if algorithm.correction == "none" and bound and not algorithm.allow_uncorrected:
        yield (
            f"algorithm.correction=none while sync.max_staleness={bound} lets tokens of older policies in: set "
            "algorithm.correction=tis or sync.max_staleness=0, or algorithm.allow_uncorrected=true if you mean it"
        )
    if algorithm.correction.startswith("masked_") and not algorithm.is_floor <= 1 <= algorithm.is_cap:
        yield (
            f"algorithm.is_floor={algorithm.is_floor} and algorithm.is_cap={algorithm.is_cap} leave out tokens whose "
            f"weight is 1, as all are on-policy: algorithm.correction={algorithm.correction} needs a range around 1"
        )


def _batches(job: JobConfig) -> Iterator[str]:
    rows = job.algorithm.prompts_per_step * job.algorithm.group_size
    parts = job.trainer.mini_batches * job.trainer.ranks
    if parts > rows:
        yield (
            f"trainer.mini_batches={job.trainer.mini_batches} x trainer.ranks={job.trainer.ranks} is more than the "
            f"{rows} rows of a step (algorithm.prompts_per_step={job.algorithm.prompts_per_step} x "
            f"algorithm.group_size={job.algorithm.group_size})"
        )


def _task(job: JobConfig) -> Iterator[str]:
    task = job.task
    if task.name == "jsonl":
        yield from _jsonl(job)
        return
    for key, value in (("path", task.path), ("reward", task.reward)):
        if value is not None:
            yield f"task.{key}={value} is read only by task.name=jsonl, not by task.name={task.name}; use task=jsonl"
    needed = task.digits + _BUILT_IN_ANSWERS[task.name] + 1
    if task.max_new_tokens < needed:
        yield (
            f"task.max_new_tokens={task.max_new_tokens} cuts the answer of task.name={task.name} with "
            f"task.digits={task.digits}; it needs {needed}, the end-of-sequence token included"
        )


def _jsonl(job: JobConfig) -> Iterator[str]:
    task = job.task
    if task.path is None:
        yield "task.name=jsonl needs task.path=FILE"
    elif not Path(task.path).expanduser().is_file():
        yield f"task.path={task.path}: no such file"
    if task.reward is None:
        yield "task.name=jsonl needs task.reward=package.module:function"
    elif not all(part.isidentifier() for part in task.reward.replace(":", ".", 1).split(".")) or ":" not in task.reward:
        yield f"task.reward={task.reward}: expected package.module:function"


def _sampling(job: JobConfig) -> Iterator[str]:
    rollout = job.rollout
    if rollout.top_p < 1:
        yield f"rollout.top_p={rollout.top_p}: {_WHOLE_VOCABULARY}; set rollout.top_p=1"
    if rollout.top_k > 0:
        yield f"rollout.top_k={rollout.top_k}: {_WHOLE_VOCABULARY}; set rollout.top_k=0"
    if rollout.max_length <= job.task.max_new_tokens:
        yield (
            f"rollout.max_length={rollout.max_length} leaves no room for a prompt before "
            f"task.max_new_tokens={job.task.max_new_tokens}; raise it"
        )


_WHOLE_VOCABULARY = (
    "a training rollout must sample from the whole vocabulary, as the trainer's log probabilities do "
    "(algorithm ratios would be wrong otherwise)"
)


def _bytes_and_time(job: JobConfig) -> Iterator[str]:
    transport, dtype = job.transport, job.sync.export_dtype
    if transport.bucket_bytes > transport.staging_bytes:
        yield (
            f"transport.bucket_bytes={transport.bucket_bytes} does not fit into "
            f"transport.staging_bytes={transport.staging_bytes}; lower the first or raise the second"
        )
    if transport.dead_after_s < 2 * transport.heartbeat_s:
        yield (
            f"transport.dead_after_s={transport.dead_after_s} must be at least twice "
            f"transport.heartbeat_s={transport.heartbeat_s}, or one late heartbeat ends the run"
        )
    try:
        parse_node_gbps(transport.node_gbps)
    except ConfigError as error:
        yield str(error)
    if dtype is not None and dtype not in _EXPORT_DTYPES:
        yield f"sync.export_dtype={dtype}: expected null or one of {', '.join(_EXPORT_DTYPES)}"
