"""A trainer rank's work in ``send_weights``, for both forms of its adapter."""

from __future__ import annotations

import torch
from anyio.from_thread import BlockingPortal

from rlbridge.sync.config import SyncConfig
from rlbridge.sync.correspondence import export_dtypes
from rlbridge.sync.front import Front, Place, Weights, ucxx_transport
from rlbridge.sync.layout.discover import alone
from rlbridge.sync.layout.live import LiveTensors, specs
from rlbridge.sync.layout.loading import AnyRank, LoadWeights
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.member import MemberSettings, Promise, Tensors, TransportFactory
from rlbridge.sync.opaque import EXPORT, Export, Exports, inputs_of, refuse_without_export, with_virtual
from rlbridge.sync.sender import Sender
from rlbridge.sync.stall import Timeline, now_s
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import LayoutError


def _no_news() -> None:
    """A sender has nothing to be woken for."""


def _no_export(name: str) -> torch.Tensor:
    """Default of ``export``; never called, since nothing is to be exported."""
    raise LayoutError(f"no export was given for {name!r}")


class SenderFront(Front[Sender]):
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
        self._runtime: dict[str, TensorSpec] = {}
        self._snapshots: dict[int, dict[str, torch.Tensor]] = {}

    def _announced(self, layout: SourceMap) -> SourceMap:
        # Whatever any plan may ask of this rank: a plan after a loss may ask for other tensors than the first.
        self._sent = sorted({box.runtime for box in [*layout.boxes, *layout.aliases]})
        self._runtime = layout.runtime
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

    async def _send(self, version: int) -> Promise[bool]:
        """Publish the live weights as ``version``; returns the promise of what becomes of it."""
        sender = self._connected()
        start_s = now_s()
        try:
            with self.timeline.span("stall/trainer", version):
                slot, fate = await self._bridge.call(sender.begin, version)
                if slot is not None:
                    await self._bridge.call(sender.offer, version, slot, self._hold(version, slot))
                    if not self._staging:
                        await self._bridge.call(sender.settled, version, fate)
            await self._bridge.call(sender.unblocked, version, now_s() - start_s)
        except Exception:
            raise
        except BaseException as error:  # cancelled: the other ranks would wait for what this one began
            await self._interrupted(sender, error)
            raise
        return fate

    async def settled(self, version: int, fate: Promise[bool], timeout_s: float | None) -> bool:
        """Wait for the fate of ``version``; for its handle."""
        if fate.event.is_set():
            return fate.result()
        return await self._bridge.call(self._connected().settled, version, fate, timeout_s)

    def _hold(self, version: int, slot: int) -> Tensors:
        """What ``slot`` sends: the live and exported tensors themselves, or a copy of them."""
        live = self._weights.live_tensors()
        missing = [name for name in self._sent if name not in live]
        if missing:
            raise LayoutError(f"live tensors vanished since connect(): {', '.join(missing[:20])}")
        tensors = {name: live[name].detach() for name in self._sent}
        self._check_live(tensors)
        if not self._staging:
            return tensors | self._exports.take_together(version)
        with self.timeline.span("weights/snapshot", version), torch.no_grad():
            if slot not in self._snapshots:
                self._snapshots[slot] = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            snapshot = self._snapshots[slot]
            if tensors:
                torch._foreach_copy_([snapshot[name] for name in tensors], list(tensors.values()))
            for name, tensor in self._exports.take(version):
                self._exports.copy(tensor, name, snapshot)
        return snapshot

    def _check_live(self, tensors: Tensors) -> None:
        now = specs(tensors)
        changed = [f"{name} {list(t.shape)} {t.dtype}" for name, t in now.items() if t != self._runtime[name]]
        if changed:
            raise LayoutError(
                f"live tensors changed their shape or dtype since connect(): {', '.join(changed[:20])}; keep them as "
                "they were, or connect anew"
            )

    async def _flush(self, member: Sender) -> None:
        await self._bridge.call(member.flushed)
