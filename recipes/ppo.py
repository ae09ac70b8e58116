"""PPO: proximal policy optimisation with a value head, rollouts fed over the bridge.

    rlbridge run ppo
    rlbridge run ppo sync=fully_async sync.max_staleness=1

One response per prompt; advantages by GAE over the response tokens (Schulman et al., arXiv:1506.02438 and
arXiv:1707.06347). The value head lives in the trainer only: it is no part of the checkpoint, and the bridge never
sends it.
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
    recipe_main("ppo", run)


if __name__ == "__main__":
    main()
