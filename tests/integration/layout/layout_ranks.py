"""One rank of real parallel models: ``layout_ranks.py RANK WORLD FOLDER``.

Four processes pose as two jobs of two ranks, then as one of four, because importing torch costs more than all of the
rest. Each layout is discovered, checked on the spot and saved with the engine's own tensors in ``FOLDER/LABEL-N.pt``.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from real_loaders import TransformersModel, Weights, discovered
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import distribute_tensor
from transformers.utils.logging import disable_progress_bar

from rlbridge.trainer.parallel import any_rank, barrier, process_group, rank
from rlbridge.trainer.policy import Policy, load_policy

DEADLINE_S = 360
ENGINE, TRAINER = torch.bfloat16, torch.float32


class Job:
    """Ranks in one process group, and where they leave what they saw."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def transformers(self, label: str, kind: str, dtype: torch.dtype, **parallel: int) -> None:
        """What ``from_pretrained`` makes on several ranks."""
        self.look(label, kind, TransformersModel(self.folder / kind, dtype, **parallel))

    def look(self, label: str, kind: str, backend: object, *, traceable: bool = True) -> None:
        layout = discovered(self.folder / kind, backend, traceable=traceable, any_rank=any_rank)
        live = {name: tensor.clone() for name, tensor in backend.live_tensors().items()}
        seen = {"kind": kind, "layout": msgspec.msgpack.encode(layout), "live": live}
        torch.save(seen, self.folder / f"{label}-{rank()}.pt")


class Communicating:
    """The policy, loaded by a loader that needs all ranks at every tensor."""

    def __init__(self, policy: Policy, load: Callable[[Policy, Weights], None]) -> None:
        self.policy, self._load = policy, load
        self.live_tensors = policy.live_tensors

    def load_weights(self, weights: Weights) -> None:
        self._load(self.policy, weights)


def scatter(policy: Policy, weights: Weights) -> None:
    """Rank 0's tensors, cut and sent by ``distribute_tensor``."""
    parameters = dict(policy.model.named_parameters(remove_duplicate=False))
    for name, tensor in weights:
        target = parameters[name]
        whole = tensor.to(target.dtype) if rank() == 0 else torch.empty_like(tensor, dtype=target.dtype)
        target.copy_(distribute_tensor(whole, target.device_mesh, target.placements))


def broadcast(policy: Policy, weights: Weights) -> None:
    """The whole state dict of rank 0, sent by torch's own checkpoint library."""
    whole = {name: tensor.float() for name, tensor in weights}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    set_model_state_dict(policy.model, whole if rank() == 0 else {}, options=options)


def two_engine_ranks(job: Job) -> None:
    for kind in ("dense", "tied", "moe"):
        job.transformers(f"tp2-{kind}", kind, ENGINE, tp_plan="auto", tp_size=2)
    job.transformers("pp2", "dense", ENGINE, pp_size=2)


def two_trainer_ranks(job: Job) -> None:
    for kind in ("dense", "tied", "moe"):
        job.transformers(f"fsdp2-{kind}", kind, TRAINER, fsdp_size=2)


def four_ranks(job: Job) -> None:
    for kind in ("dense", "tied", "moe"):
        job.transformers(f"fsdp4-{kind}", kind, TRAINER, fsdp_size=4)
        job.transformers(f"fsdp2tp2-{kind}", kind, TRAINER, fsdp_size=2, tp_size=2)
    job.transformers("hsdp", "dense", TRAINER, fsdp_size=2, dp_replicate_size=2)
    policy = load_policy(job.folder / "dense", with_values=True)
    job.look("policy", "dense", policy)
    job.look("scatter", "dense", Communicating(policy, scatter), traceable=False)
    job.look("broadcast", "dense", Communicating(policy, broadcast), traceable=False)


def main(own: int, folder: Path) -> None:
    torch.set_num_threads(1)
    disable_progress_bar()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # a trace does not follow what transformers casts in threads
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)  # a hang shows where
    job = Job(folder)
    first, second = divmod(own, 2)
    with process_group(second, 2, folder / f"pair-{first}", DEADLINE_S):
        (two_engine_ranks, two_trainer_ranks)[first](job)
        barrier()  # who leaves removes the rendezvous, which a slower rank may still need
    with process_group(own, 4, folder / "four", DEADLINE_S):
        four_ranks(job)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[3]))
