"""``rlbridge plan``: its figures are the planner's, by names and by saved layouts; bad input is one clear error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlbridge.catalog.layouts import rollout_layouts, trainer_layouts
from rlbridge.catalog.shape import shape_of_config
from rlbridge.catalog.tensors import spec_of_shape
from rlbridge.cli import main
from rlbridge.sync.correspondence import correspond, export_dtypes
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.transport.topology import NodeRates, Topology

Cli = Callable[..., tuple[int, str, str]]

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "dtype": "bfloat16",
}
SIDES = ("--trainer", "fsdp4.tp2", "--rollout", "tp2x4", "--gpus-per-node", "4")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    return file


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as leaving:
            main(["plan", *map(str, arguments)])
        printed = capsys.readouterr()
        assert isinstance(leaving.value.code, int)
        return leaving.value.code, printed.out, printed.err

    return run


def planned(cli: Cli, *arguments: object) -> dict[str, Any]:
    status, out, err = cli(*arguments, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def plain(value: object) -> Any:
    return json.loads(json.dumps(value))


def test_the_figures_are_what_the_planner_reports(cli: Cli, config: Path) -> None:
    rates = ("--link-gbps", "2", "--local-gbps", "30", "--bucket-mb", "0.05", "--export-dtype", "float32")
    found = planned(cli, config, *SIDES, *rates)
    shape = shape_of_config(CONFIG)
    spec = spec_of_shape(shape)
    trainers, rollouts = trainer_layouts(shape, "fsdp4.tp2", 4), rollout_layouts(shape, "tp2x4", 4, first_node=2)
    topology = Topology({p.worker: f"node{p.node}" for p in [*trainers, *rollouts]}, NodeRates.of_gbps(2, 30))
    layouts = ({p.worker: p.layout for p in side} for side in (trainers, rollouts))
    correspondence = correspond(spec, *layouts, export_dtypes(spec, "float32"))
    plans = [plan_transfer(correspondence, topology, bucket_bytes=50_000)]
    plans += [plan_baseline(kind, correspondence, topology, bucket_bytes=50_000) for kind in BaselineKind]
    predictions = [predict(plan, staging_bytes=256 * 1024 * 1024) for plan in plans]
    assert found["bound"]["seconds"] == plans[0].bound.seconds
    assert found["bound"]["terms_s"] == plans[0].bound.terms_s
    assert found["bound"]["terms_s"][found["explained_by"]] == max(plans[0].bound.terms_s.values())
    for told, plan, prediction in zip(found["plans"], plans, predictions, strict=True):
        assert told["kind"] == plan.kind
        assert told["report"] == plain(plan.report(prediction))
        assert told["predicted_s"] == prediction.seconds
        assert told["over_bound"] == pytest.approx(prediction.seconds / plan.bound.seconds)
        assert told["over_planned"] == pytest.approx(prediction.seconds / predictions[0].seconds)
        assert told["loads"][0]["seconds"] == prediction.worst_link_s
    assert found["update_bytes"] == 4 * found["parameters"] == 4 * sum(_sizes(spec.tensors.values()))
    assert found["trainer"] == {"layout": "fsdp4.tp2", "workers": 8, "nodes": 2}
    assert found["rollout"] == {"layout": "tp2x4", "workers": 8, "nodes": 2}
    assert {stall["mode"]: stall["trainer_s"] == predictions[0].seconds for stall in found["stalls"]} == {
        "fully_sync": True,
        "sender_staged": False,
        "receiver_staged": True,
        "fully_async": False,
    }


def _sizes(tensors: Any) -> list[int]:
    sizes = []
    for tensor in tensors:
        sizes.append(1)
        for count in tensor.shape:
            sizes[-1] *= count
    return sizes


def test_who_shares_a_node_sends_nothing_out_of_it(cli: Cli, config: Path) -> None:
    apart, together = planned(cli, config, *SIDES), planned(cli, config, *SIDES, "--colocated")
    assert (apart["nodes"], together["nodes"]) == (4, 2)
    assert apart["bound"]["external_s"] > together["bound"]["external_s"]
    one_node = planned(cli, config, "--trainer", "fsdp2", "--rollout", "tp2", "--gpus-per-node", 2, "--colocated")
    assert one_node["bound"]["external_s"] == 0
    assert {load["way"] for plan in one_node["plans"] for load in plan["loads"]} == {"inside"}
    assert one_node["plans"][0]["loads"][0]["roles"] == "trainer+rollout"


def test_the_table_says_everything_a_decision_needs(cli: Cli, config: Path) -> None:
    status, out, err = cli(config, *SIDES, "--copy-gbps", "100")
    assert (status, err) == (0, "")
    figures = planned(cli, config, *SIDES, "--copy-gbps", "100")
    for words in (
        "trainer fsdp4.tp2: 8 workers on 2 nodes → rollout tp2x4: 8 workers on 2 nodes",
        "400 Gbit/s between nodes, 3600 within",
        "into 2 rollout nodes",
        "Copy rates are assumptions, not measured: each worker copies at 100 Gbit/s",
    ):
        assert words in out
    for row in (
        "lower bound",
        "broadcast",
        "p2p",
        *figures["bound"]["terms_s"],
        *(s["mode"] for s in figures["stalls"]),
    ):
        assert row in out
    (line,) = [line for line in out.splitlines() if "this is the bound" in line]
    assert figures["explained_by"] in line


def test_saved_layouts_are_as_good_as_names(
    cli: Cli, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files: dict[str, list[Path]] = {"fsdp2": [], "tp2": []}
    for parallel, its in files.items():
        for rank in range(2):
            its.append(tmp_path / f"{parallel}-{rank}.layout")
            with pytest.raises(SystemExit) as leaving:
                main(["layout", f"{config}:{parallel}:{rank}", "--save", str(its[-1])])
            assert leaving.value.code == 0
    capsys.readouterr()
    by_name = planned(cli, config, "--trainer", "fsdp2", "--rollout", "tp2")
    mixed = planned(cli, config, "--trainer", *files["fsdp2"], "--rollout", "tp2")
    by_file = planned(cli, "--trainer", *files["fsdp2"], "--rollout", *files["tp2"])
    for found in (mixed, by_file):
        assert [plan["predicted_s"] for plan in found["plans"]] == [plan["predicted_s"] for plan in by_name["plans"]]
        for key in ("parameters", "update_bytes", "bound", "copies", "stalls"):
            assert found[key] == by_name[key]
    assert by_file["trainer"] == {"layout": "2 saved layouts", "workers": 2, "nodes": 1}
    status, _, err = cli("--trainer", files["fsdp2"][0], "--rollout", *files["tp2"])
    assert status == 1  # half of the trainer's shards are missing
    assert "no sender holds these checkpoint elements" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("qwen3-30b-a3", *SIDES), "did you mean 'qwen3-30b-a3b'?"),
        (("/no/such/config.json", *SIDES), "neither a built-in model nor a file or directory"),
        (("CONFIG", "--trainer", "fsdp4", "--rollout", "tq4"), "cannot read 'tq4'"),
        (("CONFIG", "--trainer", "tp4x2", "--rollout", "tp4"), "tp4x2"),
        (("CONFIG", "--trainer", "fsdp4", "--rollout", "tp3"), "cannot be divided by 3"),
        (("--trainer", "fsdp4", "--rollout", "tp2"), "give the model first: rlbridge plan MODEL --trainer fsdp4"),
        (("--rollout", "tp2", "--trainer", "fsdp4", "kimi-k2"), "rlbridge plan kimi-k2 --trainer fsdp4"),
        (("--trainer", "CONFIG", "--rollout", "tp2"), "no layout that --save wrote"),
        (("CONFIG", *SIDES, "--gpus-per-node", "0"), "--gpus-per-node must be above 0, not 0"),
        (("CONFIG", *SIDES, "--link-gbps", "-1"), "--link-gbps must be above 0, not -1"),
        (("CONFIG", *SIDES, "--local-gbps", "nan"), "--local-gbps must be above 0 and finite, not nan"),
        (("CONFIG", *SIDES, "--copy-gbps", "inf"), "--copy-gbps must be above 0 and finite, not inf"),
        (("CONFIG", *SIDES, "--bucket-mb", "0"), "--bucket-mb must be above 0"),
        (("CONFIG", *SIDES, "--svg", "/no/such/place/x.svg"), "/no/such/place/x.svg cannot be written"),
    ],
)
def test_bad_input_is_one_clear_error(cli: Cli, config: Path, arguments: tuple[str, ...], message: str) -> None:
    status, out, err = cli(*(str(config) if argument == "CONFIG" else argument for argument in arguments))
    assert (status, out) == (2, "")
    assert message in err
    assert err.startswith("rlbridge: error: ")
    assert err.count("\n") == 1


def test_a_bucket_that_holds_no_element_is_refused(cli: Cli, config: Path) -> None:
    status, _, err = cli(config, *SIDES, "--bucket-mb", "0.00001")
    assert status == 1
    assert "give at least 32" in err
