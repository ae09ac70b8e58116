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
from rlbridge.sync.correspondence import export_dtypes
from rlbridge.sync.front import Front, Place, Weights, ucxx_transport
from rlbridge.sync.layout.discover import alone
from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.loading import AnyRank, Loader, LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import Binding, MemberSettings, Promise, Tensors, TransportFactory
from rlbridge.sync.opaque import (
    EXPORT,
    WHOLE,
    AfterLoad,
    Export,
    Exports,
    Loading,
    check_budget,
    check_live,
    inputs_of,
    refuse_without_export,
    with_virtual,
)
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.receiver import Receiver
from rlbridge.sync.sender import Sender
from rlbridge.sync.stall import Timeline, now_s
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import LayoutError


def _no_news() -> None:
    """Default of ``on_news``: the caller polls."""


def _no_export(name: str) -> torch.Tensor:
    """Default of ``export``; never called, since nothing is to be exported."""
    raise LayoutError(f"no export was given for {name!r}")


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
        export: for a backend whose loader computes (``1 + x``, quantisation): called with the name of a checkpoint
            tensor that such elements are computed from, it returns that tensor whole, as the checkpoint would store
            it. Called on the main thread inside ``send_weights``, on all ranks for the same names in the same order,
            so it may communicate. A floating tensor may have any floating dtype; it is cast once, to the wire dtype.
            Without sender staging the tensor must stay as it is until the version is out: no reused buffer.
        any_rank: for loaders that communicate between ranks: a logical or among those that share the loader, as
            ``discover`` takes it.
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
        export: Export | None = None,
        any_rank: AnyRank = alone,
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
        weights = Weights(spec, load_weights, live_tensors, any_rank)
        super().__init__(place, weights, settings, portal, lambda join, s: Sender(join, s, sync))
        self._staging, self._wire = sync.mode.sender_staging, export_dtypes(spec, sync.export_dtype)
        self._export = export
        self._exports = Exports({}, (), _no_export)
        self._exported: set[str] = set()
        self._sent: list[str] = []
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def _announced(self, layout: SourceMap) -> SourceMap:
        # Whatever any plan may ask of this rank: a plan after a loss may ask for other tensors than the first.
        self._sent = sorted({box.runtime for box in [*layout.boxes, *layout.aliases]})
        if layout.opaque and self._export is None:
            raise refuse_without_export(layout)
        self._exported = layout.opaque_inputs
        return with_virtual(layout, EXPORT, inputs_of(self._weights.spec, self._exported, self._wire))

    def _linked(self, member: Sender) -> None:
        if not member.exports:
            return
        if self._export is None:
            raise LayoutError(
                f"other trainer ranks export {', '.join(member.exports[:20])}, which all ranks must do together; "
                f"give export to every rank, {self._place.name} has none"
            )
        inputs = inputs_of(self._weights.spec, member.exports, self._wire)
        self._exports = Exports(inputs, self._exported, self._export)

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
        """What ``slot`` sends: the live and exported tensors themselves, or a copy of them."""
        live = self._weights.live_tensors()
        missing = [name for name in self._sent if name not in live]
        if missing:
            raise LayoutError(f"live tensors vanished since connect(): {', '.join(missing[:20])}")
        tensors = {name: live[name].detach() for name in self._sent}
        if not self._staging:
            return tensors | dict(self._exports.take(version))
        with self.timeline.span("weights/snapshot", version), torch.no_grad():
            if slot not in self._snapshots:
                self._snapshots[slot] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            snapshot = self._snapshots[slot]
            torch._foreach_copy_([snapshot[name] for name in tensors], list(tensors.values()))
            for name, tensor in self._exports.take(version):
                self._exports.copy(tensor, name, snapshot)
        return snapshot

    def _flush(self, member: Sender) -> None:
        self._bridge.call(member.flushed)


