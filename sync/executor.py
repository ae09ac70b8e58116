"""Runs one worker's ``Program`` over a ``Transport``: pack or receive, check, forward, unpack; bucket by bucket.

Every worker takes its buckets in the one global order and buys their buffers from a byte budget in that order. So the
lowest bucket that is not complete everywhere always has its buffer on every worker, and the whole never stands still.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import torch

from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.messages import TransferStats
from rlbridge.sync.packing import PreparedBucket, check_header, write_header
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Program
from rlbridge.transport.errors import TransportError, leaves
from rlbridge.transport.protocol import Transport

_EPOCH_BITS, _VERSION_BITS, _SOURCE_BITS, _BUCKET_BITS = 10, 10, 16, 28


class LinkError(TransportError):
    """The link to ``peer`` failed; what the transport said is the cause."""

    def __init__(self, peer: str, cause: TransportError) -> None:
        super().__init__(f"link to {peer}: {cause}")
        self.peer = peer


def message_tag(epoch: int, version: int, source: int, bucket: int) -> int:
    """The 64-bit tag of a bucket on one hop from worker number ``source``.

    Epoch and version count modulo 1024: enough to tell what is in flight apart; the header has them in full.
    """
    tag = epoch % (1 << _EPOCH_BITS)
    tag = tag << _VERSION_BITS | version % (1 << _VERSION_BITS)
    tag = tag << _SOURCE_BITS | source
    return tag << _BUCKET_BITS | bucket


class BufferPool:
    """Bucket buffers under a byte budget, reused. ``take`` serves in the order of the calls.

    A buffer larger than the whole budget is granted when no other is in use.

    Args:
        budget_bytes: most bytes allocated at a time, in use and idle together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._idle: list[torch.Tensor] = []
        self._returned = anyio.Event()

    async def take(self, size_bytes: int) -> torch.Tensor:
        """A buffer (``uint8 [size_bytes]``, contents undefined), once the budget allows it."""
        while self.used_bytes and self.used_bytes + size_bytes > self.budget_bytes:
            await self._returned.wait()
        self.used_bytes += size_bytes
        for index, buffer in enumerate(self._idle):
            if buffer.numel() == size_bytes:
                return self._idle.pop(index)
        while self._idle and self.used_bytes + self._idle_bytes() > self.budget_bytes:
            self._idle.pop(0)
        self.peak_bytes = max(self.peak_bytes, self.used_bytes + self._idle_bytes())
        return torch.empty(size_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Take ``buffer`` back; nobody may hold it any more."""
        self.used_bytes -= buffer.numel()
        self._idle.append(buffer)
        self._returned.set()
        self._returned = anyio.Event()

    def _idle_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._idle)


@dataclass(slots=True)
class Staging:
    """Whole payloads of one version, kept until they are applied; the buffers serve every version of an epoch."""

    buffers: dict[int, torch.Tensor] = field(default_factory=dict)

    def buffer(self, bucket: int, size_bytes: int) -> torch.Tensor:
        """The buffer of ``bucket`` (``uint8 [size_bytes]``: header and payload)."""
        buffer = self.buffers.get(bucket)
        if buffer is None or buffer.numel() != size_bytes:
            buffer = self.buffers[bucket] = torch.empty(size_bytes, dtype=torch.uint8)
        return buffer


@dataclass(slots=True, kw_only=True)
class Execution:
    """One run of a program.

    Attributes:
        prepared: the program's buckets bound to tensors, by bucket; for ``SEND`` and ``UNPACK``.
        pool: where buckets get their buffers from, unless they are kept.
        staging: where ``KEEP`` leaves what it received.
    """

    program: Program
    transport: Transport
    epoch: int
    version: int
    treatment: Treatment
    prepared: Mapping[int, PreparedBucket]
    pool: BufferPool
    staging: Staging
    packed_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    digests_checked: int = 0
    _numbers: dict[str, int] = field(init=False, default_factory=dict)

    async def run(self) -> TransferStats:
        """Run it to its end. When it ends, also by cancellation, no buffer is in use by the transport any more.

        Raises:
            LinkError: a link broke.
            DigestMismatchError, ProtocolError: a bucket is not what its source packed.
        """
        start_s = time.monotonic()
        self._numbers = {worker: number for number, worker in enumerate(self.program.workers)}
        try:
            async with anyio.create_task_group() as tasks:
                for bucket in self.program.buckets:
                    buffer = await self._buffer(bucket)
                    tasks.start_soon(self._run_bucket, bucket, buffer)
        except ExceptionGroup as group:
            raise _first_cause(group) from group
        return TransferStats(
            seconds=time.monotonic() - start_s,
            packed_bytes=self.packed_bytes,
            sent_bytes=self.sent_bytes,
            received_bytes=self.received_bytes,
            digests_checked=self.digests_checked,
        )

    def _keeps(self, bucket: BucketProgram) -> bool:
        return self.treatment is Treatment.KEEP and bool(bucket.pieces)

    async def _buffer(self, bucket: BucketProgram) -> torch.Tensor:
        size_bytes = HEADER_BYTES + bucket.payload_bytes
        if self._keeps(bucket):
            return self.staging.buffer(bucket.bucket, size_bytes)
        return await self.pool.take(size_bytes)

    async def _run_bucket(self, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        try:
            if bucket.recv_from is None:
                await self._pack(bucket, buffer)
            else:
                await self._receive(bucket, bucket.recv_from, buffer)
            async with anyio.create_task_group() as sends:
                for peer in bucket.send_to:
                    sends.start_soon(self._send, peer, bucket, buffer)
                await anyio.lowlevel.checkpoint()  # forward first, unpack meanwhile
                if self.treatment is Treatment.UNPACK and bucket.recv_from is not None and bucket.pieces:
                    self.prepared[bucket.bucket].unpack(buffer[HEADER_BYTES:])
        finally:
            if not self._keeps(bucket):
                self.pool.give(buffer)

    async def _pack(self, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        await anyio.lowlevel.checkpoint()  # packing holds the loop for milliseconds: let others in between
        payload = buffer[HEADER_BYTES:]
        self.prepared[bucket.bucket].pack(payload)
        write_header(buffer, self.epoch, self.version, bucket.bucket, payload)
        self.packed_bytes += bucket.payload_bytes

    async def _receive(self, bucket: BucketProgram, peer: str, buffer: torch.Tensor) -> None:
        try:
            await self.transport.recv(peer, self._tag(peer, bucket), buffer)
        except TransportError as error:
            raise LinkError(peer, error) from error
        check_header(buffer, self.epoch, self.version, bucket.bucket)
        self.digests_checked += 1
        self.received_bytes += bucket.payload_bytes

    async def _send(self, peer: str, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        try:
            await self.transport.send(peer, self._tag(self.program.worker, bucket), buffer)
        except TransportError as error:
            raise LinkError(peer, error) from error
        self.sent_bytes += bucket.payload_bytes

    def _tag(self, source: str, bucket: BucketProgram) -> int:
        return message_tag(self.epoch, self.version, self._numbers[source], bucket.bucket)


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of several at once: a worker's own failure explains broken links, not the other way round."""
    parts = list(leaves(group))
    return next((error for error in parts if not isinstance(error, LinkError)), parts[0])
