"""A rollout rank on the bridge's loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rlbridge.sync.config import SyncConfig
from rlbridge.sync.executor import Staging
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.receiver import ReceiverMachine
from rlbridge.sync.member import Binding, JoinMaker, Member, MemberSettings, Promise, Tensors
from rlbridge.sync.opaque import StagedWholes
from rlbridge.sync.packing import PreparedBucket
from rlbridge.sync.plan.program import HEADER_BYTES, Program
from rlbridge.transport.errors import SyncError


@dataclass(frozen=True, slots=True)
class StagedVersion:
    """Payloads of a version whose digests all matched, and the program that says where they go."""

    version: int
    program: Program
    staging: Staging

    def apply(self, binding: Binding, tensors: Tensors) -> None:
        """Write all that is a copy into ``tensors`` (runtime name to live tensor)."""
        for number, bucket in binding.to(self.program, tensors).items():
            bucket.unpack(self._payload(number))

    def wholes(self, inputs: Mapping[str, TensorSpec]) -> StagedWholes:
        """The whole checkpoint tensors ``inputs`` of this version."""
        return StagedWholes(self.program, self._payload, inputs)

    def _payload(self, bucket: int) -> torch.Tensor:
        return self.staging.buffers[bucket][HEADER_BYTES:]


class Receiver(Member):
    """Receives versions. Coroutines run on the loop; ``news`` and ``take_committed`` are for the main thread."""

    def __init__(self, join: JoinMaker, settings: MemberSettings, sync: SyncConfig, reserved_bytes: int) -> None:
        self._staging = sync.mode.receiver_staging
        super().__init__(ReceiverMachine(staging=self._staging), join, settings, reserved_bytes)
        self._committed: StagedVersion | None = None
        self._announced = False
        self._staged: StagedVersion | None = None
        self._live: Tensors = {}
        self._binding = Binding()
        self._resume: Promise[int] | None = None

    async def quiesce(self, tensors: Tensors) -> int:
        """The main thread stands still: ``tensors`` (runtime name to live or virtual tensor) may be written.

        Returns:
            The version that they hold, whole. Until then the weights may be torn.

        Raises:
            RlbridgeError: no whole version will come; do not compute with these weights.
        """
        self._live = tensors
        self._resume = self.promise()
        self.feed(e.Quiesced())
        return await self.kept(self._resume, "a whole version, although one was announced")

    async def unblocked(self, version: int, stall_s: float) -> None:
        """The main thread computes with ``version`` after standing still for ``stall_s`` seconds."""
        self.feed(e.Resumed(version, stall_s))

    def take_committed(self) -> StagedVersion:
        """The staged version to apply now. Safe from the main thread: the bridge sets another only after ``unblocked``.

        Raises:
            SyncError: there is none; look at ``news`` first.
        """
        taken, self._committed = self._committed, None
        if taken is None:
            raise SyncError("no version waits to be applied")
        return taken

    @property
    def news(self) -> bool:
        """Whether the main thread has something to do: an error to raise, a version to apply, or to stand still."""
        return self._announced or self._committed is not None or self.error is not None

    def bind(self, execute: e.Execute, program: Program) -> Mapping[int, PreparedBucket]:
        """The live tensors, where payloads go straight into them."""
        return self._binding.to(program, self._live) if execute.treatment is e.Treatment.UNPACK else {}

    def executed(self, execute: e.Execute, program: Program) -> None:
        """Hold on to what was kept: a new epoch may come before it is applied."""
        if execute.treatment is e.Treatment.KEEP:
            self._staged = StagedVersion(execute.version, program, self.staging)

    def perform(self, instruction: e.Instruction) -> None:
        """Wake or resume the main thread."""
        match instruction:
            case e.Wake():
                if self._staging:
                    self._committed, self._staged = self._staged, None  # its memory is free once it is applied
                else:
                    self._announced = True
                self.settings.on_news()
            case e.Resume(version) if self._resume is not None:
                self._announced = False
                self._resume.set(version)
            case _:
                raise SyncError(f"a receiver cannot {type(instruction).__name__}")
