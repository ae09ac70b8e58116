"""The house keeps its shape: arrows point one way, folders are packages, nothing heavy is pulled in by the library."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlbridge", "trainer", "rollout", "sync", "transport", "conf", "recipes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

ALLOWED = {
    "rlbridge.transport": {"rlbridge.transport"},
    "rlbridge.sync": {"rlbridge.sync", "rlbridge.transport"},
    "rlbridge.rollout": {"rlbridge.rollout", "rlbridge.sync", "rlbridge.transport"},
    "rlbridge.trainer": {"rlbridge.trainer", "rlbridge.sync", "rlbridge.transport", "rlbridge.rollout.trajectory"},
    "rlbridge.conf": set[str](),
}
"""What each room may import of rlbridge, itself included. The front door may import every room, recipes everything."""

FORBIDDEN = {
    "rlbridge.transport": {"hydra", "omegaconf", "wandb", "transformers", "rich"},
    "rlbridge.sync": {"hydra", "omegaconf", "wandb", "transformers", "rich"},
    "rlbridge.rollout": {"hydra", "omegaconf", "wandb", "rich"},
    "rlbridge.trainer": {"hydra", "omegaconf", "wandb", "rich"},
}
"""Third-party packages that a room must not import."""


def sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "rlbridge" else ["rlbridge", *parts])


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def room_of(module: str) -> str:
    for folder in FOLDERS[1:]:
        if within(module, f"rlbridge.{folder}"):
            return f"rlbridge.{folder}"
    return "rlbridge"


def imports_of(source: str) -> Iterator[str]:
    """Every module that the source names in an import, wherever it stands; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def wrong_imports(module: str, source: str) -> list[str]:
    room = room_of(module)
    wrong = []
    for name in imports_of(source):
        top = name.split(".")[0]
        if name.startswith(".") or (top in FOLDERS[1:] and top not in sys.stdlib_module_names):
            wrong.append(f"{module} imports {name}: use the absolute name under rlbridge")
        elif top in FORBIDDEN.get(room, set()):
            wrong.append(f"{module} imports {name}: {room} must not need it")
        elif top == "rlbridge" and room in ALLOWED and not any(within(name, package) for package in ALLOWED[room]):
            wrong.append(f"{module} imports {name}: the arrow points the other way")
        elif room == "rlbridge" and within(name, "rlbridge.recipes") and name != "rlbridge.recipes":
            wrong.append(f"{module} imports {name}: recipes are found by name")
    return wrong


@pytest.mark.parametrize("path", sources(), ids=module_name)
def test_arrows_point_one_way(path: Path) -> None:
    assert wrong_imports(module_name(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlbridge.transport.x", "from rlbridge.sync.config import SyncConfig"),
        ("rlbridge.sync.x", "def f():\n    import rlbridge.rollout.trajectory"),
        ("rlbridge.sync.x", "from rlbridge import cli"),
        ("rlbridge.sync.x", "from transformers import AutoConfig"),
        ("rlbridge.rollout.x", "from rlbridge.trainer.messages import TrainStep"),
        ("rlbridge.trainer.x", "from rlbridge.rollout.messages import Finished"),
        ("rlbridge.trainer.x", "from rlbridge.rollout import config"),
        ("rlbridge.trainer.x", "import wandb.sdk"),
        ("rlbridge.cli", "from rlbridge.recipes.grpo import main"),
        ("rlbridge.cli", "from rlbridge.recipes import grpo"),
        ("rlbridge.sync.x", "from .plan import program"),
        ("rlbridge.cli", "from sync.config import SyncConfig"),
    ],
)
def test_a_wrong_arrow_is_found(module: str, source: str) -> None:
    assert len(wrong_imports(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rlbridge.trainer.x", "from rlbridge.rollout.trajectory import Trajectory"),
        ("rlbridge.rollout.x", "from rlbridge.sync.adapters import ReceiverAdapter\nimport transformers"),
        ("rlbridge.cli", "import rlbridge.recipes\nimport hydra"),
        ("rlbridge.recipes.grpo", "from rlbridge.controller.job import run_job"),
    ],
)
def test_a_right_arrow_is_not_complained_about(module: str, source: str) -> None:
    assert wrong_imports(module, source) == []


def test_every_folder_with_code_is_a_listed_package() -> None:
    """A package that is not listed works in an editable install and is missing from the wheel."""
    found = {module_name(path) for path in sources() if path.name == "__init__.py"}
    listed = PROJECT["tool"]["setuptools"]["packages"]
    assert sorted(found) == sorted(listed)
    folders_of_code = {module_name(path.parent / "__init__.py") for path in sources()}
    assert folders_of_code == found, "a folder of code without __init__.py"


def test_the_folder_mapping_covers_the_top_level() -> None:
    mapping = PROJECT["tool"]["setuptools"]["package-dir"]
    assert mapping == {f"rlbridge.{folder}": folder for folder in FOLDERS[1:]}
