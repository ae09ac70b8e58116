"""A trainer rank on the bridge's loop."""

from __future__ import annotations

from collections.abc import Mapping

from rlbridge.sync.config import SyncConfig
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.sync.member import Binding, JoinMaker, Member, MemberSettings, Promise, Tensors
from rlbridge.sync.packing import PreparedBucket
from rlbridge.sync.plan.program import Program
from rlbridge.transport.errors import SyncError


class Sender(Member):
    """Offers versions and sends them from their slots. Every method runs on the bridge's loop."""

    def __init__(self, join: JoinMaker, settings: MemberSettings, sync: SyncConfig) -> None:
        self._sender = SenderMachine(staging=sync.mode.sender_staging, on_busy=sync.on_busy)
        super().__init__(self._sender, join, settings)
        self._sources: dict[int, Tensors] = {}
        self._bindings: dict[int, Binding] = {}
        self._grants: dict[int, Promise[int | None]] = {}
        self._fates: dict[int, Promise[bool]] = {}

    async def begin(self, version: int) -> tuple[int | None, Promise[bool]]:
        """Ask to send ``version``.

        Returns:
            The slot to fill, once one is free, or ``None`` if the version is superseded already; and the promise of
            what becomes of it: ``True`` delivered to every replica, ``False`` superseded.

        Raises:
            SyncError: ``version`` does not grow, or the bridge failed. DeadlineExceededError: no slot came free.
        """
        if self.error is not None:
            raise self.error
        self._sender.check(version)
        grant: Promise[int | None] = self.promise()
        fate: Promise[bool] = self.promise()
        self._grants[version], self._fates[version] = grant, fate
        self.feed(e.Want(version))
        return await self.kept(grant, f"release of the version before {version}"), fate

    async def offer(self, version: int, slot: int, tensors: Tensors) -> None:
        """``slot`` holds ``version`` in ``tensors`` (runtime name to tensor), unchanged until it is settled."""
        self._sources[slot] = tensors
        self.feed(e.Filled(version, slot))

    async def unblocked(self, version: int, stall_s: float) -> None:
        """The main thread goes on after ``stall_s`` seconds."""
        self.feed(e.Resumed(version, stall_s))

    async def settled(self, version: int, fate: Promise[bool], timeout_s: float | None = None) -> bool:
        """Wait for the fate of ``version``."""
        return await self.kept(fate, f"delivery of version {version}", timeout_s)

    async def flushed(self) -> None:
        """Wait until every offered version is settled."""
        for version, fate in list(self._fates.items()):
            await self.settled(version, fate)

    def bind(self, execute: e.Execute, program: Program) -> Mapping[int, PreparedBucket]:
        """The slot's tensors."""
        return self._bindings.setdefault(execute.slot, Binding()).to(program, self._sources[execute.slot])

    def perform(self, instruction: e.Instruction) -> None:
        """Grants and settlements."""
        match instruction:
            case e.Grant(version, slot):
                self._grants.pop(version).set(slot)
            case e.Settle(version, delivered):
                if version in self._grants:
                    self._grants.pop(version).set(None)
                self._fates.pop(version).set(delivered)
            case _:
                raise SyncError(f"a sender cannot {type(instruction).__name__}")
