"""The arguments of ``rlbridge layout`` and what they do."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

EPILOG = """\
SOURCE and OTHER are WHERE, WHERE:ENGINE, WHERE:PARALLELISM or WHERE:PARALLELISM:RANK, where WHERE is a model directory,
a config.json, a built-in model, or a layout saved with --save.

examples:
  rlbridge layout DIR                                    in rlbridge's own rollout engine
  rlbridge layout DIR --engine trainer --match '*norm*'  the trainer's norms
  rlbridge layout kimi-k2 --parallel tp8.ep64 --rank 3   calculated, without weights
  rlbridge layout DIR --diff DIR:trainer                 what the trainer has otherwise
  rlbridge layout qwen3-8b:tp2:0 --diff qwen3-8b:tp4:0   two ways to cut a model
  rlbridge layout DIR --save engine.layout               to compare with on another machine

Parallelisms: pp, tp and ep for rollouts (tp4, tp8.ep64, pp2.tp8); with fsdp or hsdp they are a trainer's (fsdp8.tp2,
pp4.fsdp8.ep8, hsdp2x8). Status 1 of --diff: the layouts differ.
"""

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command line. Imports nothing heavy: ``rlbridge --help`` comes by here."""
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    parser.add_argument("source", metavar="SOURCE", help="whose layout")
    parser.add_argument("--engine", choices=("transformers", "trainer", "vllm"), help="who loads a model directory")
    parser.add_argument("--parallel", metavar="NAME", help="calculate the layout under this parallelism instead")
    parser.add_argument("--rank", type=int, default=0, metavar="N", help="which rank of it (default: 0)")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), help="of the engine (default: the checkpoint's)")
    parser.add_argument(
        "--method", choices=("auto", "trace", "probe"), default="auto", help="of discovery (default: auto)"
    )
    parser.add_argument("--match", metavar="GLOB", help="only runtime or checkpoint tensors with such a name")
    parser.add_argument("--all", action="store_true", help="a line for each layer and expert")
    parser.add_argument("--diff", metavar="OTHER", help="what differs from this layout")
    parser.add_argument("--save", metavar="FILE", type=Path, help="keep the layout; *.json can be read by people")
    parser.add_argument("--json", action="store_true", help="for programs: everything, tensor by tensor")


def layout_command(arguments: argparse.Namespace) -> int:
    """Show a layout or a difference; returns the exit status.

    Raises:
        ConfigError: something was asked for that does not exist.
        LayoutError: the layout could not be discovered.
    """
    import msgspec
    from rich.console import Console

    from rlbridge.layout.difference import difference
    from rlbridge.layout.parts import Runtime, describe
    from rlbridge.layout.saved import KnownLayout, save
    from rlbridge.layout.show import difference_json, layout_json, show_difference, show_layout
    from rlbridge.layout.sources import Source, known_layout, parse_source
    from rlbridge.transport.errors import ConfigError

    dtype = _DTYPES[arguments.dtype] if arguments.dtype else None
    defaults = Source("", arguments.engine, arguments.parallel, arguments.rank, dtype, arguments.method)

    def opened(text: str) -> tuple[KnownLayout, list[Runtime]]:
        known = known_layout(parse_source(text, defaults))
        tensors = describe(known.layout, known.checkpoint.tensors)
        wanted = [tensor for tensor in tensors if arguments.match is None or tensor.matches(arguments.match)]
        if tensors and not wanted:
            raise ConfigError(f"--match {arguments.match}: {known.title} has no such tensor")
        return known, wanted

    def print_json(content: object) -> None:
        sys.stdout.write(msgspec.json.encode(content).decode() + "\n")

    # A table that is written into a file is not cut to the width of a terminal.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    known, tensors = opened(arguments.source)
    if arguments.save is not None:
        save(known, arguments.save)
    if arguments.diff is None:
        if arguments.json:
            print_json(layout_json(known, tensors))
        else:
            show_layout(console, known, tensors, arguments.all)
        return 0
    other, other_tensors = opened(arguments.diff)
    found = difference(tensors, other_tensors)
    if arguments.json:
        print_json(difference_json(known, other, found))
    else:
        show_difference(console, known, other, found, arguments.all)
    return 0 if found.none else 1
