"""What a mode costs in memory, and what is refused for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy, SyncConfig, SyncMode
from rlbridge.sync.host_memory import available_bytes
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import TensorSpec
from rlbridge.sync.memory import MemoryCost, memory_cost, refuse_beyond
from rlbridge.sync.plan.program import HEADER_BYTES, BucketProgram, Piece, Program
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import ConfigError
from rlbridge.transport.protocol import TransportAddress

BUCKET, BUCKETS = 1000, 3
FULL = HEADER_BYTES + BUCKET


def join(role: m.Role, runtime: dict[str, TensorSpec], *, host: str = "a", available: int = 0, rank: int = 0) -> m.Join:
    boxes = [Box(name, name, (0,), (1,), (1,), 0, (1,)) for name in runtime if name != "unused"]
    address = TransportAddress("none", host, ())
    return m.Join(role, 0, rank, 2, address, SourceMap(runtime, boxes), "h", None, available)


def program(*, relayed: int = 0) -> Program:
    piece = Piece("w", 0, (1,), (1,), "float32", 0)
    parts = [BucketProgram(i, BUCKET, "t", (), () if i < relayed else (piece,)) for i in range(BUCKETS)]
    return Program("w", "hash", ("w",), tuple(parts))


def cost(
    join: m.Join, mode: SyncMode, on_busy: OnBusy = OnBusy.SUPERSEDE, staging: int = 10**6, relayed: int = 0
) -> MemoryCost:
    sync, transport = SyncConfig(mode=mode, on_busy=on_busy), TransportConfig(staging_bytes=staging)
    return memory_cost(join, program(relayed=relayed), sync, transport)


SENT = {
    "w": TensorSpec((100, 10), "float32"),
    "export:n": TensorSpec((50,), "bfloat16"),
    "unused": TensorSpec((9,), "int8"),
}
TAKEN = {
    "w": TensorSpec((100, 10), "bfloat16"),
    "whole:a": TensorSpec((50,), "bfloat16"),
    "whole:b": TensorSpec((30,), "int8"),
}


@pytest.mark.parametrize(("on_busy", "slots"), [(OnBusy.SUPERSEDE, 2), (OnBusy.QUEUE, 2), (OnBusy.BLOCK, 1)])
@pytest.mark.parametrize("mode", [SyncMode.SENDER_STAGED, SyncMode.FULLY_ASYNC])
def test_a_staged_sender_pays_for_each_slot(mode: SyncMode, on_busy: OnBusy, slots: int) -> None:
    found = cost(join("sender", SENT), mode, on_busy)
    assert found == MemoryCost(snapshot_bytes=slots * (4000 + 100), whole_bytes=100, pool_bytes=BUCKETS * FULL)
    assert found.total_bytes == slots * 4100 + 100 + BUCKETS * FULL


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.RECEIVER_STAGED])
def test_an_unstaged_sender_pays_for_exports_and_buckets_only(mode: SyncMode) -> None:
    assert cost(join("sender", SENT), mode) == MemoryCost(whole_bytes=100, pool_bytes=BUCKETS * FULL)


@pytest.mark.parametrize("mode", [SyncMode.RECEIVER_STAGED, SyncMode.FULLY_ASYNC])
def test_a_staged_receiver_pays_for_what_it_keeps_and_one_whole_tensor(mode: SyncMode) -> None:
    found = cost(join("receiver", TAKEN), mode, staging=2 * FULL, relayed=1)
    assert found == MemoryCost(staging_bytes=2 * FULL, whole_bytes=100, pool_bytes=2 * FULL)


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.SENDER_STAGED])
def test_an_unstaged_receiver_stays_within_the_bucket_budget(mode: SyncMode) -> None:
    found = cost(join("receiver", TAKEN), mode, staging=2 * FULL)
    assert found == MemoryCost(whole_bytes=130, pool_bytes=2 * FULL - 130)
    assert found.total_bytes == 2 * FULL


def test_a_bucket_larger_than_the_budget_is_counted_whole() -> None:
    assert cost(join("sender", SENT), SyncMode.FULLY_SYNC, staging=10).pool_bytes == FULL


COSTS = {"trainer-0": MemoryCost(snapshot_bytes=600, pool_bytes=100), "rollout-0": MemoryCost(staging_bytes=300)}


def members(available: int, host: str = "a") -> list[m.Join]:
    return [join("sender", SENT, available=available), join("receiver", TAKEN, available=available // 2, host=host)]


def test_a_budget_counts_each_worker_and_the_refusal_names_bytes_budget_and_mends() -> None:
    refuse_beyond(COSTS, members(1), SyncConfig(mode=SyncMode.FULLY_ASYNC, memory_bytes=700))
    with pytest.raises(ConfigError) as caught:
        refuse_beyond(COSTS, members(10**9), SyncConfig(mode=SyncMode.FULLY_ASYNC, memory_bytes=699))
    text = str(caught.value)
    assert "sync=fully_async needs 700 bytes of host memory, more than sync.memory_bytes=699" in text
    assert "trainer-0: 700 bytes (snapshots 600, bucket buffers 100)" in text
    assert "rollout-0" not in text
    assert "sync.on_busy=block" in text
    assert "without sender staging" in text
    assert "receiver staging" not in text


def test_without_a_budget_the_workers_of_a_host_share_what_it_has() -> None:
    refuse_beyond(COSTS, members(1000), SyncConfig(mode=SyncMode.FULLY_ASYNC))
    refuse_beyond(COSTS, members(0), SyncConfig(mode=SyncMode.FULLY_ASYNC))  # nobody knows
    refuse_beyond(COSTS, members(700, host="b"), SyncConfig(mode=SyncMode.FULLY_ASYNC))
    with pytest.raises(ConfigError, match=r"needs 1000 bytes .* more than 999 bytes available on a") as caught:
        refuse_beyond(COSTS, members(999), SyncConfig(mode=SyncMode.FULLY_ASYNC, on_busy=OnBusy.BLOCK))
    assert "without receiver staging" in str(caught.value)
    assert "on_busy" not in str(caught.value)


def test_a_containers_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10_000))
    assert available_bytes(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("max\n")
    assert available_bytes(tmp_path) == 10_000
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 500\n")
    assert available_bytes(tmp_path) == 2_500