class ReceiverAdapter(Front[Receiver]):
    """A rollout rank's end of the weight path.

    Replicas of several ranks are known to the protocol (a version is committed once all ranks verified it); that all
    ranks take it at the same decoding step is up to the caller's own lockstep for now.

    Args:
        coordinator, secret, spec, live_tensors, any_rank, sync, transport, timeline, portal, transport_factory:
            as for ``SenderAdapter``.
        load_weights: the backend's own loader of (name, tensor) pairs. Shows the layout; elements that it copies are
            written without it from then on. If it computes others (``1 + x``, quantisation with scales), it is run
            again for each version, on the whole checkpoint tensors that those depend on, in the checkpoint's order.
        after_load: the engine's post-processing (kernel layouts, derived tables); called after each version, on the
            main thread. Tensors that it makes are no live tensors, and it must leave shapes and dtypes of the live ones
            alone: the layout is discovered *before* post-processing. A backend that replaces its tensors there has to
            undo and do that within ``load_weights`` instead; then it is discovered *after* it, as one loader.
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
        after_load: AfterLoad | None = None,
        any_rank: AnyRank = alone,
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
        weights = Weights(spec, load_weights, live_tensors, any_rank)
        super().__init__(
            place, weights, settings, portal, lambda join, s: Receiver(join, s, sync, self._reserved_bytes)
        )
        self._staging = sync.mode.receiver_staging
        self._wire = export_dtypes(spec, sync.export_dtype)
        self._after_load = after_load
        self._layout = SourceMap({}, [])
        self._loading = Loading({}, load_weights, after_load)
        self._reserved_bytes = 0
        self._binding = Binding()
        self.version: int | None = None

    def _announced(self, layout: SourceMap) -> SourceMap:
        w = self._weights
        # A loader that communicates runs on all ranks alike, on what any of them needs.
        names = Loader(w.spec, w.load_weights, w.live_tensors, w.any_rank).on_any_rank(layout.opaque_inputs)
        inputs = inputs_of(w.spec, names, self._wire)
        if not self._staging:
            transport = self._settings.transport
            bucket_bytes = HEADER_BYTES + transport.bucket_bytes
            self._reserved_bytes = check_budget(inputs, bucket_bytes, transport.staging_bytes)
        self._layout, self._loading = layout, Loading(inputs, w.load_weights, self._after_load)
        return with_virtual(layout, WHOLE, inputs)

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
            WorkerError: the backend's own ``load_weights`` or ``after_load`` raised; likewise.
        """
        member = self._member
        if member is not None and not member.news:
            return None
        receiver = self._connected()
        if receiver.error is not None:
            raise receiver.error
        start_s = now_s()
        try:
            version = self._apply(receiver) if self._staging else self._stand_still(receiver)
        except Exception as error:
            self._bridge.call(receiver.fail, error)
            raise
        end_s = now_s()
        self.timeline.add("stall/rollout", start_s, end_s, version)
        self._bridge.call(receiver.unblocked, version, end_s - start_s)
        self.version = version
        return version

    def _stand_still(self, receiver: Receiver) -> int:
        """Let the bridge write the live weights; then compute what it cannot copy."""
        tensors = {**self._live(), **self._loading.buffers()}
        version = self._bridge.call(receiver.quiesce, tensors)
        with self.timeline.span("weights/load", version):
            self._loading.finish(version, self._loading.arrived)
        return version

    def _apply(self, receiver: Receiver) -> int:
        """Write what is staged, and compute what is no copy."""
        staged = receiver.take_committed()
        with self.timeline.span("weights/apply", staged.version):
            staged.apply(self._binding, self._live())
            self._loading.finish(staged.version, staged.wholes(self._loading.inputs).tensor)
        return staged.version

    def _live(self) -> Tensors:
        live = self._weights.live_tensors()
        check_live(self._layout, live)
        return live


__all__ = ["ReceiverAdapter", "SendHandle", "SenderAdapter"]
