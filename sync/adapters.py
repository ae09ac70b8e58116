"""The front of the weight path for a trainer's and an engine's main thread. Blocking; the work is on the bridge thread.

::

    trainer                                          rollout
    with SenderAdapter(...) as bridge:               with ReceiverAdapter(...) as bridge:
        bridge.connect()                                 bridge.connect()
        for version in range(steps):                     while running:
            bridge.send_weights(version)                     bridge.poll_requests()
            train()                                          decode_one_token()
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from anyio.from_thread import BlockingPortal

from rlbridge.sync.config import SyncConfig
from rlbridge.sync.front import Front, Place, Weights, ucxx_transport
from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.probe import LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import Binding, MemberSettings, Promise, Tensors, TransportFactory
from rlbridge.sync.receiver import Receiver
from rlbridge.sync.sender import Sender
from rlbridge.sync.stall import Timeline, now_s
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import LayoutError


def _no_news() -> None:
    """Default of ``on_news``: the caller polls."""


class SendHandle:
    """One version on its way."""

    def __init__(self, version: int, fate: Promise[bool], wait: Callable[[float | None], bool]) -> None:
        self.version = version
        self._fate, self._wait = fate, wait

    @property
    def done(self) -> bool:
        """Whether ``wait`` would return or raise at once."""
        return self._fate.event.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every replica holds the version and all its digests matched.

        Args:
            timeout_s: seconds; ``None`` takes the transport's own deadlines.

        Returns:
            ``True`` if it was delivered, ``False`` if a newer version took its place.

        Raises:
            DeadlineExceededError: it takes longer.
            SyncError, PeerDiedError: it cannot be delivered any more.
        """
        return self._fate.result() if self.done else self._wait(timeout_s)


class SenderAdapter(Front[Sender]):
    """A trainer rank's end of the weight path. All ranks make the same calls in the same order.

    Args:
        coordinator: endpoint, as ``Coordinator.run`` reports it.
        secret: the run's shared secret.
        rank, world: this trainer rank, and how many there are.
        spec: the checkpoint's names, shapes, dtypes: the coordinates of the transfer.
        load_weights: the backend's own loader of (name, tensor) pairs; shows the layout, is not used to send.
        live_tensors: returns the live runtime tensors by name.
        sync, transport: settings; equal on all workers.
        timeline: where spans go.
        portal: an open bridge thread to share; ``None`` starts one.
        transport_factory: makes the transport; UCXX by default.
    """

    def __init__(
        self,
        *,
        coordinator: str,
        secret: bytes,
        rank: int,
        world: int,
        spec: CheckpointSpec,
        load_weights: LoadWeights,
        live_tensors: LiveTensors,
        sync: SyncConfig,
        transport: TransportConfig,
        timeline: Timeline | None = None,
        portal: BlockingPortal | None = None,
        transport_factory: TransportFactory = ucxx_transport,
    ) -> None:
        place = Place("sender", 0, rank, world)
        settings = MemberSettings(
            name=place.name,
            endpoint=coordinator,
            secret=secret,
            transport=transport,
            transport_factory=transport_factory,
            timeline=timeline if timeline is not None else Timeline(),
            on_news=_no_news,
        )
        weights = Weights(spec, load_weights, live_tensors)
        super().__init__(place, weights, settings, portal, lambda join, s: Sender(join, s, sync))
        self._staging = sync.mode.sender_staging
        self._sent: list[str] = []
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def _discovered(self, layout: SourceMap) -> None:
        # Whatever any plan may ask of this rank: a plan after a loss may ask for other tensors than the first.
        self._sent = sorted({box.runtime for box in [*layout.boxes, *layout.aliases]})

    def send_weights(self, version: int) -> SendHandle:
        """Publish the live weights as ``version``. Blocks for the snapshot (sender staging) or the whole transfer.

        With staging and a version still under way, ``sync.on_busy`` says what happens.

        Raises:
            SyncError: ``version`` does not grow, or the update failed; with the receiver's text if it was the last.
            PeerDiedError: nobody is left to receive it. DeadlineExceededError: somebody is late.
        """
        sender = self._connected()
        start_s = now_s()
        with self.timeline.span("stall/trainer", version):
            slot, fate = self._bridge.call(sender.begin, version)
            if slot is not None:
                self._bridge.call(sender.offer, version, slot, self._hold(version, slot))
                if not self._staging:
                    self._bridge.call(sender.settled, version, fate)
        self._bridge.call(sender.unblocked, version, now_s() - start_s)
        return SendHandle(version, fate, lambda timeout_s: self._bridge.call(sender.settled, version, fate, timeout_s))

    def _hold(self, version: int, slot: int) -> Tensors:
        """What ``slot`` sends: the live tensors themselves, or a copy of them."""
        live = self._weights.live_tensors()
        missing = [name for name in self._sent if name not in live]
        if missing:
            raise LayoutError(f"live tensors vanished since connect(): {', '.join(missing[:20])}")
        tensors = {name: live[name].detach() for name in self._sent}
        if not self._staging:
            return tensors
        with self.timeline.span("weights/snapshot", version), torch.no_grad():
            if slot not in self._snapshots:
                self._snapshots[slot] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            torch._foreach_copy_(list(self._snapshots[slot].values()), list(tensors.values()))
        return self._snapshots[slot]

    def _flush(self, member: Sender) -> None:
        self._bridge.call(member.flushed)


