"""A whole bridge in one process: real coordinator and adapters, main threads as threads, the in-process transport."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal
from computing_engines import SPEC

from rlbridge.sync import Coordinator, OnBusy, PlanMade, ReceiverAdapter, SenderAdapter, SyncConfig, SyncMode
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.inproc import InprocHub

KIB = 1024
SECRET = b"a secret of one process only"
Applied = Callable[[Any, int], None]


@dataclass
class Outcome:
    """What came of a job: errors by worker (``coordinator`` too), versions by receiver, the first plan's report."""

    errors: dict[str, BaseException] = field(default_factory=dict)
    versions: dict[str, list[int]] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class Job:
    """Trainer ranks and replicas (each a list of its ranks' engines) over ``versions`` versions.

    An engine has ``load_weights``, ``live_tensors``, ``after_load``; a trainer has ``train(version)`` and ``export``
    instead of ``after_load``. ``applied(engine, version)`` is called on a receiver's thread after each version.
    """

    mode: SyncMode
    trainers: Sequence[Any]
    replicas: Sequence[Sequence[Any]]
    applied: Applied
    spec: CheckpointSpec = SPEC
    versions: int = 3
    export_dtype: str | None = None
    transport: TransportConfig = field(
        default_factory=lambda: TransportConfig(
            bucket_bytes=16 * KIB, staging_bytes=128 * KIB, connect_timeout_s=30.0, update_timeout_s=30.0
        )
    )

    def run(self) -> Outcome:
        """Run it to its end."""
        self._outcome, self._hub = Outcome(), InprocHub()
        sync = SyncConfig(mode=self.mode, on_busy=OnBusy.QUEUE, export_dtype=self.export_dtype)
        coordinator = Coordinator(
            secret=SECRET,
            senders=len(self.trainers),
            receivers={i: len(ranks) for i, ranks in enumerate(self.replicas)},
            sync=sync,
            transport=self.transport,
        )
        with start_blocking_portal("asyncio") as portal:
            running, endpoint = portal.start_task(coordinator.run)
            following = portal.start_task_soon(self._follow, coordinator)
            self._common = {
                "coordinator": endpoint,
                "secret": SECRET,
                "spec": self.spec,
                "sync": sync,
                "transport": self.transport,
                "portal": portal,
                "transport_factory": lambda config, name: self._hub.transport(name),
            }
            self._run_workers()
            portal.call(_stop, coordinator)
            error = running.exception(30.0)
            following.result(30.0)
        if error is not None:
            self._outcome.errors["coordinator"] = error
        return self._outcome

    def _run_workers(self) -> None:
        work: dict[str, Callable[[], None]] = {}
        for rank, trainer in enumerate(self.trainers):
            work[f"trainer-{rank}"] = partial(self._send, rank, trainer)
        for replica, ranks in enumerate(self.replicas):
            for rank, engine in enumerate(ranks):
                name = f"rollout-{replica}" + (f".{rank}" if rank else "")
                work[name] = partial(self._receive, name, replica, rank, len(ranks), engine)
        with ThreadPoolExecutor(len(work)) as threads:
            futures = {name: threads.submit(self._guarded, name, each) for name, each in work.items()}
            for future in futures.values():
                future.result(150.0)

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._outcome.errors[name] = error

    async def _follow(self, coordinator: Coordinator) -> None:
        async for event in coordinator.events():
            if isinstance(event, PlanMade):
                self._outcome.report = self._outcome.report or event.report

    def _send(self, rank: int, trainer: Any) -> None:
        adapter = SenderAdapter(
            rank=rank,
            world=len(self.trainers),
            load_weights=trainer.load_weights,
            live_tensors=trainer.live_tensors,
            export=trainer.export,
            **self._common,
        )
        with adapter:
            adapter.connect()
            self._outcome.versions[f"trainer-{rank}"] = []
            for version in range(self.versions):
                trainer.train(version)
                handle = adapter.send_weights(version)
                for tensor in trainer.weights.values():  # what is not copied by now must not be sent any more
                    tensor.fill_(float("nan"))
            handle.wait(60.0)

    def _receive(self, name: str, replica: int, rank: int, world: int, engine: Any) -> None:
        news = threading.Event()
        adapter = ReceiverAdapter(
            replica=replica,
            rank=rank,
            world=world,
            load_weights=engine.load_weights,
            live_tensors=engine.live_tensors,
            after_load=engine.after_load,
            on_news=news.set,
            **self._common,
        )
        with adapter:
            adapter.connect()
            self._outcome.versions[name] = []
            while adapter.version != self.versions - 1:
                if not adapter.has_news and not news.wait(60.0):
                    raise TimeoutError("no news for a minute")
                news.clear()
                version = adapter.poll_requests()
                if version is not None:
                    self._outcome.versions[name].append(version)
                    self.applied(engine, version)


async def _stop(coordinator: Coordinator) -> None:
    await anyio.lowlevel.checkpoint()
    coordinator.stop()
