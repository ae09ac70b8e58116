"""What workers and the coordinator say to each other on the sync plane: O(workers) messages per update.

One update, with ``S`` senders and ``R`` receivers::

    senders      ── Offer(v) ──▶ coordinator ── Announce(v) ──▶ receivers
    receivers    ── Ready(v) ──▶ coordinator ── Start(v) ─────▶ everybody      (the bytes move, worker to worker)
    senders      ── Sent(v) ───▶ coordinator
    receivers ── Verified(v) ──▶ coordinator ── Commit(v) ────▶ the ranks of a replica that is complete
                                             ── Release(v) ───▶ senders, once every replica is complete
    everybody ── Unblocked(v) ─▶ coordinator                                   (what the update cost this worker)

A membership and its plan are an *epoch*. A new one is entered in three strokes, so that no worker opens a link to a
peer that has not closed its old one yet: ``NewEpoch``/``Parted``, ``OpenLinks``/``Linked``, then updates go on.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.plan.program import Program
from rlbridge.transport.errors import (
    ConfigError,
    DeadlineExceededError,
    DigestMismatchError,
    LayoutError,
    PeerDiedError,
    PlanError,
    ProtocolError,
    RlbridgeError,
    SyncError,
    WorkerError,
)
from rlbridge.transport.protocol import TransportAddress

Role = Literal["sender", "receiver"]


def sender_name(rank: int) -> str:
    """Name of trainer rank ``rank`` on every plane."""
    return f"trainer-{rank}"


def receiver_name(replica: int, rank: int) -> str:
    """Name of rank ``rank`` of rollout replica ``replica`` on every plane."""
    return f"rollout-{replica}" if rank == 0 else f"rollout-{replica}.{rank}"


class ErrorReport(msgspec.Struct, frozen=True):
    """An error that crosses processes as data: a class of the error tree by name, and its text.

    Attributes:
        kind: name of the class; one that is not in the tree arrives as ``SyncError``.
        text: what ``str(error)`` said.
        waited: ``(who, what, after_s)`` of a ``DeadlineExceededError``.
    """

    kind: str
    text: str
    waited: tuple[str, str, float] | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        """Describe ``error``."""
        if isinstance(error, DeadlineExceededError):
            return cls(type(error).__name__, str(error), (error.who, error.what, error.after_s))
        known = type(error).__name__ in _REBUILT
        return cls(type(error).__name__, str(error) if known else f"{type(error).__name__}: {error}")

    def rebuild(self) -> RlbridgeError:
        """The error to raise where the report arrived."""
        if self.waited is not None:
            return DeadlineExceededError(*self.waited)
        return _REBUILT.get(self.kind, SyncError)(self.text)


_REBUILT: dict[str, type[RlbridgeError]] = {
    error.__name__: error
    for error in (
        ConfigError,
        DigestMismatchError,
        LayoutError,
        PeerDiedError,
        PlanError,
        ProtocolError,
        SyncError,
        WorkerError,
    )
}


class TransferStats(msgspec.Struct, frozen=True):
    """What one worker's program did in one update.

    Attributes:
        seconds: from the start of the program to its end.
        packed_bytes, sent_bytes, received_bytes: payload bytes per stage; forwarding counts as sending.
        digests_checked: buckets whose digest was compared and matched.
    """

    seconds: float = 0.0
    packed_bytes: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0
    digests_checked: int = 0


# --- worker to coordinator ---------------------------------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag=True):
    """The first message of a worker.

    Attributes:
        role, replica, rank, world: its place; senders are replica 0 of their own kind.
        address: where its transport is reached.
        layout: which checkpoint elements it holds or needs.
        spec_hash: digest of its view of the checkpoint; all must agree.
        spec: the checkpoint itself; rank 0 of each side and replica sends it, to name what differs.
        available_bytes: host memory that was available before the bridge took any; 0 if unknown.
    """

    role: Role
    replica: int
    rank: int
    world: int
    address: TransportAddress
    layout: SourceMap
    spec_hash: str
    spec: CheckpointSpec | None = None
    available_bytes: int = 0

    @property
    def worker(self) -> str:
        """The worker's name."""
        return sender_name(self.rank) if self.role == "sender" else receiver_name(self.replica, self.rank)


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Instead of ``Join``: the worker cannot take part, e.g. its layout cannot be discovered. Nothing follows."""

    role: Role
    replica: int
    rank: int
    error: ErrorReport

    @property
    def worker(self) -> str:
        """The worker's name."""
        return sender_name(self.rank) if self.role == "sender" else receiver_name(self.replica, self.rank)


