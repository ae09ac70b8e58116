"""The programs of docs/integration.md, as they stand there, as real processes over UCX."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

DOCUMENT = Path(__file__).parents[2] / "docs" / "integration.md"
DEADLINE_S = 150.0
LAST = 3

SAVE_TRAINER = """
whole = {name: parameter.full_tensor().detach() for name, parameter in layer.named_parameters()}
if rank == 0:
    torch.save(whole, directory / "trainer.pt")
"""
SAVE_ENGINE = """
torch.save({"live": live, "up": kernel["up"]}, directory / "engine.pt")
"""


def programs() -> dict[str, str]:
    """The Python blocks of the document, by the file name in their first line."""
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {re.match(r"# (\w+\.py)", block)[1]: block for block in blocks}


def lines_of_code(program: str) -> int:
    return sum(1 for line in program.splitlines() if line.strip() and not line.lstrip().startswith("#"))


@pytest.mark.parametrize("name", ["host.py", "trainer.py", "engine.py"])
def test_an_example_is_short_and_knows_only_the_library(name: str) -> None:
    program = programs()[name]
    assert lines_of_code(program) < 40
    modules = {node.module for node in ast.walk(ast.parse(program)) if isinstance(node, ast.ImportFrom)}
    of_rlbridge = {module for module in modules if module.startswith("rlbridge")}
    assert of_rlbridge <= {"rlbridge.sync", "rlbridge.transport.config"}


def test_the_errors_of_the_table_are_those_that_are_raised() -> None:
    folders = ("sync", "transport")
    sources = [path.read_text() for folder in folders for path in (DOCUMENT.parents[1] / folder).rglob("*.py")]
    listed = re.findall(r"^\| `(\w+Error)(?:: ([^`]+))?` \|", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert len(listed) > 8
    for kind, text in listed:
        assert any(f"class {kind}(" in source for source in sources), kind
        for fragment in filter(None, text.strip(". ").split("... ")):
            assert any(fragment in source for source in sources), fragment


class Processes:
    """Starts programs and leaves none of them behind."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, program: str, *arguments: str) -> subprocess.Popen[str]:
        file = self.folder / f"{name}.py"
        file.write_text(program)
        environment = os.environ | {
            "RLBRIDGE_SECRET": "a secret of thirty-two bytes....",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "error",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        command = [sys.executable, str(file), *arguments]
        self.running[name] = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        return self.running[name]

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.running.values():
            process.kill()
            process.communicate()


def write_checkpoint(folder: Path) -> None:
    layer = torch.nn.TransformerEncoderLayer(16, nhead=2, dim_feedforward=64)
    save_file({n: p.detach().to(torch.bfloat16) for n, p in layer.named_parameters()}, folder / "model.safetensors")


def test_the_examples_move_weights_from_a_sharded_trainer_into_an_engine(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    code = programs()
    end = "dist.destroy_process_group()\n"
    assert code["trainer.py"].endswith(end)
    trainer = code["trainer.py"].removesuffix(end) + SAVE_TRAINER + end
    with Processes(tmp_path) as processes:
        host = processes.start("host", code["host.py"])
        endpoint = host.stdout.readline().strip()
        assert endpoint, host.stderr.read()
        for rank in range(2):
            processes.start(f"trainer-{rank}", trainer, str(tmp_path), endpoint, str(rank))
        engine = processes.start("engine", code["engine.py"] + SAVE_ENGINE, str(tmp_path), endpoint)
        out, _ = engine.communicate(timeout=DEADLINE_S)
        ends = {name: p.communicate(timeout=DEADLINE_S) for name, p in processes.running.items() if p is not engine}
        statuses = {name: process.returncode for name, process in processes.running.items()}
    assert statuses == dict.fromkeys(statuses, 0), (ends, out)
    assert out.splitlines()[-1] == f"version {LAST}"
    compare(torch.load(tmp_path / "trainer.pt"), torch.load(tmp_path / "engine.pt"))


def compare(trained: dict[str, torch.Tensor], engine: dict[str, object]) -> None:
    """The engine computes with the trainer's last weights, cast once, and has derived its own from them."""
    live, up = engine["live"], engine["up"]
    norms = torch.stack([trained[f"norm{n}.{kind}"] for n in (1, 2) for kind in ("weight", "bias")])
    assert torch.equal(live["norms"], norms.to(torch.bfloat16))
    for name, tensor in trained.items():
        if not name.startswith("norm"):
            assert torch.equal(live[name], tensor.to(torch.bfloat16)), name
    assert torch.equal(up, trained["linear1.weight"].to(torch.bfloat16).T)
