"""Tasks: prompts, rewards and demonstrations."""

from rlbridge.rollout.tasks.base import Problem, Task
from rlbridge.rollout.tasks.registry import make_task

__all__ = ["Problem", "Task", "make_task"]
