"""What all adapters share: layout discovery, joining, leaving. One set of coroutines; its two forms are below.

Work on the caller's own tensors (discovery, snapshot, apply) happens on the caller's thread in either form. What waits
for the bridge thread blocks in the one (``Blocking``) and is awaited in the other (``Awaited``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import ClassVar, Generic, Self, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from rlbridge.sync import messages as m
from rlbridge.sync.bridge import AwaitedBridge, Bridge, finished
from rlbridge.sync.host_memory import available_bytes
from rlbridge.sync.layout.checkpoint import spec_hash
from rlbridge.sync.layout.discover import alone, discover
from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.loading import AnyRank, LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import JoinMaker, Member, MemberSettings, refuse
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import SyncError, WorkerError
from rlbridge.transport.protocol import Transport, TransportAddress

M = TypeVar("M", bound=Member)


def ucxx_transport(config: TransportConfig, name: str) -> Transport:
    """The default transport factory. Imports UCX only when it is used."""
    from rlbridge.transport.ucxx_transport import UcxxTransport

    return UcxxTransport(config, name)


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker this is: ``rank`` of ``world`` ranks of its side or replica."""

    role: m.Role
    replica: int
    rank: int
    world: int

    @property
    def name(self) -> str:
        """The worker's name."""
        return m.sender_name(self.rank) if self.role == "sender" else m.receiver_name(self.replica, self.rank)


@dataclass(frozen=True, slots=True)
class Weights:
    """A backend's weights as the bridge sees them; ``any_rank`` as ``discover`` takes it."""

    spec: CheckpointSpec
    load_weights: LoadWeights
    live_tensors: LiveTensors
    any_rank: AnyRank = alone

    def join(self, place: Place, layout: SourceMap, address: TransportAddress) -> m.Join:
        """The worker's first message."""
        return m.Join(
            role=place.role,
            replica=place.replica,
            rank=place.rank,
            world=place.world,
            address=address,
            layout=layout,
            spec_hash=spec_hash(self.spec),
            spec=self.spec if place.rank == 0 else None,
            available_bytes=available_bytes(),
        )


class Front(Generic[M]):
    """One worker's end of the weight path.

    Args:
        make: makes the member; called on the bridge's loop.
    """

    bridge_kind: ClassVar[type[Bridge]] = Bridge

    def __init__(
        self,
        place: Place,
        weights: Weights,
        settings: MemberSettings,
        portal: BlockingPortal | None,
        make: Callable[[JoinMaker, MemberSettings], M],
    ) -> None:
        self.timeline = settings.timeline
        self._place, self._weights, self._settings, self._make = place, weights, settings, make
        self._bridge = self.bridge_kind(portal)
        self._member: M | None = None

    async def _connect(self) -> None:
        if self._member is not None:
            raise SyncError(f"{self._place.name} is connected already")
        try:
            layout = self._discovered()
        except BaseException as error:
            await self._refuse(error)
            raise
        try:
            self._member = await self._bridge.start(
                lambda: self._make(lambda address: self._weights.join(self._place, layout, address), self._settings)
            )
            await self._bridge.call(self._member.linked)
            self._linked(self._member)
        except BaseException as error:
            await self._abort(error)
            raise

    def _discovered(self) -> SourceMap:
        w = self._weights
        return self._announced(discover(w.spec, w.load_weights, w.live_tensors, any_rank=w.any_rank))

    async def _refuse(self, error: BaseException) -> None:
        """Tell the coordinator, so that the others do not wait for a worker that never joins."""
        p = self._place
        report = m.ErrorReport.of(_reason(error, p.name))
        named = m.ErrorReport(report.kind, f"{p.name}: {report.text}")
        try:
            await self._bridge.insist(refuse, self._settings, m.Refused(p.role, p.replica, p.rank, named))
        finally:
            await self._bridge.stop()

    def _announced(self, layout: SourceMap) -> SourceMap:
        """What this worker says about its layout, now that it is discovered."""
        raise NotImplementedError

    def _linked(self, member: M) -> None:
        """The first epoch is entered."""

    def _connected(self) -> M:
        if self._member is None:
            raise SyncError(f"{self._place.name} is not connected; call connect() first")
        return self._member

    async def _flush(self, member: M) -> None:
        """Finish what is under way."""

    async def _close(self) -> None:
        member, self._member = self._member, None
        if member is None:
            return
        failure = member.error  # as of now: after the goodbye the coordinator may well be the first to go
        try:
            if failure is None:
                await self._flush(member)
                await self._bridge.call(member.leave)
        except Exception:
            raise
        except BaseException as error:
            await self._interrupted(member, error)
            raise
        finally:
            await self._bridge.stop()
        if failure is not None:
            raise failure

    async def _abort(self, error: BaseException) -> None:
        member, self._member = self._member, None
        try:
            if member is not None:
                await self._bridge.insist(member.fail, _reason(error, self._place.name))
        finally:
            await self._bridge.stop()

    async def _interrupted(self, member: M, error: BaseException) -> None:
        """The caller was cancelled, or interrupted, between two steps that belong together: nothing more can work."""
        await self._bridge.insist(member.fail, _reason(error, self._place.name))


def _reason(error: BaseException, name: str) -> Exception:
    return error if isinstance(error, Exception) else WorkerError(f"{name}: {type(error).__name__}")


class Blocking(Front[M]):
    """The form for a main thread: every method returns when it is done."""

    def connect(self) -> None:
        """Discover the layout, join, take the plan, open the links. Waits for all first members.

        Raises:
            LayoutError: the loader cannot be understood, or senders and receivers do not fit; the text lists tensors.
            ConfigError: a budget for memory is too small.
            DeadlineExceededError: somebody did not come. TransportError, PlanError: as they say.
        """
        finished(self._connect())

    def close(self) -> None:
        """Finish what is under way, say goodbye, stop the bridge. Idempotent.

        Raises:
            RlbridgeError: what was under way could not be finished, or the bridge had failed before.
        """
        finished(self._close())

    def abort(self, error: BaseException) -> None:
        """Stop now and tell everybody that this worker failed of ``error``. Idempotent."""
        finished(self._abort(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error)


class Awaited(Front[M]):
    """The form for a thread with an event loop of its own: what waits for others lets that loop go on."""

    bridge_kind = AwaitedBridge

    async def connect(self) -> None:
        """As the blocking form. Discovery runs the backend's loader on this thread."""
        await self._connect()

    async def close(self) -> None:
        """As the blocking form."""
        await self._close()

    async def abort(self, error: BaseException) -> None:
        """As the blocking form; is not cancelled."""
        with anyio.CancelScope(shield=True):
            await self._abort(error)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            await self.close()
        else:
            await self.abort(error)
