"""The ``rlbridge`` command. Recipes are found by name, so that adding one is adding a file."""

from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from rlbridge import __version__
from rlbridge.bench import command as bench
from rlbridge.exit_status import exit_status
from rlbridge.layout.command import add_arguments
from rlbridge.planning import command as planning
from rlbridge.transport.errors import ConfigError

_COMMANDS = ("run", "plan", "report", "layout", "bench", "doctor")
_EXAMPLES = """\
examples:
  rlbridge run grpo                                 the default job
  rlbridge run grpo sync=fully_async                the same job, nothing waits for weights
  rlbridge run grpo -m sync=fully_sync,fully_async  one job after the other
  rlbridge run ppo trainer.steps=40 seed=1          any setting is KEY=VALUE
  rlbridge run grpo --help                          every setting and group
  rlbridge run grpo --cfg job                       the composed configuration, without running
  rlbridge plan qwen3-30b-a3b --trainer fsdp8.tp2 --rollout tp4x8
                                                    what an update would take on a cluster
  rlbridge layout kimi-k2 --parallel tp8.ep64       what one rank of a cluster would hold
  rlbridge report runs/NAME                         a run as one HTML page; several runs side by side
  rlbridge bench transfer                           planned transfer beside broadcast and p2p
  eval "$(rlbridge -sc install=bash)"               tab completion for this shell
"""


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (default: ``sys.argv[1:]``) and leave with its status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(exit_status(lambda: _dispatch(arguments)))


def recipe_names() -> list[str]:
    """Names of the recipes that are installed."""
    import rlbridge.recipes

    return sorted(module.name for module in pkgutil.iter_modules(rlbridge.recipes.__path__) if module.name[0] != "_")


def _dispatch(arguments: list[str]) -> int:
    if arguments[:1] in (["-sc"], ["--shell-completion"]):
        return _shell_completion(arguments)
    if arguments[:1] == ["run"] and len(arguments) > 1 and not arguments[1].startswith("-"):
        return _run_recipe(arguments[1], arguments[2:])
    parsed = _parser().parse_args(arguments)
    if parsed.command == "report":
        from rlbridge.report.command import write_report

        sys.stdout.write(f"{write_report(parsed.runs, parsed.output)}\n")
        return 0
    if parsed.command == "doctor":
        from rlbridge.doctor import doctor

        return doctor()
    if parsed.command == "plan":
        return planning.plan_command(parsed)
    if parsed.command == "bench":
        return bench.bench_command(parsed)
    if parsed.command == "layout":
        from rlbridge.layout.command import layout_command

        return layout_command(parsed)
    _parser().print_help()
    return 0 if not arguments else 2


def _run_recipe(recipe: str, arguments: Sequence[str]) -> int:
    _check_recipe(recipe)
    sys.argv[1:] = arguments
    importlib.import_module(f"rlbridge.recipes.{recipe}").main()
    return 0


def _check_recipe(recipe: str) -> None:
    from rlbridge.config_parse import suggestion

    names = recipe_names()
    if recipe not in names:
        raise ConfigError(f"no recipe {recipe!r}{suggestion(recipe, names)}")


def _shell_completion(arguments: Sequence[str]) -> int:
    """Answer the shell: commands and recipes here, everything behind ``rlbridge run RECIPE`` by Hydra."""
    from rlbridge.recipe_main import recipe_main

    sys.argv = ["rlbridge", *arguments]
    recipe = recipe_names()[0]
    if any(argument.startswith("query=") for argument in arguments):
        line = os.environ.get("COMP_LINE", "")
        words = line.split() + ([""] if line.endswith(" ") else [])
        if len(words) < 4 or words[1] != "run" or words[2] not in recipe_names():
            sys.stdout.write(" ".join(_first_words(words)) + "\n")
            return 0
        recipe = words[2]
        os.environ["COMP_LINE"] = "rlbridge " + " ".join(words[3:])
    return recipe_main(recipe, _never)


def _first_words(words: Sequence[str]) -> Sequence[str]:
    if len(words) <= 2:
        return _COMMANDS
    return recipe_names() if words[1] == "run" and len(words) == 3 else ()


def _never(_job: object) -> int:
    raise AssertionError("completing a command line must not run it")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlbridge",
        description="Asynchronous RL post-training for language models whose weights never wait.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"rlbridge {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    run = commands.add_parser("run", help=f"run a recipe: {', '.join(recipe_names())}")
    run.add_argument("recipe", metavar="RECIPE", help=", ".join(recipe_names()))
    run.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings and Hydra's own options")
    planning.add_arguments(commands.add_parser("plan", help="foretell an update's time and stalls on a cluster"))
    report = commands.add_parser("report", help="write a run, or several side by side, as one HTML page")
    report.add_argument("runs", nargs="+", metavar="RUN", help="a run's folder, or its name in runs/")
    report.add_argument("--output", metavar="FILE", help="default: report.html in the run's folder, or above several")
    add_arguments(commands.add_parser("layout", help="show which runtime tensor comes from where in a checkpoint"))
    bench.add_arguments(commands.add_parser("bench", help="measure weight transfer on this machine"))
    commands.add_parser("doctor", help="say what this machine can do, and why not the rest")
    return parser
