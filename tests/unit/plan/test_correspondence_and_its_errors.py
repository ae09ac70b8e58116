"""Atoms lie inside everybody's boxes, and what nobody can serve is named at connect."""

from __future__ import annotations

import pytest

from rlbridge.sync.correspondence import correspond, export_dtypes
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError, PlanError

SPEC = CheckpointSpec({"w": TensorSpec((8, 6), "float32"), "b": TensorSpec((8,), "float32")})


def rows(start: int, count: int, runtime: str = "p.w") -> Box:
    return Box(runtime, "w", (start, 0), (count, 6), (1, 1), 0, (6, 1))


def columns(start: int, count: int) -> Box:
    return Box("p.w", "w", (0, start), (8, count), (1, 1), 0, (count, 1))


def layout(*boxes: Box, **extra: TensorSpec) -> SourceMap:
    runtime = {box.runtime: TensorSpec(box.count, "float32") for box in boxes}
    return SourceMap(runtime | extra, list(boxes))


BIAS = Box("p.b", "b", (0,), (8,), (1,), 0, (1,))


def test_row_shards_against_column_shards():
    senders = {f"t{r}": layout(rows(r * 4, 4)) for r in range(2)}
    receivers = {f"r{r}": layout(columns(r * 3, 3)) for r in range(2)}
    atoms = list(correspond(SPEC, senders, receivers).atoms())
    assert [(a.area.start, a.area.count, a.holders, a.needers) for a in atoms] == [
        ((0, 0), (4, 3), ("t0",), ("r0",)),
        ((0, 3), (4, 3), ("t0",), ("r1",)),
        ((4, 0), (4, 3), ("t1",), ("r0",)),
        ((4, 3), (4, 3), ("t1",), ("r1",)),
    ]


def test_replicas_do_not_add_atoms():
    receivers = {f"r{i}": layout(rows(0, 8)) for i in range(9)}
    (atom,) = correspond(SPEC, {f"t{i}": layout(rows(0, 8)) for i in range(3)}, receivers).atoms()
    assert (len(atom.holders), len(atom.needers), atom.size_bytes) == (3, 9, 8 * 6 * 4)


def test_what_nobody_needs_is_no_atom():
    atoms = list(correspond(SPEC, {"t": layout(rows(0, 8), BIAS)}, {"r": layout(BIAS)}).atoms())
    assert [a.tensor for a in atoms] == ["b"]


def test_missing_holders_are_listed():
    senders = {"t0": layout(rows(0, 4)), "t1": layout(rows(5, 3))}
    receivers = {"r0": layout(rows(0, 8), BIAS), "r1": layout(rows(4, 4))}
    with pytest.raises(LayoutError, match="no sender holds") as caught:
        correspond(SPEC, senders, receivers)
    assert "b: 8 elements needed by r0 (in p.b)" in str(caught.value)
    assert "w: 6 elements needed by r0, r1 (in p.w)" in str(caught.value)


def test_floating_tensors_that_nothing_fills_are_listed():
    receiver = layout(
        rows(0, 8),
        value_head=TensorSpec((4,), "float32"),
        table=TensorSpec((4,), "int64"),
        nothing=TensorSpec((0, 4), "float32"),
    )
    with pytest.raises(LayoutError, match=r"stale:\n  r: value_head \[4\] float32\n") as caught:
        correspond(SPEC, {"t": layout(rows(0, 8))}, {"r": receiver})
    assert "table" not in str(caught.value)
    assert "nothing" not in str(caught.value)
    correspond(SPEC, {"t": receiver}, {"r": layout(rows(0, 8))})  # a sender may have more than the checkpoint


def test_long_lists_are_cut():
    extra = {f"x{i:03}": TensorSpec((4,), "float32") for i in range(50)}
    with pytest.raises(LayoutError, match=r"x019.*\n  ... and 30 more"):
        correspond(SPEC, {"t": layout(rows(0, 8))}, {"r": layout(rows(0, 8), **extra)})


def test_a_tied_sender_serves_both_names():
    spec = CheckpointSpec({"embed": TensorSpec((4, 2), "float32"), "head": TensorSpec((4, 2), "float32")})

    def whole(runtime: str, tensor: str) -> Box:
        return Box(runtime, tensor, (0, 0), (4, 2), (1, 1), 0, (2, 1))

    sender = SourceMap({"e": TensorSpec((4, 2), "float32")}, [whole("e", "head")], [whole("e", "embed")])
    atoms = correspond(spec, {"t": sender}, {"r": layout(whole("a", "embed"), whole("b", "head"))}).atoms()
    assert [(a.tensor, a.holders) for a in atoms] == [("embed", ("t",)), ("head", ("t",))]


def test_a_worker_on_both_sides_is_refused():
    with pytest.raises(PlanError, match="both sender and receiver: x"):
        correspond(SPEC, {"x": layout(BIAS)}, {"x": layout(BIAS)})


def test_layouts_of_another_checkpoint_are_refused():
    with pytest.raises(LayoutError, match="r: b"):
        correspond(CheckpointSpec({"w": SPEC.tensors["w"]}), {"t": layout(rows(0, 8))}, {"r": layout(BIAS)})


def test_export_dtypes():
    spec = CheckpointSpec({"w": TensorSpec((2,), "float32"), "n": TensorSpec((2,), "int64")})
    assert export_dtypes(spec, None) == {"w": "float32", "n": "int64"}
    assert export_dtypes(spec, "bfloat16") == {"w": "bfloat16", "n": "int64"}
    with pytest.raises(LayoutError, match="int8"):
        export_dtypes(spec, "int8")
    (atom,) = correspond(SPEC, {"t": layout(BIAS)}, {"r": layout(BIAS)}, {"b": "bfloat16"}).atoms()
    assert (atom.dtype, atom.size_bytes) == ("bfloat16", 16)
