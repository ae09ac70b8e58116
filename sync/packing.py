"""Strided copies between runtime tensors and bucket payloads, and the header that goes before a payload.

Everything that depends only on the plan is worked out once by :func:`prepare`; per update there is one ``copy_`` (which
also casts to and from the wire dtype) for each run of elements that lie regularly in memory.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import xxhash

from rlbridge.sync.layout.dtypes import item_bytes, torch_dtype
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Piece
from rlbridge.transport.errors import DigestMismatchError, PlanError, ProtocolError

_HEADER = struct.Struct("<8sqqqq16s8x")
"""Magic, epoch, version, bucket, payload bytes, digest; padded to ``HEADER_BYTES``."""
_MAGIC = b"RLBRIDG1"

_PART_BYTES = 512 * 1024
"""What is packed before it is digested: stays in a core's own cache in between."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """One copy: ``live`` elements beside payload bytes ``at_bytes .. end_bytes``.

    ``live`` is a view that writes through. Where a non-contiguous tensor has no such view, ``index`` picks the
    elements of ``live`` (the whole tensor) instead.
    """

    live: torch.Tensor
    index: tuple[torch.Tensor, ...] | None
    at_bytes: int
    end_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def wire(self, payload: torch.Tensor) -> torch.Tensor:
        return payload[self.at_bytes : self.end_bytes].view(self.dtype).view(self.shape)

    def pack(self, payload: torch.Tensor) -> None:
        self.wire(payload).copy_(self.live if self.index is None else self.live[self.index])

    def pack_in_parts(self, payload: torch.Tensor) -> Iterator[tuple[int, int]]:
        """Pack some outer indices at a time; after each part, from which payload byte to which it reaches."""
        outer = self.shape[0]
        index_bytes = (self.end_bytes - self.at_bytes) // outer
        step = max(1, _PART_BYTES // index_bytes)
        if self.index is not None or step >= outer:
            self.pack(payload)
            yield self.at_bytes, self.end_bytes
            return
        wire = self.wire(payload)
        for begin in range(0, outer, step):
            end = min(begin + step, outer)
            wire[begin:end].copy_(self.live[begin:end])
            yield self.at_bytes + begin * index_bytes, self.at_bytes + end * index_bytes

    def unpack(self, payload: torch.Tensor) -> None:
        if self.index is None:
            # Outermost the dimension that strides widest at run time: torch is several times faster that way round.
            strides = self.live.stride()
            order = sorted(range(len(strides)), key=lambda d: -strides[d])
            self.live.permute(order).copy_(self.wire(payload).permute(order))
        else:
            self.live[self.index] = self.wire(payload).to(self.live.dtype)


@dataclass(frozen=True, slots=True)
class PreparedBucket:
    """One bucket bound to the live tensors of one worker: what runs at every update.

    It holds views: it stays valid as long as the tensors keep their storage.
    """

    payload_bytes: int
    copies: tuple[_Copy, ...]

    def pack(self, payload: torch.Tensor) -> None:
        """Copy the live elements into ``payload`` (``uint8 [payload_bytes]``), cast to the wire dtype."""
        self._check(payload)
        with torch.no_grad():
            for copy in self.copies:
                copy.pack(payload)

    def pack_and_digest(self, payload: torch.Tensor) -> bytes:
        """``pack``; returns the payload's digest, taken part by part while each is in the processor's cache."""
        self._check(payload)
        digest = xxhash.xxh3_128()
        data = payload.numpy().data
        at_bytes = 0
        with torch.no_grad():
            for copy in self.copies:
                for begin_bytes, end_bytes in copy.pack_in_parts(payload):
                    if begin_bytes != at_bytes:
                        raise PlanError(f"a source packs its whole payload in order, not byte {begin_bytes} next")
                    digest.update(data[begin_bytes:end_bytes])
                    at_bytes = end_bytes
        if at_bytes != self.payload_bytes:
            raise PlanError(f"a source packs its whole payload, not {at_bytes} of {self.payload_bytes} bytes")
        return digest.digest()

    def unpack(self, payload: torch.Tensor) -> None:
        """Copy ``payload`` (``uint8 [payload_bytes]``) into the live elements, cast to their dtype."""
        self._check(payload)
        with torch.no_grad():
            for copy in self.copies:
                copy.unpack(payload)

    def _check(self, payload: torch.Tensor) -> None:
        if payload.dtype is not torch.uint8 or payload.shape != (self.payload_bytes,) or not payload.is_contiguous():
            raise PlanError(
                f"payload must be contiguous uint8 [{self.payload_bytes}], "
                f"not {payload.dtype} {list(payload.shape)} with strides {list(payload.stride())}"
            )


def prepare(bucket: BucketProgram, tensors: Mapping[str, torch.Tensor]) -> PreparedBucket:
    """Bind the pieces of ``bucket`` to ``tensors`` (runtime name to live tensor).

    Raises:
        PlanError: a runtime tensor is missing, or a piece reaches outside it or outside the payload.
    """
    copies = tuple(_bind(piece, tensors, bucket) for piece in _merged(bucket.pieces))
    return PreparedBucket(bucket.payload_bytes, copies)


def pack(bucket: BucketProgram, tensors: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
    """Fill ``out`` (``uint8 [payload_bytes]``) from ``tensors``; use :func:`prepare` where it happens repeatedly."""
    prepare(bucket, tensors).pack(out)


def unpack(bucket: BucketProgram, payload: torch.Tensor, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy ``payload`` (``uint8 [payload_bytes]``) into ``tensors``."""
    prepare(bucket, tensors).unpack(payload)


