"""Reads a checkpoint's coordinates from safetensors headers: names, shapes and dtypes, never values."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.transport.errors import LayoutError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100 * 1024 * 1024
"""The format's own limit."""

_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
}


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_spec(directory: Path) -> CheckpointSpec:
    """All tensors of a Hugging Face directory, in file order.

    Args:
        directory: holds ``model.safetensors``, or shards and ``model.safetensors.index.json``.

    Raises:
        LayoutError: there is no checkpoint, a file is missing or damaged, or index and shards disagree.
    """
    directory = Path(directory)
    if (directory / _SINGLE).is_file():
        return CheckpointSpec(_read_header(directory / _SINGLE))
    if not (directory / _INDEX).is_file():
        raise LayoutError(f"{directory}: neither {_SINGLE} nor {_INDEX} is there; save the model as safetensors")
    indexed = _read_index(directory / _INDEX)
    tensors: dict[str, TensorSpec] = {}
    for shard in sorted(set(indexed.values())):
        found = _read_header(directory / shard)
        twice = sorted(set(found) & set(tensors))
        if twice:
            raise LayoutError(f"{directory / shard}: tensors are in another shard too: {', '.join(twice[:20])}")
        tensors |= found
    differing = sorted(set(tensors) ^ set(indexed))
    if differing:
        raise LayoutError(f"{directory}: index and shards disagree on: {', '.join(differing[:20])}; save it again")
    return CheckpointSpec(tensors)


def spec_hash(spec: CheckpointSpec) -> str:
    """Equal for checkpoints with equal names, shapes and dtypes, whatever files they are in."""
    content = msgspec.json.encode(dict(sorted(spec.tensors.items())))
    return xxhash.xxh3_128_hexdigest(content)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return msgspec.convert(index.get("weight_map"), dict[str, str])
    except msgspec.MsgspecError as error:
        raise LayoutError(f"{path}: not a safetensors index: {error}") from error


def _read_header(path: Path) -> dict[str, TensorSpec]:
    if not path.is_file():
        raise LayoutError(f"{path}: the checkpoint's index names this file, but it is missing")
    text, file_bytes = _header_text(path)
    try:
        header = msgspec.json.decode(text, type=dict[str, Any])
        header.pop("__metadata__", None)
        entries = msgspec.convert(header, dict[str, _Entry])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LayoutError(f"{path}: damaged safetensors header: {error}") from error
    unknown = sorted({entry.dtype for entry in entries.values()} - set(_DTYPES))
    if unknown:
        raise LayoutError(f"{path}: unknown dtypes {', '.join(unknown)}; known: {', '.join(_DTYPES)}")
    data_bytes = max((entry.data_offsets[1] for entry in entries.values()), default=0)
    if 8 + len(text) + data_bytes != file_bytes:
        raise LayoutError(f"{path}: truncated or overlong: its header promises {data_bytes} bytes of data")
    in_order = sorted(entries.items(), key=lambda item: item[1].data_offsets)
    return {name: TensorSpec(entry.shape, _DTYPES[entry.dtype]) for name, entry in in_order}


def _header_text(path: Path) -> tuple[bytes, int]:
    """The header's JSON, and the size of the whole file in bytes."""
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, file_bytes - 8):
            raise LayoutError(f"{path}: damaged: {file_bytes} bytes cannot begin with a header of {header_bytes}")
        return file.read(header_bytes), file_bytes
