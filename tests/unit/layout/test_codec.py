"""A layout survives being bytes, is small as bytes, and has the same hash wherever it is taken."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlbridge.catalog.layouts import rollout_layouts, trainer_layouts
from rlbridge.catalog.models import shape_of
from rlbridge.sync.layout.codec import decode, encode, map_hash
from rlbridge.sync.layout.source_map import Box, Opaque, SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.transport.errors import LayoutError

NAMES = st.sampled_from(["a", "b.weight", "model.layers.0.é", ""]) | st.text(max_size=8)
SIZES = st.integers(0, 2**62)


@st.composite
def boxes(draw):
    n = draw(st.integers(0, 4))
    numbers = st.lists(SIZES, min_size=n, max_size=n).map(tuple)
    return Box(draw(NAMES), draw(NAMES), draw(numbers), draw(numbers), draw(numbers), draw(SIZES), draw(numbers))


TENSORS = st.builds(TensorSpec, st.lists(SIZES, max_size=4).map(tuple), st.sampled_from(["bfloat16", "float32"]))
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
OPAQUE = st.builds(Opaque, NAMES, SIZES, SHAPES, SHAPES, st.lists(NAMES, max_size=3).map(tuple), NAMES)
LAYOUTS = st.builds(
    SourceMap,
    st.dictionaries(NAMES, TENSORS, max_size=5),
    st.lists(boxes(), max_size=8),
    st.lists(boxes(), max_size=3),
    st.lists(OPAQUE, max_size=3),
    st.dictionaries(NAMES, NAMES, max_size=3),
)


@given(LAYOUTS)
def test_decoding_gives_back_what_was_encoded(layout):
    again = decode(encode(layout))
    assert again == layout
    assert list(again.runtime) == list(layout.runtime)
    assert encode(again) == encode(layout)


@given(LAYOUTS, st.randoms(use_true_random=False))
def test_the_hash_knows_no_order(layout, rng: random.Random):
    def shuffled(items):
        return rng.sample(list(items), len(items))

    other = SourceMap(
        dict(shuffled(layout.runtime.items())),
        shuffled(layout.boxes),
        shuffled(layout.aliases),
        [msgspec.structs.replace(part, reason="other words") for part in shuffled(layout.opaque)],
        {"another": "reason"},
    )
    assert map_hash(other) == map_hash(layout)


@given(LAYOUTS, boxes())
def test_the_hash_knows_every_element(layout, box):
    moved = msgspec.structs.replace(box, offset=box.offset + 1)
    hashes = {
        map_hash(msgspec.structs.replace(layout, boxes=[*layout.boxes, box])),
        map_hash(msgspec.structs.replace(layout, boxes=[*layout.boxes, moved])),
        map_hash(msgspec.structs.replace(layout, aliases=[*layout.aliases, box])),
        map_hash(msgspec.structs.replace(layout, runtime=layout.runtime | {"new": TensorSpec((1,), "int8")})),
        map_hash(msgspec.structs.replace(layout, opaque=[*layout.opaque, Opaque("r", 0, (1,), (0,), ("t",), "x")])),
        map_hash(layout),
    }
    assert len(hashes) == 6


PROGRAM = """
from rlbridge.catalog.layouts import rollout_layouts
from rlbridge.catalog.models import shape_of
from rlbridge.sync.layout.codec import encode, map_hash
import xxhash
layout = rollout_layouts(shape_of("qwen3-0.6b"), "tp2", 8)[1].layout
print(map_hash(layout), xxhash.xxh3_128_hexdigest(encode(layout)))
"""


def test_other_processes_have_the_same_hash():
    def run(seed: str) -> str:
        environment = {"PYTHONHASHSEED": seed}
        return subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert run("1") == run("2") != ""


@pytest.mark.parametrize("parallel", ["tp16", "tp8.ep64", "tp1"])
def test_a_rank_of_a_trillion_parameters_is_small(parallel):
    layout = rollout_layouts(shape_of("kimi-k2"), parallel, 8)[0].layout
    data = encode(layout)
    assert len(data) < 8e6
    assert decode(data) == layout


def test_equal_ranks_have_equal_hashes_and_others_do_not():
    placed = trainer_layouts(shape_of("qwen3-0.6b"), "hsdp2x2.tp2", 8)
    hashes = [map_hash(p.layout) for p in placed]
    assert hashes[:4] == hashes[4:]
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("data", [b"", b"\x00", b"no layout", msgspec.msgpack.encode(["x"] * 8)])
def test_what_is_no_layout_is_refused(data):
    with pytest.raises(LayoutError, match="not an encoded layout"):
        decode(data)


def test_another_format_is_named():
    fields = msgspec.msgpack.decode(encode(SourceMap({}, [])))
    with pytest.raises(LayoutError, match=r"format 'rlbridge.layout.9'"):
        decode(msgspec.msgpack.encode(["rlbridge.layout.9", *fields[1:]]))


def test_damage_inside_is_refused():
    layout = SourceMap({"r": TensorSpec((4,), "int8")}, [Box("r", "t", (0,), (4,), (1,), 0, (1,))])
    fields = msgspec.msgpack.decode(encode(layout))
    for column, wrong in [(0, [9]), (1, [-1]), (2, [5]), (4, []), (4, [0, 0]), (3, [0, 0])]:
        columns = [wrong if i == column else old for i, old in enumerate(fields[4])]
        with pytest.raises(LayoutError, match="damaged layout"):
            decode(msgspec.msgpack.encode([*fields[:4], columns, *fields[5:]]))
    forms = [[[4, 4], [1], [1]]]
    with pytest.raises(LayoutError, match="damaged layout"):
        decode(msgspec.msgpack.encode([*fields[:2], forms, *fields[3:]]))
