"""A rollout rank's work in ``poll_requests``, for both forms of its adapter."""

from __future__ import annotations

from collections.abc import Callable

from anyio.from_thread import BlockingPortal

from rlbridge.sync.config import SyncConfig
from rlbridge.sync.correspondence import export_dtypes
from rlbridge.sync.front import Front, Place, Weights, ucxx_transport
from rlbridge.sync.layout.discover import alone
from rlbridge.sync.layout.live import LiveTensors
from rlbridge.sync.layout.loading import AnyRank, Loader, LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.member import Binding, MemberSettings, Tensors, TransportFactory
from rlbridge.sync.opaque import WHOLE, AfterLoad, Loading, check_budget, check_live, inputs_of, with_virtual
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.receiver import Receiver
from rlbridge.sync.stall import Timeline, now_s
from rlbridge.transport.config import TransportConfig


def _no_news() -> None:
    """Default of ``on_news``: the caller polls."""


class ReceiverFront(Front[Receiver]):
    """A rollout rank's end of the weight path.

    Replicas of several ranks are known to the protocol (a version is committed once all ranks verified it); that all
    ranks take it at the same decoding step is up to the caller's own lockstep for now.

    Args:
        coordinator, secret, spec, live_tensors, any_rank, sync, transport, timeline, portal, transport_factory:
            as for a sender.
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

    @property
    def _has_nothing_to_do(self) -> bool:
        return self._member is not None and not self._member.news

    async def _take(self) -> int:
        """Stand still or apply, as the mode says; returns the version that the live weights hold from now on."""
        receiver = self._connected()
        if receiver.error is not None:
            raise receiver.error
        start_s = now_s()
        try:
            version = self._apply(receiver) if self._staging else await self._stand_still(receiver)
        except BaseException as error:  # also cancelled: whatever is written in part is no version
            await self._interrupted(receiver, error)
            raise
        end_s = now_s()
        self.timeline.add("stall/rollout", start_s, end_s, version)
        await self._bridge.insist(receiver.unblocked, version, end_s - start_s)
        self.version = version
        return version

    async def _stand_still(self, receiver: Receiver) -> int:
        """Let the bridge write the live weights; then compute what it cannot copy."""
        tensors = {**self._live(), **self._loading.buffers()}
        version = await self._bridge.call(receiver.quiesce, tensors)
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
