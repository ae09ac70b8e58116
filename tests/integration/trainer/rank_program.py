"""One trainer rank as a process: ``rank_program.py RANK WORLD JOB.json``. Writes what it saw to ``rank-N.pt``.

The job is a JSON object of the type ``Job``.
"""

import sys
from pathlib import Path

import msgspec
import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from rlbridge.rollout.trajectory import Trajectory
from rlbridge.sync.layout.checkpoint import read_spec
from rlbridge.sync.layout.discover import discover
from rlbridge.trainer.batch import collate_trajectories
from rlbridge.trainer.checkpoint import save_checkpoint
from rlbridge.trainer.config import AlgorithmConfig, TrainerConfig
from rlbridge.trainer.learner import Learner
from rlbridge.trainer.messages import Example
from rlbridge.trainer.parallel import process_group
from rlbridge.trainer.policy import Policy, load_policy
from rlbridge.trainer.warmup import warm_up


class Job(msgspec.Struct):
    model: str
    folder: str
    trajectories: list[Trajectory]
    rewards: list[float]
    examples: list[Example]
    algorithm: AlgorithmConfig
    trainer: TrainerConfig


def main(rank: int, world: int, job: Job) -> None:
    torch.set_num_threads(1)
    folder = Path(job.folder)
    with process_group(rank, world, folder / "rendezvous", timeout_s=60.0):
        policy = load_policy(Path(job.model), with_values=job.algorithm.has_critic)
        seen = {
            "layout": msgspec.to_builtins(
                discover(read_spec(Path(job.model)), policy.load_weights, policy.live_tensors)
            )
        }
        seen["live"] = {name: tensor.clone() for name, tensor in policy.live_tensors().items()}
        seen["warm_up"] = warm_up(policy, job.examples, until=0.9, config=job.trainer, temperature=1.0, seed=0)
        seen["gradients"], seen["metrics"] = _step(policy, job)
        save_checkpoint(policy, Path(job.model), folder / "checkpoint", version=1)
        seen["full"] = policy.full_state()
    torch.save(seen, folder / f"rank-{rank}.pt")


def _step(policy: Policy, job: Job) -> tuple[list[dict[str, torch.Tensor]], dict[str, float]]:
    """One training step; returns the whole gradients of each update too."""
    gradients = []

    def keep(*_: object) -> None:
        whole = {name: parameter.grad for name, parameter in policy.named_parameters()}
        gradients.append({n: (g.full_tensor() if isinstance(g, DTensor) else g).clone() for n, g in whole.items()})

    handle = register_optimizer_step_pre_hook(keep)
    try:
        learner = Learner(policy, job.algorithm, job.trainer, temperature=0.8)
        metrics = learner.step(collate_trajectories(job.trajectories, job.rewards), 0)
    finally:
        handle.remove()
    return gradients, metrics


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), msgspec.json.decode(Path(sys.argv[3]).read_bytes(), type=Job))
