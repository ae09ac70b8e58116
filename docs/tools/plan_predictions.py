"""Predicted updates against the bound and the baselines, as a Markdown table.

    python docs/tools/plan_predictions.py [MODEL] [NODES_MAX]

Half of the nodes train and half of them generate, eight GPUs each; 400 Gbit/s between nodes, 3600 within them.
"""

from __future__ import annotations

import sys

from rlbridge.catalog.layouts import rollout_layouts, trainer_layouts
from rlbridge.catalog.models import MODELS
from rlbridge.catalog.shape import shape_of_config
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.sync.correspondence import correspond
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.topology import NodeRates, Topology

GPUS = 8
BUCKET_BYTES = 8 * 1024 * 1024
STAGING_BYTES = 256 * 1024 * 1024
JOBS = {
    "moonlight-16b-a3b": (1, "fsdp{ranks}.ep8", "tp4x{halves}"),
    "qwen3-30b-a3b": (1, "fsdp{ranks}.ep8", "tp4x{halves}"),
    "qwen3-235b-a22b": (4, "pp4.fsdp{quarter}.ep8", "tp8x{nodes}"),
    "kimi-k2": (8, "pp8.fsdp{nodes}.ep8", "tp8.ep32x{fours}"),
}
"""Model to the least nodes of a side, and the parallelisms of both sides."""


def table(model: str, nodes: int, trainer: str, rollout: str) -> str:
    """One row."""
    sizes = {"ranks": GPUS * nodes, "halves": 2 * nodes, "quarter": 2 * nodes, "nodes": nodes, "fours": nodes // 4}
    trainer, rollout = trainer.format(**sizes), rollout.format(**sizes)
    shape = shape_of_config(MODELS[model])
    trainers = trainer_layouts(shape, trainer, GPUS)
    rollouts = rollout_layouts(shape, rollout, GPUS, first_node=1 + trainers[-1].node)
    placed = {p.worker: f"node{p.node:03}" for p in [*trainers, *rollouts]}
    topology = Topology(placed, NodeRates.of_gbps(400, 3600))
    correspondence = correspond(
        spec_of_shape(shape), {p.worker: p.layout for p in trainers}, {p.worker: p.layout for p in rollouts}
    )

    def seconds(plan: TransferPlan) -> float:
        return predict(plan, staging_bytes=STAGING_BYTES, hops_max=100_000).seconds

    plan = plan_transfer(correspondence, topology, bucket_bytes=BUCKET_BYTES)
    ours, bound = seconds(plan), plan.bound.seconds
    others = [
        seconds(plan_baseline(kind, correspondence, topology, bucket_bytes=BUCKET_BYTES)) for kind in BaselineKind
    ]
    cells = [model, str(2 * nodes), trainer, rollout, f"{bound:.3f}", f"{ours:.3f}", f"{ours / bound:.3f}"]
    cells += [f"{other:.3f} ({other / ours:.1f}x)" for other in others]
    return "| " + " | ".join(cells) + " |\n"


def main() -> None:
    """Print the table."""
    models = sys.argv[1:2] or list(JOBS)
    nodes_max = int(sys.argv[2]) if len(sys.argv) > 2 else 64
    columns = ["model", "nodes", "trainer", "rollout", "bound s", "planned s", "of bound", *map(str, BaselineKind)]
    sys.stdout.write("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns) + "\n")
    for model in models:
        least, trainer, rollout = JOBS[model]
        for nodes in (1, 2, 4, 8, 16, 32):
            if least <= nodes <= nodes_max // 2:
                sys.stdout.write(table(model, nodes, trainer, rollout))
                sys.stdout.flush()


if __name__ == "__main__":
    main()
