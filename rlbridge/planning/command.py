"""The arguments of ``rlbridge plan`` and what they do."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlbridge.planning.job import Question

EPILOG = """\
MODEL is a built-in model, a config.json or a model directory. A side is a parallelism (trainer: fsdp8.tp2,
pp4.fsdp8.ep8, hsdp2x8; rollout: tp4x8 for 8 replicas, tp8.ep64) or one file for each of its ranks, in the order of
ranks, as `rlbridge layout --save` writes it.

examples:
  rlbridge plan qwen3-30b-a3b --trainer fsdp8.tp2 --rollout tp4x8
  rlbridge plan kimi-k2 --trainer pp8.fsdp8.ep8 --rollout tp8.ep32x2 --link-gbps 3200 --svg plan.svg
  rlbridge plan DIR --trainer fsdp8 --rollout tp2x4 --colocated --export-dtype bfloat16 --json
  rlbridge plan --trainer trainer-*.layout --rollout engine-*.layout

Everything is calculated: no weights, no devices, no network.
"""

_BYTES_OF_MB = 1_000_000
_DTYPES = ("bfloat16", "float16", "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line. Imports nothing heavy: ``rlbridge --help`` comes by here."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", nargs="?", metavar="MODEL", help="left out where both sides are saved layouts")
    for side in ("trainer", "rollout"):
        parser.add_argument(
            f"--{side}", nargs="+", required=True, metavar="HOW", help="a parallelism, or saved layouts"
        )
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--link-gbps", type=float, default=400.0, metavar="RATE", help="a node's link, each way, Gbit/s (default: 400)"
    )
    parser.add_argument(
        "--local-gbps", type=float, default=3600.0, metavar="RATE", help="a GPU within its node (default: 3600)"
    )
    parser.add_argument(
        "--copy-gbps",
        type=float,
        default=200.0,
        metavar="RATE",
        help="of a worker's own copies, for the stalls; assumed, not measured (default: 200, a GPU on PCIe 4.0 x16)",
    )
    parser.add_argument("--colocated", action="store_true", help="rollouts on the trainers' nodes")
    parser.add_argument("--export-dtype", choices=_DTYPES, help="on the wire (default: the checkpoint's)")
    parser.add_argument("--bucket-mb", type=float, metavar="MB", help="upper size of a bucket (default: 8 MiB)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw bytes per link by stage, baselines beside it")
    parser.add_argument("--json", action="store_true", help="for programs: everything, link by link")


def plan_command(arguments: argparse.Namespace) -> int:
    """Plan and show; returns the exit status.

    Raises:
        ConfigError: something was asked for that does not exist, or a file cannot be written.
        LayoutError: the trainers do not hold what the rollouts need, or a saved layout is damaged.
        PlanError: buckets are too small.
    """
    import msgspec
    from rich.console import Console

    from rlbridge.planning.job import job_of
    from rlbridge.planning.outlook import outlook_of
    from rlbridge.planning.picture import picture
    from rlbridge.planning.show import show_outlook
    from rlbridge.transport.errors import ConfigError

    question = question_of(arguments)
    outlook = outlook_of(question, job_of(question))
    if arguments.svg is not None:
        try:
            arguments.svg.write_text(picture(outlook), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--svg {arguments.svg} cannot be written: {error.strerror}") from error
    if arguments.json:
        sys.stdout.write(msgspec.json.encode(outlook).decode() + "\n")
    else:
        # A table that is written into a file is not cut to the width of a terminal.
        show_outlook(Console(highlight=False, width=None if sys.stdout.isatty() else 160), outlook)
    return 0


def question_of(arguments: argparse.Namespace) -> Question:
    """What the arguments ask.

    Raises:
        ConfigError: a size or rate is not above 0.
    """
    from rlbridge.planning.job import Question
    from rlbridge.transport.config import TransportConfig
    from rlbridge.transport.errors import ConfigError

    transport = TransportConfig()
    for option in ("gpus_per_node", "link_gbps", "local_gbps", "copy_gbps", "bucket_mb"):
        value = getattr(arguments, option)
        if value is not None and not (value > 0 and math.isfinite(value)):
            limit = "above 0" if math.isfinite(value) else "above 0 and finite"
            raise ConfigError(f"--{option.replace('_', '-')} must be {limit}, not {value}")
    bucket_mb = arguments.bucket_mb
    return Question(
        model=arguments.model,
        trainer=tuple(arguments.trainer),
        rollout=tuple(arguments.rollout),
        gpus_per_node=arguments.gpus_per_node,
        link_gbps=arguments.link_gbps,
        local_gbps=arguments.local_gbps,
        colocated=arguments.colocated,
        export_dtype=arguments.export_dtype,
        bucket_bytes=transport.bucket_bytes if bucket_mb is None else round(bucket_mb * _BYTES_OF_MB),
        staging_bytes=transport.staging_bytes,
        copy_gbps=arguments.copy_gbps,
    )
