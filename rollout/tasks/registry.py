"""From settings to a task."""

from __future__ import annotations

from rlbridge.rollout.config import TaskConfig
from rlbridge.rollout.tasks.base import Task
from rlbridge.rollout.tasks.generated import AdditionTask, GeneratedTask, ReverseTask, SortTask, addend_range
from rlbridge.rollout.tasks.jsonl import JsonlTask
from rlbridge.transport.errors import ConfigError


def make_task(config: TaskConfig, seed: int) -> Task:
    """Build the task that ``config`` names; ``seed`` chooses its training problems.

    Raises:
        ConfigError: a setting is missing, out of range or does not apply to this task.
        TaskError: the task's file is unusable.
    """
    if config.eval_prompts < 0:
        raise ConfigError(f"task.eval_prompts={config.eval_prompts} is negative")
    if config.max_new_tokens < 1:
        raise ConfigError(f"task.max_new_tokens={config.max_new_tokens} must be at least 1")
    return _make_jsonl(config, seed) if config.name == "jsonl" else _make_generated(config, seed)


def _make_jsonl(config: TaskConfig, seed: int) -> JsonlTask:
    if config.path is None or config.reward is None:
        missing = " and ".join(f"task.{field}" for field in ("path", "reward") if getattr(config, field) is None)
        raise ConfigError(f"task=jsonl needs {missing}; e.g. task.path=data.jsonl task.reward=my_rewards:score")
    return JsonlTask(
        path=config.path,
        reward=config.reward,
        seed=seed,
        eval_prompts=config.eval_prompts,
        eval_fraction=config.eval_fraction,
    )


def _make_generated(config: TaskConfig, seed: int) -> GeneratedTask:
    digits = config.digits
    if not 1 <= digits <= 18:
        raise ConfigError(f"task.digits={digits} is outside 1 to 18")
    addends = addend_range(digits).stop - addend_range(digits).start
    shapes: dict[str, tuple[type[GeneratedTask], int, int]] = {  # class, number of problems, longest answer
        "sort": (SortTask, 10**digits, digits),
        "reverse": (ReverseTask, 10**digits, digits),
        "addition": (AdditionTask, addends**2, digits + 1),
    }
    if config.name not in shapes:
        raise ConfigError(f"task.name={config.name} is unknown; choose one of {', '.join([*shapes, 'jsonl'])}")
    kind, size, longest_answer = shapes[config.name]
    return kind(
        digits=digits,
        size=size,
        longest_answer=longest_answer,
        seed=seed,
        partial_credit=config.partial_credit,
        max_new_tokens=config.max_new_tokens,
        eval_prompts=config.eval_prompts,
    )
