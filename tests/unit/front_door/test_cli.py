"""The ``rlbridge`` command itself: recipes by name, help, version, completion."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from rlbridge import __version__
from rlbridge.cli import main, recipe_names

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlbridge", *arguments])
        with pytest.raises(SystemExit) as leaving:
            main()
        printed = capsys.readouterr()
        code = leaving.value.code
        return (code if isinstance(code, int) else 0), printed.out, printed.err

    return run


def test_the_recipes_are_found_by_name() -> None:
    assert recipe_names() == ["grpo", "ppo"]


def test_help_and_version(cli: Cli) -> None:
    status, out, _ = cli("--help")
    assert status == 0
    assert "rlbridge run grpo sync=fully_async" in out
    assert cli("--version") == (0, f"rlbridge {__version__}\n", "")
    assert cli() == (0, out, "")
    assert "grpo, ppo" in cli("run", "--help")[1]


def test_a_wrong_recipe_gets_the_nearest_name(cli: Cli) -> None:
    status, _, err = cli("run", "gpro")
    assert (status, err) == (2, "rlbridge: error: no recipe 'gpro'; did you mean 'grpo'?\n")


@pytest.mark.parametrize(
    "arguments",
    [("rnu",), ("run",), ("run", "--cfg"), ("doctor", "x"), ("report",), ("plan",), ("plan", "kimi-k2"), ("layout",)],
)
def test_a_wrong_command_is_a_usage_error(cli: Cli, arguments: tuple[str, ...]) -> None:
    status, _, err = cli(*arguments)
    assert status == 2
    assert "usage: rlbridge" in err


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rlbridge ", {"run", "plan", "report", "layout", "bench", "doctor"}),
        ("rlbridge r", {"run", "plan", "report", "layout", "bench", "doctor"}),
        ("rlbridge run ", {"grpo", "ppo"}),
        ("rlbridge run g", {"grpo", "ppo"}),
        ("rlbridge doctor x", set()),
        ("rlbridge run grpo sync=fully", {"sync=fully_async", "sync=fully_sync"}),
        ("rlbridge run ppo trainer.st", {"trainer.steps="}),
    ],
)
def test_the_shell_completes_commands_recipes_and_settings(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, line: str, expected: set[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    status, out, _ = cli("-sc", "query=bash")
    assert status == 0
    assert set(out.split()) == expected


def test_completion_installs_itself_for_the_command(cli: Cli) -> None:
    status, out, _ = cli("-sc", "install=bash")
    assert status == 0
    assert out.rstrip().endswith("hydra_bash_completion rlbridge")


@pytest.mark.parametrize("module", ["rlbridge.sync", "rlbridge.transport", "rlbridge"])
def test_the_library_loads_nothing_of_the_front_door(module: str) -> None:
    heavy = ("hydra", "omegaconf", "wandb", "transformers", "rich", "rlbridge.config", "rlbridge.trainer")
    code = f"import sys, {module}; print([name for name in {heavy!r} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert printed.stdout.strip() == "[]"


def test_public_names_load_on_first_use() -> None:
    import rlbridge

    assert set(rlbridge.__all__) <= set(dir(rlbridge))
    for name in rlbridge.__all__:
        assert getattr(rlbridge, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = rlbridge.Nothing
