"""Trainer ranks among themselves: a gloo process group, and FSDP2 over it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard


@contextmanager
def process_group(rank: int, world: int, rendezvous: Path, timeout_s: float) -> Iterator[None]:
    """Join the trainer ranks for the ``with`` block; nothing to do for a single rank.

    Ranks find each other through the file ``rendezvous``, which must be new to this run: no port is fixed. Gloo binds
    the loopback unless ``GLOO_SOCKET_IFNAME`` names another interface.

    Args:
        timeout_s: deadline of the rendezvous and of every collective; a rank that misses it makes the others raise.
    """
    if world == 1:
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.absolute().as_uri(),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
        if rank == 0:  # the first to leave must not take the file from ranks that still open a group over it
            rendezvous.unlink(missing_ok=True)


def world_size() -> int:
    """Trainer ranks that joined; 1 outside of a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process among the trainer ranks."""
    return dist.get_rank() if dist.is_initialized() else 0


def all_reduce(values: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """``values`` reduced over the trainer ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(values, operation)
    return values


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is true on any trainer rank. Collective."""
    return bool(all_reduce(torch.tensor(int(flag)), dist.ReduceOp.MAX))


def barrier() -> None:
    """Wait for all trainer ranks."""
    if dist.is_initialized():
        dist.barrier()


def shard(root: nn.Module, blocks: list[nn.Module]) -> None:
    """FSDP2: shard every block on its own and what is left with ``root``; gradients are *summed* over the ranks.

    Losses are divided by the token count of the whole mini-batch before the backward, so a mean over ranks would be
    one division too many.
    """
    mesh = init_device_mesh("cpu", (world_size(),))
    for module in [*blocks, root]:
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
