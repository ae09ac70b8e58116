"""Runs one worker's ``Program`` over a ``Transport``: pack or receive, check, forward, unpack; bucket by bucket.

Every worker takes its buckets in the one global order and buys their buffers from a byte budget in that order. So the
lowest bucket that is not complete everywhere always has its buffer on every worker, and the whole never stands still.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio
import anyio.lowlevel
import anyio.to_thread
import torch

from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.messages import TransferStats
from rlbridge.sync.packing import PreparedBucket, check_header, write_header
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Program
from rlbridge.transport.errors import DeadlineExceededError, TransportError, leaves
from rlbridge.transport.protocol import Transport

_LANE_BYTES = 4 * 1024 * 1024
"""About how much is under way on one lane: enough to hide a round trip, little enough to be passed on soon."""

_LANE_BUCKETS = 2
"""On a lane at least: one on the wire while the next is agreed on."""

_THREAD_BYTES = 256 * 1024
"""From this size on a bucket is packed and checked beside the event loop."""

Lane = str | tuple[str, ...]
"""The peer that buckets come from, or the peers that packed ones go to."""

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
    """Bucket buffers under a byte budget, reused. Room is given in the order of the calls of ``reserve``.

    A buffer larger than the whole budget gets its room when nobody else has any.

    Args:
        budget_bytes: most bytes allocated at a time, in use and idle together.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.peak_bytes = 0
        self._held_bytes = 0
        self._idle: list[torch.Tensor] = []
        self._idle_bytes = 0
        self._returned = anyio.Event()

    async def reserve(self, size_bytes: int) -> None:
        """Room for one buffer, once the budget allows it. Memory comes later, with ``take``."""
        while self.used_bytes and self.used_bytes + size_bytes > self.budget_bytes:
            await self._returned.wait()
        self.used_bytes += size_bytes

    def take(self, size_bytes: int) -> torch.Tensor:
        """The buffer that room was reserved for (``uint8 [size_bytes]``, contents undefined)."""
        self._held_bytes += size_bytes
        # The last one given back first: it is the likeliest to be in the processor's cache.
        for index in reversed(range(len(self._idle))):
            if self._idle[index].numel() == size_bytes:
                self._idle_bytes -= size_bytes
                return self._idle.pop(index)
        while self._idle and self._held_bytes + self._idle_bytes > self.budget_bytes:
            self._idle_bytes -= self._idle.pop(0).numel()
        self.peak_bytes = max(self.peak_bytes, self._held_bytes + self._idle_bytes)
        return torch.empty(size_bytes, dtype=torch.uint8)

    def give(self, buffer: torch.Tensor) -> None:
        """Take ``buffer`` back, and its room; nobody may hold it any more."""
        self._held_bytes -= buffer.numel()
        self._idle_bytes += buffer.numel()
        self._idle.append(buffer)
        self.release(buffer.numel())

    def release(self, size_bytes: int) -> None:
        """Take room back whose buffer was never taken."""
        self.used_bytes -= size_bytes
        self._returned.set()
        self._returned = anyio.Event()


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
        step_s: seconds in each step so far, summed over buckets; steps overlap, and waiting for a peer counts.
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
    step_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _numbers: dict[str, int] = field(init=False, default_factory=dict)
    _lanes: dict[Lane, anyio.Semaphore] = field(init=False, default_factory=dict)
    _lane_buckets: int = field(init=False, default=_LANE_BUCKETS)
    _thread: anyio.CapacityLimiter = field(init=False, default_factory=lambda: anyio.CapacityLimiter(1))

    async def run(self) -> TransferStats:
        """Run it to its end. When it ends, also by cancellation, no buffer is in use by the transport any more.

        Raises:
            LinkError: a link broke.
            DigestMismatchError, ProtocolError: a bucket is not what its source packed.
            DeadlineExceededError: the transport could not let go of a buffer, which stays out of use for good.
        """
        start_s = time.monotonic()
        self._numbers = {worker: number for number, worker in enumerate(self.program.workers)}
        largest_bytes = max((bucket.payload_bytes for bucket in self.program.buckets), default=1)
        self._lane_buckets = max(_LANE_BUCKETS, _LANE_BYTES // max(1, largest_bytes))
        try:
            async with anyio.create_task_group() as tasks:
                for bucket in self.program.buckets:
                    if not self._keeps(bucket):
                        await self.pool.reserve(_size(bucket))
                    tasks.start_soon(self._run_bucket, bucket)
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

    async def _run_bucket(self, bucket: BucketProgram) -> None:
        buffer: torch.Tensor | None = None
        owned_elsewhere = False
        try:
            lane = self._lane(bucket.send_to if bucket.recv_from is None else bucket.recv_from)
            async with lane:
                # Memory only now: what waits for its turn would only push others out of the processor's cache.
                buffer = self._buffer(bucket)
                if bucket.recv_from is None:
                    await self._pack(bucket, buffer)
                    await self._send_all(bucket, buffer)
                else:
                    await self._receive(bucket, bucket.recv_from, buffer)
            if bucket.recv_from is not None:
                await self._use(bucket, buffer)
        except BaseException as error:
            owned_elsewhere = any(isinstance(part, DeadlineExceededError) for part in leaves(error))
            raise
        finally:
            self._give_back(bucket, buffer, owned_elsewhere)

    def _give_back(self, bucket: BucketProgram, buffer: torch.Tensor | None, owned_elsewhere: bool) -> None:
        """Return a buffer and its room, unless the transport could not let go of it: then nobody may use it again."""
        if owned_elsewhere:
            if self._keeps(bucket):
                self.staging.buffers.pop(bucket.bucket, None)
        elif self._keeps(bucket):
            return
        elif buffer is not None:
            self.pool.give(buffer)
        else:
            self.pool.release(_size(bucket))

    def _buffer(self, bucket: BucketProgram) -> torch.Tensor:
        if self._keeps(bucket):
            return self.staging.buffer(bucket.bucket, _size(bucket))
        return self.pool.take(_size(bucket))

    def _lane(self, key: Lane) -> anyio.Semaphore:
        """What bounds the buckets under way from one peer, or to the same peers.

        A lane serves its buckets in their order, so that the first arrives, and can be passed on, while the second is
        on its way, instead of all of them at the end.
        """
        if key not in self._lanes:
            self._lanes[key] = anyio.Semaphore(self._lane_buckets)
        return self._lanes[key]

    async def _pack(self, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        payload = buffer[HEADER_BYTES:]

        def work() -> None:
            with self._timed("pack and digest"):
                digest = self.prepared[bucket.bucket].pack_and_digest(payload)
                write_header(buffer, self.epoch, self.version, bucket.bucket, payload, digest)

        await self._compute(bucket, work)
        self.packed_bytes += bucket.payload_bytes

    async def _receive(self, bucket: BucketProgram, peer: str, buffer: torch.Tensor) -> None:
        try:
            with self._timed("receive"):
                await self.transport.recv(peer, self._tag(peer, bucket), buffer)
        except TransportError as error:
            raise LinkError(peer, error) from error

    async def _use(self, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        """Check what was received, pass it on, and unpack it meanwhile."""
        unpacks = self.treatment is Treatment.UNPACK and bool(bucket.pieces)

        def check() -> None:
            with self._timed("check"):
                check_header(buffer, self.epoch, self.version, bucket.bucket)

        def unpack() -> None:
            with self._timed("unpack"):
                self.prepared[bucket.bucket].unpack(buffer[HEADER_BYTES:])

        def check_and_unpack() -> None:
            check()
            unpack()

        last = unpacks and not bucket.send_to
        await self._compute(bucket, check_and_unpack if last else check)
        self.digests_checked += 1
        self.received_bytes += bucket.payload_bytes
        if not last:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._send_all, bucket, buffer)
                if unpacks:
                    await anyio.lowlevel.checkpoint()  # offer it first
                    await self._compute(bucket, unpack)

    async def _send_all(self, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        async with anyio.create_task_group() as sends:
            for peer in bucket.send_to:
                sends.start_soon(self._send, peer, bucket, buffer)

    async def _send(self, peer: str, bucket: BucketProgram, buffer: torch.Tensor) -> None:
        try:
            with self._timed("send"):
                await self.transport.send(peer, self._tag(self.program.worker, bucket), buffer)
        except TransportError as error:
            raise LinkError(peer, error) from error
        self.sent_bytes += bucket.payload_bytes

    async def _compute(self, bucket: BucketProgram, work: Callable[[], None]) -> None:
        """Work on a buffer: beside the loop, so that links move on, unless it is done sooner than handed over.

        A cancelled call ends only when the work does: until then its buffer is in use.
        """
        if bucket.payload_bytes < _THREAD_BYTES:
            await anyio.lowlevel.checkpoint()  # let others in between
            work()
        else:
            await anyio.to_thread.run_sync(work, limiter=self._thread)

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        begin_s = time.monotonic()
        try:
            yield
        finally:
            self.step_s[step] += time.monotonic() - begin_s

    def _tag(self, source: str, bucket: BucketProgram) -> int:
        return message_tag(self.epoch, self.version, self._numbers[source], bucket.bucket)


def _size(bucket: BucketProgram) -> int:
    return HEADER_BYTES + bucket.payload_bytes


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to report of several at once: a worker's own failure explains broken links, not the other way round."""
    parts = list(leaves(group))
    return next((error for error in parts if not isinstance(error, LinkError)), parts[0])
