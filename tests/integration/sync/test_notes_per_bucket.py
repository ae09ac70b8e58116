"""What two UCX workers say to each other about an update: a few notes for each bucket, whatever is in it."""

from __future__ import annotations

from collections import Counter

import anyio
import pytest
import torch

from rlbridge.sync.executor import BufferPool, Execution, Staging
from rlbridge.sync.machines.events import Treatment
from rlbridge.sync.packing import prepare
from rlbridge.sync.plan.program import BucketProgram, Piece, Program
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.ucx_link import UcxLink
from rlbridge.transport.ucx_notes import NoteKind
from rlbridge.transport.ucxx_transport import UcxxTransport

pytestmark = pytest.mark.anyio

PARAMETERS, ELEMENTS, BUCKETS = 600, 64, 6


def program(worker: str) -> Program:
    """``a`` sends 600 parameters, in 6 buckets, to ``b``."""
    each = PARAMETERS // BUCKETS
    recv_from, send_to = (None, ("b",)) if worker == "a" else ("a", ())
    buckets = tuple(
        BucketProgram(
            number,
            each * ELEMENTS * 4,
            recv_from,
            send_to,
            tuple(
                Piece(f"p{number * each + i}", 0, (ELEMENTS,), (1,), "float32", i * ELEMENTS * 4) for i in range(each)
            ),
        )
        for number in range(BUCKETS)
    )
    return Program(worker, "hash", ("a", "b"), buckets)


async def test_notes_are_counted_by_buckets_not_by_parameters(monkeypatch):
    notes: Counter[NoteKind] = Counter()
    say = UcxLink._say

    def counted(link, kind, *args):
        notes[kind] += 1
        say(link, kind, *args)

    monkeypatch.setattr(UcxLink, "_say", counted)
    weights = {"a": torch.randn(PARAMETERS, ELEMENTS), "b": torch.zeros(PARAMETERS, ELEMENTS)}
    config = TransportConfig()
    async with UcxxTransport.open(config, "a") as a, UcxxTransport.open(config, "b") as b:
        transports = {"a": a, "b": b}

        async def run(name: str, version: int) -> None:
            mine = program(name)
            tensors = {f"p{i}": weights[name][i] for i in range(PARAMETERS)}
            await Execution(
                program=mine,
                transport=transports[name],
                epoch=1,
                version=version,
                treatment=Treatment.SEND if name == "a" else Treatment.UNPACK,
                prepared={bucket.bucket: prepare(bucket, tensors) for bucket in mine.buckets},
                pool=BufferPool(config.staging_bytes),
                staging=Staging(),
            ).run()

        await a.connect("b", b.address)
        await b.connect("a", a.address)
        for version in (1, 2):
            notes.clear()
            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run, "a", version)
                    tasks.start_soon(run, "b", version)
            assert notes == {NoteKind.OFFER: BUCKETS, NoteKind.ACCEPT: BUCKETS}
    assert torch.equal(weights["a"], weights["b"])
