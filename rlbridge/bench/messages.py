"""What the benchmark and its workers say to each other, over the workers' standard input and output."""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec

from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.messages import TransferStats
from rlbridge.sync.plan.program import Program
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.protocol import TransportAddress

LENGTH = struct.Struct("<I")
"""Before every message."""


class Way(StrEnum):
    """How the buckets of a program travel."""

    FULL = "full"
    """The executor: pack, digest, send, check, unpack."""
    CARRY = "carry"
    """The transport alone, from and to buffers that are there already."""
    BARE = "bare"
    """UCXX's core API alone, the same buffers, all posted at once."""


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message: who the worker is. Answered by ``Ready``."""

    config: TransportConfig
    layout: SourceMap
    sends: bool
    bare: bool


class Load(msgspec.Struct, frozen=True, tag=True):
    """The worker's program of every plan, and its peers. Answered by ``Done`` once its links are open."""

    programs: dict[str, Program]
    peers: dict[str, TransportAddress]
    bare_peers: dict[str, bytes]


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Senders write the values of ``version``, receivers forget theirs. Answered by ``Done``."""

    version: int


class Run(msgspec.Struct, frozen=True, tag=True):
    """Run the program of ``plan``. Answered by ``Ran``."""

    plan: str
    way: Way
    version: int


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare what landed with the values of ``version``. Answered by ``Checked``."""

    version: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """Where others reach the worker."""

    address: TransportAddress
    bare_address: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class Ran(msgspec.Struct, frozen=True, tag=True):
    """One run.

    Attributes:
        begin_s, end_s: on the clock that all processes of a machine share.
        step_s: seconds spent in each step; steps overlap.
        peak_staging_bytes: most bytes of bucket buffers so far.
    """

    begin_s: float
    end_s: float
    stats: TransferStats
    step_s: dict[str, float]
    peak_staging_bytes: int


class Checked(msgspec.Struct, frozen=True, tag=True):
    """How many elements are wrong."""

    wrong_elements: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker gives up; ``text`` says why."""

    text: str


ToWorker = Setup | Load | Fill | Run | Check
FromWorker = Ready | Done | Ran | Checked | Failed


def frame(message: ToWorker | FromWorker) -> bytes:
    """``message`` with its length before it."""
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
