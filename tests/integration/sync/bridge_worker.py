"""One worker process of the bridge tests: plain torch tensors behind an adapter. Reports one JSON object on stdout.

Run as ``python bridge_worker.py '<json of WorkerSpec>'``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import torch

from rlbridge.sync import CheckpointSpec, ReceiverAdapter, SenderAdapter, SyncConfig, TensorSpec
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.protocol import TransportAddress
from rlbridge.transport.ucxx_transport import UcxxTransport

SHAPES = {"embed": (512, 128), "up": (256, 128), "down": (128, 256), "norm": (128,)}
SPEC = CheckpointSpec({name: TensorSpec(shape, "bfloat16") for name, shape in SHAPES.items()})


class WorkerSpec(msgspec.Struct, frozen=True):
    """What one worker does."""

    role: str
    index: int
    world: int
    endpoint: str
    secret: bytes
    sync: SyncConfig
    transport: TransportConfig
    versions: int
    dtype: str = "float32"
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


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """The fp32 weights that the trainer has at ``version``."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class RowShard:
    """A backend that keeps rows ``index`` of ``world`` of every tensor."""

    def __init__(self, index: int, world: int, dtype: torch.dtype) -> None:
        self.rows = {n: slice(index * s[0] // world, (index + 1) * s[0] // world) for n, s in SHAPES.items()}
        self.tensors = {n: torch.zeros(SHAPES[n], dtype=dtype)[rows].clone() for n, rows in self.rows.items()}

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor[self.rows[name]])

    def live_tensors(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def wrong_at(self, version: int) -> list[str]:
        """Tensors that differ in any bit from what the sender exported as ``version``."""
        exported = {n: t.to(torch.bfloat16)[self.rows[n]] for n, t in weights_of(version).items()}
        return [n for n, t in self.tensors.items() if not torch.equal(t, exported[n].to(t.dtype))]


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


def run_sender(spec: WorkerSpec, backend: RowShard, report: dict[str, Any]) -> None:
    adapter = SenderAdapter(rank=spec.index, world=spec.world, **common(spec, backend))
    with adapter:
        adapter.connect()
        handles = []
        for version in range(spec.versions):
            while spec.trick == "wait" and version == spec.versions - 1 and not Path(spec.signal).exists():
                time.sleep(0.02)
            for name, tensor in weights_of(version).items():
                backend.tensors[name].copy_(tensor[backend.rows[name]])
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
            for name in backend.tensors:  # what is not copied by now must not be sent any more
                backend.tensors[name].fill_(float("nan"))
        for handle in handles:
            (report["versions"] if handle.wait(30.0) else report["superseded"]).append(handle.version)


def run_receiver(spec: WorkerSpec, backend: RowShard, report: dict[str, Any]) -> None:
    news = threading.Event()
    adapter = ReceiverAdapter(replica=spec.index, on_news=news.set, **common(spec, backend))
    with adapter:
        adapter.connect()
        if spec.trick == "sleep":
            time.sleep(60)
        while adapter.version != spec.versions - 1:
            if not adapter.has_news and not news.wait(60.0):
                raise TimeoutError("no news for a minute")
            news.clear()
            version = adapter.poll_requests()
            if version is not None:
                report["versions"].append(version)
                report["wrong"] += [f"{name} at {version}" for name in backend.wrong_at(version)]
                if spec.pause_s:
                    time.sleep(spec.pause_s)
        polls = 10_000
        start_s = time.perf_counter()
        for _ in range(polls):
            adapter.poll_requests()
        report["poll_us"] = (time.perf_counter() - start_s) / polls * 1e6


def common(spec: WorkerSpec, backend: RowShard) -> dict[str, Any]:
    def factory(config: TransportConfig, name: str) -> Any:
        transport = UcxxTransport(config, name)
        return TrickyTransport(transport, spec) if spec.trick in ("flip", "hang", "raise") else transport

    return {
        "coordinator": spec.endpoint,
        "secret": spec.secret,
        "spec": SPEC,
        "load_weights": backend.load_weights,
        "live_tensors": backend.live_tensors,
        "sync": spec.sync,
        "transport": spec.transport,
        "transport_factory": factory,
    }


def main() -> int:
    torch.set_num_threads(1)
    spec = msgspec.json.decode(sys.argv[1], type=WorkerSpec)
    is_sender = spec.role == "sender"
    backend = RowShard(spec.index if is_sender else 0, spec.world if is_sender else 1, getattr(torch, spec.dtype))
    report: dict[str, Any] = {"versions": [], "wrong": [], "superseded": []}
    try:
        (run_sender if is_sender else run_receiver)(spec, backend, report)
    except Exception as error:
        report |= {"error": str(error), "error_kind": type(error).__name__}
    print(msgspec.json.encode(WorkerReport(**report)).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
