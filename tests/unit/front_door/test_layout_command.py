"""``rlbridge layout``: real engines and calculated layouts as tables, JSON, files and differences."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlbridge.cli import main
from rlbridge.layout.collapse import collapse, expanded, joined_name, ranges
from rlbridge.layout.parts import describe
from rlbridge.layout.saved import KnownLayout, save
from rlbridge.model import ModelConfig, prepare_model
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = ModelConfig(hidden=16, layers=3, heads=2, kv_heads=1, mlp=32)
    return prepare_model(sizes, tmp_path_factory.mktemp("run"), seed=0)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["layout", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return leaving.value.code, printed.out, printed.err

    return run


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


def test_a_directory_is_shown_as_the_engine_holds_it(cli: Cli, directory: Path) -> None:
    status, out, _ = cli(directory)
    assert status == 0
    (line,) = lines_with(out, "self_attn.q_proj.weight")
    assert line.split() == [
        "model.layers.{0..2}.self_attn.q_proj.weight",
        "x3",
        "[16,",
        "16]",
        "fp32",
        "model.layers.*.self_attn.q_proj.weight",
        "copy",
    ]
    assert "36 runtime tensors" in out


def test_all_names_each_layer_and_match_leaves_the_others_out(cli: Cli, directory: Path) -> None:
    _, out, _ = cli(directory, "--all", "--match", "*q_proj*")
    assert len(lines_with(out, "q_proj")) == 3
    assert not lines_with(out, "norm")
    status, _, err = cli(directory, "--match", "*nothing*")
    assert (status, err.count("\n")) == (2, 1)
    assert "--match *nothing*" in err


@pytest.mark.parametrize("method", ["auto", "trace", "probe"])
def test_every_method_finds_the_same(cli: Cli, directory: Path, method: str) -> None:
    found = json.loads(cli(directory, "--json", "--method", method)[1])
    assert found["hash"] == json.loads(cli(directory, "--json")[1])["hash"]


def test_engines_and_dtypes_differ_in_casts(cli: Cli, directory: Path) -> None:
    status, out, _ = cli(directory, "--dtype", "bf16", "--diff", f"{directory}:trainer")
    assert status == 1
    assert "cast fp32 → bf16" in out
    assert "the layouts differ: 0 runtime tensors equal, 36 different" in out


def test_a_layout_does_not_differ_from_itself(cli: Cli, directory: Path) -> None:
    status, out, _ = cli(directory, "--diff", f"{directory}:trainer")
    assert status == 0
    assert "the layouts are equal: 36 runtime tensors equal" in out


@pytest.mark.parametrize("name", ["engine.layout", "engine.json"])
def test_a_saved_layout_is_as_good_as_a_fresh_one(cli: Cli, directory: Path, tmp_path: Path, name: str) -> None:
    _, fresh, _ = cli(directory, "--save", tmp_path / name)
    assert cli(tmp_path / name)[1] == fresh
    status, out, _ = cli(tmp_path / name, "--diff", f"{directory}:trainer", "--json")
    assert (status, json.loads(out)["equal"]) == (0, True)


def test_a_rank_of_a_cluster_is_calculated(cli: Cli) -> None:
    status, out, _ = cli("kimi-k2", "--parallel", "tp8.ep64", "--rank", "3")
    assert status == 0
    (experts,) = lines_with(out, "w2_weight")
    assert "model.layers.{1..60}.mlp.experts.routed_experts.w2_weight  x60" in experts
    assert "model.layers.*.mlp.experts.{18..23}.down_proj.weight  x6" in experts
    assert "model.layers.*.self_attn.o_proj.weight [:, 3072:4096]" in out
    assert "fsdp8, trainer-1" in cli("qwen3-0.6b:fsdp8:1")[1]


def test_two_parallelisms_are_compared(cli: Cli) -> None:
    status, out, _ = cli("qwen3-8b:tp2", "--diff", "qwen3-8b:tp4:1", "--json")
    found = json.loads(out)
    assert (status, found["equal"], found["same"]) == (1, False, 36 * 4 + 1)
    changed = {entry["name"]: entry for entry in found["different"]}["lm_head.weight"]
    slices = [changed[side]["parts"][0]["slices"][0] for side in ("first", "second")]
    assert slices == ["0:75968", "37984:75968"]
    assert found["only_first"] == found["only_second"] == []


def test_sides_with_other_names_are_listed_apart(cli: Cli) -> None:
    status, out, _ = cli("qwen3-0.6b:tp1", "--diff", "qwen3-0.6b:fsdp1")
    assert status == 1
    assert "only in qwen3-0.6b tp1, rollout-0-0" in out
    assert "only in qwen3-0.6b fsdp1, trainer-0" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kimi-k",), "did you mean 'kimi-k2'?"),
        (("kimi-k2",), "say how it is cut"),
        (("kimi-k2:tp4:x",), "cannot read it"),
        (("kimi-k2", "--parallel", "tp5"), "cannot be divided by 5"),
        (("kimi-k2", "--parallel", "tp4", "--rank", "4"), "ranks 0 to 3"),
        (("kimi-k2", "--parallel", "tp4", "--engine", "vllm"), "give one of them"),
        (("DIR:transfomers",), "did you mean 'transformers'?"),
        (("DIR:tq4",), "cannot read 'tq4'"),
        (("DIR", "--diff", "/no/such/place"), "neither a built-in model nor a file or directory"),
        (("DIR", "--save", "/no/such/place/x"), "/no/such/place/x cannot be written"),
        (("DIR/tokenizer_config.json:tp2",), "model_type"),
        (("DIR/model.safetensors",), "no layout that --save wrote"),
    ],
)
def test_bad_input_is_one_clear_error(cli: Cli, directory: Path, arguments: tuple[str, ...], message: str) -> None:
    status, _, err = cli(*(argument.replace("DIR", str(directory)) for argument in arguments))
    assert status == 2
    assert message in err
    assert err.startswith("rlbridge: error: ")
    assert err.count("\n") == 1


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_an_engine_that_is_not_installed_says_so(cli: Cli, directory: Path) -> None:
    status, _, err = cli(directory, "--engine", "vllm")
    assert status == 2
    assert "vLLM is not installed" in err


def test_a_damaged_file_is_named(cli: Cli, directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "engine.json"
    cli(directory, "--save", file)
    content: dict[str, Any] = json.loads(file.read_text())
    del content["checkpoint"]["tensors"]["lm_head.weight"]
    file.write_text(json.dumps(content, separators=(",", ":")))
    status, _, err = cli(file)
    assert status == 1
    assert f"{file}: damaged" in err


def test_help_and_calculated_layouts_do_without_torch() -> None:
    code = """
