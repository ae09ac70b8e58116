"""What the two adapters share: layout discovery, joining, leaving; blocking, for a main thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal

from rlbridge.sync import messages as m
from rlbridge.sync.bridge import Bridge
from rlbridge.sync.layout.checkpoint import spec_hash
from rlbridge.sync.layout.discover import alone, discover
from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.loading import AnyRank, LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import JoinMaker, Member, MemberSettings
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
        )


class Front(Generic[M]):
    """One worker's blocking end of the weight path.

    Args:
        make: makes the member; called on the bridge's loop.
    """

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
        self._bridge = Bridge(portal)
        self._member: M | None = None

    def connect(self) -> None:
        """Discover the layout, join, take the plan, open the links. Waits for all first members.

        Raises:
            LayoutError: the loader cannot be understood, or senders and receivers do not fit; the text lists tensors.
            DeadlineExceededError: somebody did not come. TransportError, PlanError: as they say.
        """
        if self._member is not None:
            raise SyncError(f"{self._place.name} is connected already")
        w = self._weights
        layout = self._announced(discover(w.spec, w.load_weights, w.live_tensors, any_rank=w.any_rank))
        try:
            self._member = self._bridge.start(
                lambda: self._make(lambda address: w.join(self._place, layout, address), self._settings)
            )
            self._bridge.call(self._member.linked)
            self._linked(self._member)
        except BaseException as error:
            self.abort(error)
            raise

    def _announced(self, layout: SourceMap) -> SourceMap:
        """What this worker says about its layout, now that it is discovered."""
        raise NotImplementedError

    def _linked(self, member: M) -> None:
        """The first epoch is entered."""

    def _connected(self) -> M:
        if self._member is None:
            raise SyncError(f"{self._place.name} is not connected; call connect() first")
        return self._member

    def _flush(self, member: M) -> None:
        """Finish what is under way."""

    def close(self) -> None:
        """Finish what is under way, say goodbye, stop the bridge. Idempotent.

        Raises:
            RlbridgeError: what was under way could not be finished, or the bridge had failed before.
        """
        member, self._member = self._member, None
        if member is None:
            return
        failure = member.error  # as of now: after the goodbye the coordinator may well be the first to go
        try:
            if failure is None:
                self._flush(member)
                self._bridge.call(member.leave)
        finally:
            self._bridge.stop()
        if failure is not None:
            raise failure

    def abort(self, error: BaseException) -> None:
        """Stop now and tell everybody that this worker failed of ``error``. Idempotent."""
        member, self._member = self._member, None
        reason = error if isinstance(error, Exception) else WorkerError(f"{self._place.name}: {type(error).__name__}")
        try:
            if member is not None:
                self._bridge.call(member.fail, reason)
        finally:
            self._bridge.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort(error)
