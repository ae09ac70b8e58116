"""One rank whose loader communicates: rank 0's full tensors are broadcast, and every rank keeps its share."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from rlbridge.sync.layout.discover import discover
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

SPEC = CheckpointSpec(
    {
        "plain": TensorSpec((8, 4), "bfloat16"),
        "odd": TensorSpec((6,), "bfloat16"),
        "wide": TensorSpec((4, 10), "float32"),
    }
)


def any_rank(flag: bool) -> bool:
    """True on all ranks if it is on one."""
    count = torch.tensor(int(flag))
    dist.all_reduce(count)
    return bool(count)


def main(rank: int, world: int, method: str, meeting: str, out: str) -> None:
    """Only rank 1 computes (``odd``) and has a tensor of a narrow dtype: its needs differ from the others'."""
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=datetime.timedelta(seconds=60)
    )
    narrow = torch.float8_e4m3fn if rank == 1 else torch.float32
    live = {
        "plain": torch.zeros(8 // world, 4),
        "odd": torch.zeros(6),
        "wide": torch.zeros(4, 10 // world, dtype=narrow),
    }

    def load(weights) -> None:
        for name, tensor in weights:
            dist.broadcast(tensor := tensor.clone(), 0)  # hangs, then fails, unless all ranks load the same
            if name == "odd":
                live[name].copy_(tensor * 2 if rank == 1 else tensor)
            else:
                live[name].copy_(tensor.chunk(world, 1 if name == "wide" else 0)[rank])

    layout = discover(SPEC, load, lambda: live, method=method, any_rank=any_rank)
    Path(out).write_bytes(msgspec.json.encode(layout))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
