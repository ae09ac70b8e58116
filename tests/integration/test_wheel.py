"""The wheel: one package, everything in it, usable from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
FOLDERS = ("rlbridge", "trainer", "rollout", "sync", "transport", "conf", "recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: building in place would ship what an older build left in ``build/lib``."""
    source = tmp_path_factory.mktemp("source")
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(source / "dist"),
        str(source),
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next((source / "dist").glob("rlbridge-*.whl"))


def expected_files() -> set[str]:
    files = set()
    for folder in FOLDERS:
        inside = "rlbridge" if folder == "rlbridge" else f"rlbridge/{folder}"
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".py", ".yaml", ".typed", ".css", ".js") or path.name == "py.typed":
                files.add(f"{inside}/{path.relative_to(ROOT / folder)}")
    return files


def test_it_holds_rlbridge_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == expected_files()
    assert {name.split("/")[0] for name in names} == {"rlbridge"}


def test_it_works_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)

    def python(*arguments: str) -> str:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(site)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=120,
            check=True,
        ).stdout

    assert python("-c", "import rlbridge.sync; print(rlbridge.sync.__file__)").startswith(str(site))
    assert "mode: fully_async" in python("-m", "rlbridge.recipes.grpo", "--cfg", "job", "sync=fully_async")
