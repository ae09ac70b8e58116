"""One worker process of the bridge tests: a small engine behind an adapter. Reports one JSON object on stdout.

Run as ``python bridge_worker.py '<json of WorkerSpec>'``.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch
from computing_engines import ENGINES, SPEC, checkpoint_of, wrong_at

from rlbridge.sync import ReceiverAdapter, SenderAdapter, SyncConfig
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.protocol import TransportAddress
from rlbridge.transport.ucxx_transport import UcxxTransport


class WorkerSpec(msgspec.Struct, frozen=True):
    """What one worker does."""

    role: str
    index: int
    rank: int
    world: int
    endpoint: str
    secret: bytes
    sync: SyncConfig
    transport: TransportConfig
    versions: int
    engine: str = "float32"
    pause_s: float = 0.0
    trick: str = ""
    trick_version: int = 1
    signal: str = ""


class WorkerReport(msgspec.Struct, frozen=True):
    """What came of it."""

    versions: list[int]
    wrong: list[str]
    superseded: list[int]
    error: str = ""
    error_kind: str = ""
    waited_s: float = 0.0
    poll_us: float = 0.0
    snapshot_bytes: int = 0


class TrickyTransport:
    """A transport that plays one trick on what it receives in one version: flips a bit, hangs, or raises."""

    def __init__(self, inner: UcxxTransport, spec: WorkerSpec) -> None:
        self._inner, self._spec = inner, spec
        self.address = inner.address

    async def connect(self, peer: str, address: TransportAddress) -> None:
        await self._inner.connect(peer, address)

    async def send(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        await self._inner.send(peer, tag, buffer)

    async def recv(self, peer: str, tag: int, buffer: torch.Tensor) -> None:
        await self._inner.recv(peer, tag, buffer)
        version, bucket = (tag >> 44) & 1023, tag & ((1 << 28) - 1)
        if version != self._spec.trick_version or bucket == 0:  # bucket 0 arrives: the transfer is in its middle
            return
        if self._spec.trick == "flip":
            buffer[-1] ^= 1
        elif self._spec.trick == "hang":
            Path(self._spec.signal).touch()
            await anyio.sleep_forever()
        elif self._spec.trick == "raise":
            raise ValueError("the loader is out of luck")

    async def disconnect(self, peer: str) -> None:
        await self._inner.disconnect(peer)

    async def aclose(self) -> None:
        await self._inner.aclose()


def run_sender(spec: WorkerSpec, backend: Any, report: dict[str, Any]) -> None:
    export = None if spec.trick == "no export" else backend.export
    adapter = SenderAdapter(rank=spec.rank, world=spec.world, export=export, **common(spec, backend))
    with adapter:
        adapter.connect()
        handles = []
        for version in range(spec.versions):
            while spec.trick == "wait" and version == spec.versions - 1 and not Path(spec.signal).exists():
                time.sleep(0.02)
            backend.train(version)
            start_s = time.monotonic()
            try:
                handles.append(adapter.send_weights(version))
                if spec.pause_s:
                    time.sleep(spec.pause_s)
                if spec.trick == "die" and version == spec.trick_version:
                    Path(spec.signal).touch()
                    time.sleep(60)
                if version == spec.versions - 1:
                    handles[-1].wait(30.0)
            finally:
                report["waited_s"] = time.monotonic() - start_s
            for tensor in backend.weights.values():  # what is not copied by now must not be sent any more
                tensor.fill_(float("nan"))
        for handle in handles:
            (report["versions"] if handle.wait(30.0) else report["superseded"]).append(handle.version)


def run_receiver(spec: WorkerSpec, backend: Any, report: dict[str, Any]) -> None:
    news = threading.Event()
    adapter = ReceiverAdapter(
        replica=spec.index,
        rank=spec.rank,
        world=spec.world,
        on_news=news.set,
        after_load=backend.after_load,
        **common(spec, backend),
    )
    with adapter:
        backend.connected = False
        adapter.connect()
        backend.connected = True
        if spec.trick == "sleep":
            time.sleep(60)
        while adapter.version != spec.versions - 1:
            if not adapter.has_news and not news.wait(60.0):
                raise TimeoutError("no news for a minute")
            news.clear()
            version = adapter.poll_requests()
            if version is not None:
                report["versions"].append(version)
                fresh = ENGINES[spec.engine](spec.rank, spec.world)
                report["wrong"] += [f"{name} at {version}" for name in wrong_at(backend, fresh, checkpoint_of(version))]
                if spec.pause_s:
                    time.sleep(spec.pause_s)
        polls = 10_000
        start_s = time.perf_counter()
        for _ in range(polls):
            adapter.poll_requests()
        report["poll_us"] = (time.perf_counter() - start_s) / polls * 1e6


def common(spec: WorkerSpec, backend: Any) -> dict[str, Any]:
    def factory(config: TransportConfig, name: str) -> Any:
        transport = UcxxTransport(config, name)
        return TrickyTransport(transport, spec) if spec.trick in ("flip", "hang", "raise") else transport

    return {
        "coordinator": spec.endpoint,
        "secret": spec.secret,
        "spec": SPEC,
        "load_weights": unlucky(spec, backend) if spec.trick == "loader" else backend.load_weights,
        "live_tensors": backend.live_tensors,
        "sync": spec.sync,
        "transport": spec.transport,
        "transport_factory": factory,
    }


def unlucky(spec: WorkerSpec, backend: Any) -> Any:
    """A loader that raises once the bridge runs it for a version after ``trick_version``."""
    versions = 0

    def load(weights: Any) -> None:
        nonlocal versions
        versions += backend.connected
        if versions > spec.trick_version:
            raise ValueError("the loader is out of luck")
        backend.load_weights(weights)

    return load


def main() -> int:
    torch.set_num_threads(1)
    spec = msgspec.json.decode(sys.argv[1], type=WorkerSpec)
    backend = ENGINES[spec.engine](spec.rank, spec.world)
    report: dict[str, Any] = {"versions": [], "wrong": [], "superseded": []}
    try:
        (run_sender if spec.role == "sender" else run_receiver)(spec, backend, report)
    except Exception as error:
        report |= {"error": str(error), "error_kind": type(error).__name__}
    print(msgspec.json.encode(WorkerReport(**report)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