class ReceiverAdapter(Front[Receiver]):
    """A rollout rank's end of the weight path.

    Replicas of several ranks are known to the protocol (a version is committed once all ranks verified it); that all
    ranks take it at the same decoding step is up to the caller's own lockstep for now.

    Args:
        coordinator, secret, spec, load_weights, live_tensors, sync, transport, timeline, portal, transport_factory:
            as for ``SenderAdapter``.
        replica: which rollout replica this is; rank, world: which of its ranks.
        on_news: called from the bridge thread when ``poll_requests`` would do something, so that an idle engine can
            sleep; must be quick and must not call the adapter.
    """

    def __init__(
        self,
        *,
        coordinator: str,
        secret: bytes,
        replica: int,
        spec: CheckpointSpec,
        load_weights: LoadWeights,
        live_tensors: LiveTensors,
        sync: SyncConfig,
        transport: TransportConfig,
        rank: int = 0,
        world: int = 1,
        timeline: Timeline | None = None,
        portal: BlockingPortal | None = None,
        transport_factory: TransportFactory = ucxx_transport,
        on_news: Callable[[], None] | None = None,
    ) -> None:
        place = Place("receiver", replica, rank, world)
        settings = MemberSettings(
            name=place.name,
            endpoint=coordinator,
            secret=secret,
            transport=transport,
            transport_factory=transport_factory,
            timeline=timeline if timeline is not None else Timeline(),
            on_news=on_news if on_news is not None else _no_news,
        )
        weights = Weights(spec, load_weights, live_tensors)
        super().__init__(place, weights, settings, portal, lambda join, s: Receiver(join, s, sync))
        self._staging = sync.mode.receiver_staging
        self._binding = Binding()
        self.version: int | None = None

    @property
    def has_news(self) -> bool:
        """Whether ``poll_requests`` would do something: stand still, apply, or raise."""
        return self._member is not None and self._member.news

    def poll_requests(self) -> int | None:
        """Take a version if one is there. Call it between inference steps; costs a flag check otherwise.

        Returns:
            The version that the live weights hold from now on, or ``None`` if nothing changed.

        Raises:
            RlbridgeError: the bridge failed. If weights were being written, they are torn: do not compute with them.
        """
        member = self._member
        if member is not None and not member.news:
            return None
        receiver = self._connected()
        if receiver.error is not None:
            raise receiver.error
        start_s = now_s()
        version = self._apply(receiver) if self._staging else self._stand_still(receiver)
        end_s = now_s()
        self.timeline.add("stall/rollout", start_s, end_s, version)
        self._bridge.call(receiver.unblocked, version, end_s - start_s)
        self.version = version
        return version

    def _stand_still(self, receiver: Receiver) -> int:
        return self._bridge.call(receiver.quiesce, self._weights.live_tensors())

    def _apply(self, receiver: Receiver) -> int:
        staged = receiver.take_committed()
        try:
            with self.timeline.span("weights/apply", staged.version):
                staged.apply(self._binding, self._weights.live_tensors())
        except Exception as error:
            self._bridge.call(receiver.fail, error)
            raise
        return staged.version


__all__ = ["ReceiverAdapter", "SendHandle", "SenderAdapter"]
