"""Stalls by mode, links as people read them, and the picture."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import msgspec
import pytest

from rlbridge.planning.job import Question, job_of
from rlbridge.planning.links import loads_of
from rlbridge.planning.outlook import Outlook, outlook_of
from rlbridge.planning.picture import WIDTH, picture
from rlbridge.planning.stalls import CopyCost, copy_cost, predict_stalls
from rlbridge.sync.config import SyncMode
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.report import link_bytes

SVG = "{http://www.w3.org/2000/svg}"


def question(**changes: Any) -> Question:
    settings: dict[str, Any] = {
        "model": "qwen3-0.6b",
        "trainer": ("fsdp4",),
        "rollout": ("tp2x4",),
        "gpus_per_node": 2,
        "link_gbps": 100.0,
        "local_gbps": 1000.0,
        "colocated": False,
        "export_dtype": None,
        "bucket_bytes": 32_000_000,
        "staging_bytes": 256_000_000,
        "copy_gbps": 80.0,
    }
    return Question(**settings | changes)


@pytest.fixture(scope="module")
def outlook() -> Outlook:
    return outlook_of(question(), job_of(question()))


def test_each_mode_blocks_what_the_design_says() -> None:
    found = predict_stalls(8.0, CopyCost(snapshot_bytes=30, apply_bytes=50, bytes_per_s=10))
    assert {stall.mode: (stall.trainer_s, stall.rollout_s) for stall in found} == {
        SyncMode.FULLY_SYNC: (8.0, 8.0),
        SyncMode.SENDER_STAGED: (3.0, 8.0),
        SyncMode.RECEIVER_STAGED: (8.0, 5.0),
        SyncMode.FULLY_ASYNC: (3.0, 5.0),
    }


def test_the_largest_worker_decides_how_much_is_copied(outlook: Outlook) -> None:
    whole = question(trainer=("fsdp1",), rollout=("tp1",))
    cost = copy_cost(job_of(whole).correspondence, 1.0)
    assert (cost.snapshot_bytes, cost.apply_bytes) == (outlook.update_bytes, outlook.update_bytes)
    assert outlook.copies.snapshot_bytes == outlook.update_bytes // 4
    assert outlook.update_bytes // 2 < outlook.copies.apply_bytes < outlook.update_bytes * 0.51  # norms on both ranks
    wide = question(trainer=("fsdp1",), rollout=("tp1",), export_dtype="float32")
    assert copy_cost(job_of(wide).correspondence, 1.0) == CopyCost(outlook.update_bytes, 2 * outlook.update_bytes, 1.0)


def test_equal_nodes_are_one_load_and_nothing_gets_lost() -> None:
    job = job_of(question())
    plan = plan_transfer(job.correspondence, job.topology, bucket_bytes=32_000_000)
    loads = loads_of(plan)
    assert [load.label for load in loads][:1] == ["into 4 rollout nodes"]
    assert loads == sorted(loads, key=lambda load: -load.seconds)
    single = link_bytes(plan)
    for way in ("out", "in"):
        nodes = [node for load in loads if load.way == way for node in load.nodes]
        assert sorted(f"{way}:{node}" for node in nodes) == [link for link in single if link.startswith(f"{way}:")]
        for load in loads:
            for node in load.nodes if load.way == way else ():
                total = sum(single[f"{way}:{node}"].values())
                assert total <= load.total_bytes <= total / 0.99


def test_the_picture_is_well_formed_and_shows_every_link(outlook: Outlook) -> None:
    root = ET.fromstring(picture(outlook))
    assert root.tag == f"{SVG}svg"
    height = float(root.attrib["height"])
    texts = [text.text or "" for text in root.iter(f"{SVG}text")]
    bars = [bar for bar in root.iter(f"{SVG}rect") if bar.find(f"{SVG}title") is not None]
    stages = [stage for plan in outlook.plans for load in plan.loads for stage in load.bytes_by_stage]
    assert [bar.attrib["class"] for bar in bars] == stages
    for plan in outlook.plans:
        assert any(text.startswith(f"{plan.kind}: ") for text in texts)
        assert {load.label for load in plan.loads} <= set(texts)
    for bar in bars:
        assert 0 <= float(bar.attrib["x"]) + float(bar.attrib["width"]) <= WIDTH
        assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height
    # All panels have one scale: bars are as long as their bytes.
    amounts = [amount for plan in outlook.plans for load in plan.loads for amount in load.bytes_by_stage.values()]
    per_byte = [float(bar.attrib["width"]) / amount for bar, amount in zip(bars, amounts, strict=True)]
    assert max(per_byte) == pytest.approx(min(per_byte), rel=0.05)
    assert "prefers-color-scheme: dark" in (root.findtext(f"{SVG}style") or "")


def test_a_name_cannot_break_the_picture(outlook: Outlook) -> None:
    named = msgspec.structs.replace(outlook, question=question(model="<a>&\"b'/config.json"))
    title = ET.fromstring(picture(named)).findtext(f"{SVG}title")
    assert title is not None
    assert title.startswith("<a>&\"b'/config.json: ")


def test_a_crowd_of_unequal_links_is_cut_and_counted(outlook: Outlook) -> None:
    plan = outlook.plans[0]
    many = [msgspec.structs.replace(plan.loads[0], nodes=[f"node{i}"]) for i in range(13)]
    crowded = msgspec.structs.replace(outlook, plans=[msgspec.structs.replace(plan, loads=many)])
    texts = [text.text or "" for text in ET.fromstring(picture(crowded)).iter(f"{SVG}text")]
    assert "into node9 (rollout)" in texts
    assert "into node10 (rollout)" not in texts
    assert any(text.endswith("3 less busy not drawn") for text in texts)
