"""Planning time (of one core) and memory against model size: one line of figures for each job.

python docs/tools/plan_scale.py                     # the curve, then the largest job
python docs/tools/plan_scale.py MODEL TRAINER ROLLOUT [NODE_GPUS]
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

from rlbridge.catalog.layouts import rollout_layouts, trainer_layouts
from rlbridge.catalog.models import MODELS
from rlbridge.catalog.shape import shape_of_config
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.sync.correspondence import correspond
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.transport.topology import NodeRates, Topology

CURVE = [
    ("qwen3-0.6b", "fsdp8", "tp8x1"),
    ("moonlight-16b-a3b", "fsdp16.ep8", "tp8x2"),
    ("qwen3-30b-a3b", "fsdp32.ep8", "tp8x4"),
    ("qwen3-235b-a22b", "pp4.fsdp32.ep32", "tp8x16"),
    ("kimi-k2", "pp8.fsdp32.ep32", "tp8x32"),
]
BUCKET_BYTES = 8 * 1024 * 1024


def peak_gb() -> float:
    """Largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(model: str, trainer: str, rollout: str, gpus: int) -> None:
    """Plan one job and print what it took."""
    shape = shape_of_config(MODELS[model])
    trainers = trainer_layouts(shape, trainer, gpus)
    rollouts = rollout_layouts(shape, rollout, gpus, first_node=1 + trainers[-1].node)
    nodes = {placed.worker: f"node{placed.node:03}" for placed in [*trainers, *rollouts]}
    before_gb = peak_gb()
    start_s = time.process_time()
    correspondence = correspond(
        spec_of_shape(shape), {p.worker: p.layout for p in trainers}, {p.worker: p.layout for p in rollouts}
    )
    cut_s = time.process_time() - start_s
    topology = Topology(nodes, NodeRates.of_gbps(400, 3600))
    plan = plan_transfer(correspondence, topology, bucket_bytes=BUCKET_BYTES)
    plan_s = time.process_time() - start_s
    report = plan.report()
    sys.stdout.write(
        f"{model} {trainer} -> {rollout}: {report['atoms']} atoms in {len(correspondence.table.classes)} classes, "
        f"{report['buckets']} buckets on {report['routes']} routes; cut {cut_s:.1f} s, planned {plan_s:.1f} s, "
        f"maps {before_gb:.2f} GB, peak {peak_gb():.2f} GB; bound {report['lower_bound_s']:.3f} s, "
        f"busiest link {report['over_bound']:.4f} of it\n"
    )
    for worker in (trainers[0].worker, rollouts[-1].worker):
        start_s = time.process_time()
        program = plan.program(worker)
        pieces = sum(len(bucket.pieces) for bucket in program.buckets)
        sys.stdout.write(
            f"  program of {worker}: {len(program.buckets)} buckets, {pieces} pieces, "
            f"{time.process_time() - start_s:.1f} s, peak {peak_gb():.2f} GB\n"
        )


def main() -> None:
    """The job of the command line, or the curve, each job in a process of its own."""
    if len(sys.argv) > 3:
        measure(*sys.argv[1:4], int(sys.argv[4]) if len(sys.argv) > 4 else 8)
        return
    for job in CURVE:
        subprocess.run([sys.executable, __file__, *job], check=True)


if __name__ == "__main__":
    main()