class Parted(msgspec.Struct, frozen=True, tag=True):
    """Nothing runs and no link is open any more; the program of ``epoch`` is accepted."""

    epoch: int


class Linked(msgspec.Struct, frozen=True, tag=True):
    """All links of ``epoch`` are open. ``plan_hash`` proves that the worker holds the same plan as the others."""

    epoch: int
    plan_hash: str


class Offer(msgspec.Struct, frozen=True, tag=True):
    """A sender rank holds ``version``, frozen, until ``Release`` or ``Withdrawn``."""

    version: int


class Supersede(msgspec.Struct, frozen=True, tag=True):
    """A sender rank has no free snapshot for ``new``: may the waiting ``old`` be given up?"""

    old: int
    new: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A receiver has room for ``version``: its staging memory is free, or its engine stands still."""

    epoch: int
    version: int


class Verified(msgspec.Struct, frozen=True, tag=True):
    """A receiver holds all of ``version`` and every digest matched."""

    epoch: int
    version: int
    stats: TransferStats


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A sender's program for ``version`` is through: its transport has let go of every buffer."""

    epoch: int
    version: int
    stats: TransferStats


class Unblocked(msgspec.Struct, frozen=True, tag=True):
    """The worker goes on: a sender came back from ``send_weights``, a receiver computes with ``version``."""

    version: int
    stall_s: float


class LinkBroken(msgspec.Struct, frozen=True, tag=True):
    """The link to ``peer`` failed in this epoch. An observation, no verdict: either end may be to blame."""

    epoch: int
    peer: str
    error: ErrorReport


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The worker itself failed and leaves."""

    error: ErrorReport


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The worker is done; not a loss."""


FromWorker = (
    Join
    | Refused
    | Parted
    | Linked
    | Offer
    | Supersede
    | Ready
    | Sent
    | Verified
    | Unblocked
    | LinkBroken
    | Failed
    | Leave
)


# --- coordinator to worker ---------------------------------------------------------------------------------------


class NewEpoch(msgspec.Struct, frozen=True, tag=True):
    """Stop what runs, close every link, and take this program.

    Attributes:
        epoch: grows by one with each membership.
        program: this worker's part of the plan; its ``plan_hash`` is the plan's.
        peers: addresses of the workers that ``program`` talks to.
        exports: checkpoint tensors that every trainer rank exports at each version, in this order, because the loader
            of some rank computes with them: exporting may be a collective.
    """

    epoch: int
    program: Program
    peers: dict[str, TransportAddress]
    exports: tuple[str, ...] = ()


class OpenLinks(msgspec.Struct, frozen=True, tag=True):
    """Everybody has parted: open the links of ``epoch``."""

    epoch: int


class Announce(msgspec.Struct, frozen=True, tag=True):
    """To receivers: ``version`` waits; answer ``Ready`` when there is room for it."""

    epoch: int
    version: int


class Start(msgspec.Struct, frozen=True, tag=True):
    """Run the program for ``version``."""

    epoch: int
    version: int


class Commit(msgspec.Struct, frozen=True, tag=True):
    """To the ranks of a replica: all of them hold ``version``; it may be used."""

    version: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """To senders: every replica holds ``version``; its memory is free again."""

    version: int


class Withdrawn(msgspec.Struct, frozen=True, tag=True):
    """To senders: ``version`` will never be delivered, a newer one takes its place. Every rank hears the same."""

    version: int


class Kept(msgspec.Struct, frozen=True, tag=True):
    """Answer to ``Supersede``: ``version`` is under way and will be delivered."""

    version: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The bridge is over for this worker; ``error`` says why."""

    error: ErrorReport


ToWorker = NewEpoch | OpenLinks | Announce | Start | Commit | Release | Withdrawn | Kept | Stop
