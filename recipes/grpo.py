"""GRPO: group-relative policy optimisation, rollouts fed over the bridge.

    rlbridge run grpo                       sort five digits; trainer and rollouts take turns
    rlbridge run grpo sync=fully_async      the same job; nobody waits for weights
    rlbridge run grpo algorithm=dapo        another objective without a critic: see docs/algorithms.md
    rlbridge run grpo model.path=DIR task=jsonl task.path=prompts.jsonl task.reward=my.rewards:score

``prompts_per_step`` groups of ``group_size`` responses make a step. A response's advantage is its reward relative to
its group, so there is no value model (DeepSeekMath, arXiv:2402.03300, section 4.1).
"""

from __future__ import annotations

from rlbridge.config import JobConfig
from rlbridge.recipe_main import recipe_main


def run(job: JobConfig) -> int:
    """Run one job; returns its exit status."""
    # Here, because it loads torch: help, completion and a refused setting should not take seconds.
    from rlbridge.controller.job import run_job

    return run_job(job)


def main() -> None:
    """Compose the configuration from the command line and run the job."""
    recipe_main("grpo", run)


if __name__ == "__main__":
    main()