def _simplified(piece: Piece) -> Piece:
    """The same elements in the same order with as few dimensions as possible."""
    count: list[int] = []
    strides: list[int] = []
    for n, stride in zip(piece.count, piece.strides, strict=True):
        if n == 1:
            continue
        if count and strides[-1] == stride * n:
            count[-1] *= n
            strides[-1] = stride
        else:
            count.append(n)
            strides.append(stride)
    if not count:
        count, strides = [1], [1]
    return Piece(piece.runtime, piece.offset, tuple(count), tuple(strides), piece.dtype, piece.at_bytes)


def _merged(pieces: tuple[Piece, ...]) -> list[Piece]:
    """Simplify, then join neighbours that are contiguous both in their runtime tensor and in the payload."""
    out: list[Piece] = []
    for piece in map(_simplified, pieces):
        last = out[-1] if out else None
        if last is not None and _follows(last, piece):
            joined = (last.count[0] + piece.count[0],)
            out[-1] = Piece(last.runtime, last.offset, joined, (1,), last.dtype, last.at_bytes)
        else:
            out.append(piece)
    return out


def _follows(last: Piece, piece: Piece) -> bool:
    return (
        (last.runtime, last.dtype) == (piece.runtime, piece.dtype)
        and last.strides == piece.strides == (1,)
        and last.offset + last.count[0] == piece.offset
        and last.at_bytes + last.count[0] * item_bytes(last.dtype) == piece.at_bytes
    )


def _bind(piece: Piece, tensors: Mapping[str, torch.Tensor], bucket: BucketProgram) -> _Copy:
    tensor = tensors.get(piece.runtime)
    if tensor is None:
        raise PlanError(
            f"bucket {bucket.bucket} needs runtime tensor {piece.runtime!r}, which is not among the live ones"
        )
    tensor = tensor.detach()
    last = piece.offset + sum((n - 1) * s for n, s in zip(piece.count, piece.strides, strict=True))
    if piece.offset < 0 or last >= tensor.numel():
        raise PlanError(
            f"bucket {bucket.bucket} reaches element {last} of {piece.runtime!r}, which has {tensor.numel()}: "
            "the tensor changed its shape since its layout was discovered; connect again"
        )
    end = piece.at_bytes + math.prod(piece.count) * item_bytes(piece.dtype)
    if end > bucket.payload_bytes:
        raise PlanError(f"bucket {bucket.bucket}: {piece.runtime!r} ends at byte {end} of {bucket.payload_bytes}")
    if tensor.is_contiguous():
        # as_strided counts from the start of the storage, and the tensor may begin within it.
        live = tensor.as_strided(piece.count, piece.strides, tensor.storage_offset() + piece.offset)
        index = None
    else:
        live, index = tensor, _logical_index(piece, tensor)
    return _Copy(live, index, piece.at_bytes, end, torch_dtype(piece.dtype), piece.count)


def _logical_index(piece: Piece, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Index arrays (each of shape ``piece.count``) that pick the piece by row-major logical index."""
    flat = torch.tensor(piece.offset, device=tensor.device)
    for n, stride in zip(piece.count, piece.strides, strict=True):
        flat = flat.unsqueeze(-1) + torch.arange(n, device=tensor.device) * stride
    return torch.unravel_index(flat, tensor.shape)


def payload_digest(payload: torch.Tensor) -> bytes:
    """xxh3-128 of ``payload`` (contiguous ``uint8`` in host memory), read in place."""
    return xxhash.xxh3_128_digest(payload.detach().numpy().data)


def write_header(
    buffer: torch.Tensor, epoch: int, version: int, bucket: int, payload: torch.Tensor, digest: bytes | None = None
) -> None:
    """Write the ``HEADER_BYTES`` that describe ``payload`` to the start of ``buffer`` (``uint8``).

    ``payload`` is usually ``buffer[HEADER_BYTES:]``; without ``digest`` it is taken here.
    """
    digest = digest if digest is not None else payload_digest(payload)
    header = _HEADER.pack(_MAGIC, epoch, version, bucket, payload.numel(), digest)
    buffer[:HEADER_BYTES].numpy()[:] = memoryview(header)


def check_header(buffer: torch.Tensor, epoch: int, version: int, bucket: int) -> None:
    """Check a received bucket (``uint8 [HEADER_BYTES + payload]``): what it says it is, and its digest.

    Raises:
        ProtocolError: no header, or that of another bucket, version, epoch or size.
        DigestMismatchError: the payload has other bytes than its source packed.
    """
    if buffer.numel() < HEADER_BYTES:
        raise ProtocolError(f"bucket {bucket}: {buffer.numel()} bytes are too few for a header of {HEADER_BYTES}")
    magic, *found, digest = _HEADER.unpack(buffer[:HEADER_BYTES].numpy().tobytes())
    if magic != _MAGIC:
        raise ProtocolError(f"bucket {bucket}: the message does not begin with a bucket header")
    payload = buffer[HEADER_BYTES:]
    expected = [epoch, version, bucket, payload.numel()]
    if found != expected:
        names = ("epoch", "version", "bucket", "payload bytes")
        wrong = [f"{n} {f} instead of {e}" for n, f, e in zip(names, found, expected, strict=True) if f != e]
        raise ProtocolError(f"bucket {bucket}: " + ", ".join(wrong))
    if payload_digest(payload) != digest:
        raise DigestMismatchError(
            f"bucket {bucket} of version {version}: the payload's digest differs from its source's"
        )
