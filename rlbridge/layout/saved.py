"""Layouts in files, so that two of them can be compared that no single machine can make."""

from __future__ import annotations

from pathlib import Path

import msgspec

from rlbridge.sync.layout.codec import decode, encode
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.errors import ConfigError, LayoutError

_KIND = "rlbridge layout"


class KnownLayout(msgspec.Struct, frozen=True):
    """A layout and what is needed to explain it.

    Attributes:
        title: what it is of.
        checkpoint: names, shapes and dtypes that the layout's boxes are about.
        layout: the map itself.
    """

    title: str
    checkpoint: CheckpointSpec
    layout: SourceMap


class _Packed(msgspec.Struct, tag=_KIND, tag_field="kind"):
    title: str
    checkpoint: CheckpointSpec
    layout: bytes


class _Readable(msgspec.Struct, tag=_KIND, tag_field="kind"):
    title: str
    checkpoint: CheckpointSpec
    layout: SourceMap


def save(known: KnownLayout, path: Path) -> None:
    """Write ``known``: as JSON if the file's name ends so, else as compact bytes.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path.suffix == ".json":
        data = msgspec.json.encode(_Readable(known.title, known.checkpoint, known.layout))
    else:
        data = msgspec.msgpack.encode(_Packed(known.title, known.checkpoint, encode(known.layout)))
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> KnownLayout:
    """Read what ``save`` wrote, of either kind.

    Raises:
        ConfigError: the file cannot be read, or is no saved layout.
        LayoutError: it is damaged.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if data[:1] == b"{":
            readable = msgspec.json.decode(data, type=_Readable)
            known = KnownLayout(readable.title, readable.checkpoint, readable.layout)
        else:
            packed = msgspec.msgpack.decode(data, type=_Packed)
            known = KnownLayout(packed.title, packed.checkpoint, decode(packed.layout))
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: no layout that --save wrote: {error}") from None
    return _checked(known, path)


def _checked(known: KnownLayout, path: Path) -> KnownLayout:
    for box in [*known.layout.boxes, *known.layout.aliases]:
        tensor = known.checkpoint.tensors.get(box.tensor)
        if tensor is None or len(tensor.shape) != len(box.start) or box.runtime not in known.layout.runtime:
            raise LayoutError(f"{path}: damaged: its checkpoint and its layout disagree on {box.tensor!r}")
    return known