import contextlib, io, sys
from rlbridge.cli import main
for arguments in (["--help"], ["layout", "--help"], ["layout", "qwen3-0.6b", "--parallel", "tp2"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
sys.exit(len({"torch", "transformers"} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHECKPOINT = {"layers.0.w": TensorSpec((4, 6), "bfloat16"), "layers.1.w": TensorSpec((4, 6), "bfloat16")}


def test_whatever_is_more_than_a_copy_is_said() -> None:
    layout = SourceMap(
        {"a": TensorSpec((6, 4), "float32"), "b": TensorSpec((2, 8), "bfloat16"), "c": TensorSpec((3,), "bfloat16")},
        [
            Box("a", "layers.0.w", (0, 0), (4, 6), (1, 1), 0, (1, 4)),
            Box("b", "layers.0.w", (0, 1), (2, 3), (2, 2), 2, (8, 1)),
        ],
        aliases=[Box("a", "layers.1.w", (0, 0), (4, 6), (1, 1), 0, (1, 4))],
        opaque=[Opaque("b", 12, (4,), (1,), ("layers.0.w", "layers.1.w"), "aten.exp")],
    )
    a, b, c = describe(layout, CHECKPOINT)
    assert a.parts[0].how == ("transposed", "cast bf16 → fp32")
    assert "tied" in a.parts[1].how[-1]
    assert (b.parts[0].slices, b.parts[0].at, b.parts[0].how) == (("0:3:2", "1:6:2"), (0, 2), ("every 2nd",))
    assert (b.parts[1].how, b.parts[1].at) == (("4 elements opaque: aten.exp",), (1, 4))
    assert b.parts[2].how == ("padded with 6 elements",)
    assert c.parts[0].how == ("not filled by any checkpoint tensor",)
    (group,) = collapse([b])
    assert [line.source for line in group.lines] == ["layers.0.w [0:3:2, 1:6:2]", "layers.{0..1}.w", ""]


def test_what_arrives_as_opaque_is_shown(cli: Cli, tmp_path: Path) -> None:
    layout = SourceMap(
        {"w": TensorSpec((4, 6), "bfloat16")}, [], opaque=[Opaque("w", 0, (24,), (1,), ("layers.0.w",), "aten.neg")]
    )
    save(KnownLayout("quantised", CheckpointSpec(CHECKPOINT), layout), tmp_path / "saved")
    status, out, _ = cli(tmp_path / "saved")
    assert status == 0
    assert "opaque: aten.neg" in out
    assert "in no runtime tensor: layers.1.w" in out


def test_layers_collapse_only_if_they_are_alike() -> None:
    runtime = {f"layers.{i}.w": TensorSpec((4, 6), "bfloat16") for i in (0, 1, 2, 4)}
    tensors = {f"layers.{i}.w": TensorSpec((4, 6), "bfloat16") for i in range(5)}
    boxes = [Box(name, name, (0, 0), (4, 6), (1, 1), 0, (6, 1)) for name in list(runtime)[:3]]
    boxes.append(Box("layers.4.w", "layers.3.w", (0, 0), (4, 6), (1, 1), 0, (6, 1)))
    described = describe(SourceMap(runtime, boxes), tensors)
    groups = collapse(described)
    assert [group.name for group in groups] == ["layers.{0..2}.w", "layers.4.w"]
    assert [group.lines[0].source for group in groups] == ["layers.*.w", "layers.3.w"]
    assert len(expanded(described)) == 4


def test_numbers_are_written_as_ranges() -> None:
    assert ranges([3]) == "3"
    assert ranges([2, 0, 1, 7, 9, 8]) == "{0..2,7..9}"
    assert joined_name(["a.0.b{x}.1", "a.1.b{x}.1"], own=(5, 1)) == "a.{0..1}.b{x}.*"
