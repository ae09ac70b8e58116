"""Reading names, shapes and dtypes from safetensors files, and telling damaged ones."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from rlbridge.sync.layout.checkpoint import read_spec, spec_hash
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError

WEIGHTS = {
    "a": torch.zeros(3, 5, dtype=torch.bfloat16),
    "b": torch.zeros((), dtype=torch.float32),
    "c": torch.zeros(0, 2, dtype=torch.float16),
    "d": torch.zeros(4, dtype=torch.float8_e4m3fn),
    "e": torch.zeros(2, dtype=torch.int64),
}


def write_shards(directory) -> None:
    names = list(WEIGHTS)
    files = {"model-1.safetensors": names[:2], "model-2.safetensors": names[2:]}
    for file, its in files.items():
        save_file({n: WEIGHTS[n] for n in its}, directory / file)
    index = {"metadata": {}, "weight_map": {n: file for file, its in files.items() for n in its}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_one_file_and_shards_say_the_same(tmp_path):
    one, many = tmp_path / "one", tmp_path / "many"
    one.mkdir()
    many.mkdir()
    save_file(WEIGHTS, one / "model.safetensors", metadata={"format": "pt"})
    write_shards(many)
    expected = {n: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in WEIGHTS.items()}
    assert read_spec(one).tensors == expected
    assert read_spec(many).tensors == expected
    assert spec_hash(read_spec(one)) == spec_hash(read_spec(many))


def test_the_hash_depends_on_shape_and_dtype():
    hashes = {
        spec_hash(CheckpointSpec({"a": TensorSpec(shape, dtype)}))
        for shape in [(2, 3), (3, 2)]
        for dtype in ["float32", "bfloat16"]
    }
    assert len(hashes) == 4


def test_no_checkpoint(tmp_path):
    with pytest.raises(LayoutError, match="save the model as safetensors"):
        read_spec(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    write_shards(tmp_path)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(LayoutError, match=r"model-2.safetensors.*missing"):
        read_spec(tmp_path)


def test_index_and_shards_that_disagree(tmp_path):
    write_shards(tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    del index["weight_map"]["e"]
    path.write_text(json.dumps(index))
    with pytest.raises(LayoutError, match="disagree on: e"):
        read_spec(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', "{", "{}"])
def test_a_damaged_index(tmp_path, text):
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(LayoutError, match="index"):
        read_spec(tmp_path)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"abc",
        struct.pack("<Q", 10**12) + b"{}",
        header(b"{nonsense}"),
        header(b"[]"),
        header(b"\xff\xfe"),
        header(b'{"a": 3}'),
        header(b'{"a": {"dtype": "F32", "shape": [1]}}'),
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": "no"}}'),
        header(b'{"a": {"dtype": "Q7", "shape": [1], "data_offsets": [0, 4]}}') + b"0000",
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"00",
        header(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}') + b"000000",
    ],
)
def test_a_damaged_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LayoutError, match=r"model\.safetensors"):
        read_spec(tmp_path)
