"""What one worker does for one update: its buckets, in the one global order that every worker keeps.

A bucket's payload is the concatenation of its atoms, each atom row-major over its checkpoint box, in the wire dtype.
On the wire a bucket is a fixed header (``HEADER_BYTES``) and the payload; it is never split again on any hop.
"""

from __future__ import annotations

import msgspec

HEADER_BYTES = 64
"""Bytes before the payload: magic, epoch, version, bucket, payload size, xxh3-128 digest; keeps the payload aligned."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A strided view of a runtime tensor and its contiguous place in a bucket's payload.

    Attributes:
        runtime: name of the runtime tensor on this worker.
        offset, count, strides: the view, in elements of the row-major runtime tensor.
        dtype: wire dtype (torch's name); packing casts to it, unpacking casts from it.
        at_bytes: first payload byte; the view's elements follow row-major over ``count``.
    """

    runtime: str
    offset: int
    count: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    at_bytes: int


class BucketProgram(msgspec.Struct, frozen=True):
    """One bucket as one worker sees it.

    The worker that packs it has ``recv_from=None``; every other one receives it, checks its digest, forwards the same
    bytes to ``send_to`` and unpacks its ``pieces``.
    """

    bucket: int
    payload_bytes: int
    recv_from: str | None
    send_to: tuple[str, ...]
    pieces: tuple[Piece, ...]


class Program(msgspec.Struct, frozen=True):
    """All buckets of one worker, sorted by bucket number.

    Attributes:
        worker: name of the worker that runs it.
        plan_hash: equal on all workers of one plan.
        workers: all workers of the plan, sorted; the index of a name is its number in message tags.
        buckets: this worker's part.
    """

    worker: str
    plan_hash: str
    workers: tuple[str, ...]
    buckets: tuple[BucketProgram, ...]
