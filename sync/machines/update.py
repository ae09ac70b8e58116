"""Versions: offered, on their way, landed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlbridge.sync import messages as m
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.reports import CoordinatorEvent, ReplicaAt, UpdateDone, UpdateStats


@dataclass(slots=True)
class Update:
    """The version under way: who verified it, which replicas may use it, whether the senders' memory is free."""

    version: int
    verified: set[str] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    released: bool = False


@dataclass(slots=True)
class Offers:
    """Versions that senders hold and that have not begun.

    Attributes:
        by: version to the sender ranks that offered it so far.
        withdrawn: versions that are given up for newer ones; one decision for all ranks.
        newest: the newest version that began; nothing older is accepted.
    """

    by: dict[int, set[str]] = field(default_factory=dict)
    withdrawn: set[int] = field(default_factory=set)
    newest: int | None = None

    def began(self, version: int) -> bool:
        """Whether ``version`` is under way or delivered, or older than that."""
        return self.newest is not None and version <= self.newest

    def complete(self, members: Membership) -> list[int]:
        """Versions that every sender rank offered, oldest first."""
        senders = set(members.sender_names())
        if len(senders) < members.senders:
            return []
        return sorted(version for version, by in self.by.items() if by >= senders)

    def begin(self, version: int) -> Update:
        """Take ``version`` out: it is under way."""
        del self.by[version]
        self.newest = version
        self.withdrawn = {old for old in self.withdrawn if old > version}
        return Update(version)

    def withdraw(self, version: int) -> None:
        """Give ``version`` up."""
        self.withdrawn.add(version)
        self.by.pop(version, None)

    def missing(self, members: Membership) -> list[str]:
        """Sender ranks that have not offered the oldest version that others did."""
        by = self.by[min(self.by)]
        return [name for rank in range(members.senders) if (name := m.sender_name(rank)) not in by]


@dataclass(slots=True)
class Ledger:
    """What one version cost, gathered until every worker goes on.

    Attributes:
        blocked: receivers that were told to commit and have not said yet that they compute with it, and since when.
        sender_stall_s, receiver_stall_s: seconds by worker, as they say so.
        landed: the transfer is over.
    """

    version: int
    blocked: dict[str, float] = field(default_factory=dict)
    sender_stall_s: dict[str, float] = field(default_factory=dict)
    receiver_stall_s: dict[str, float] = field(default_factory=dict)
    landed: bool = False
    started_s: float | None = None
    verified_s: float = 0.0
    lower_bound_s: float = 0.0
    sent_bytes: int = 0
    egress_bytes: int = 0
    digests: int = 0

    def start(self, now_s: float, lower_bound_s: float) -> None:
        """A transfer began; repeats after a loss count from the first."""
        self.started_s = now_s if self.started_s is None else self.started_s
        self.lower_bound_s = lower_bound_s

    def count(self, message: m.Sent | m.Verified, now_s: float) -> None:
        """Add what one program did."""
        self.sent_bytes += message.stats.sent_bytes
        self.digests += message.stats.digests_checked
        if isinstance(message, m.Sent):
            self.egress_bytes += message.stats.sent_bytes
        else:
            self.verified_s = max(self.verified_s, now_s)

    def stats(self) -> UpdateStats:
        """The summary for the host."""
        return UpdateStats(
            version=self.version,
            bytes_total=self.sent_bytes,
            trainer_egress_bytes=self.egress_bytes,
            transfer_s=self.verified_s - self.started_s if self.started_s is not None else 0.0,
            lower_bound_s=self.lower_bound_s,
            sender_stall_s=self.sender_stall_s,
            receiver_stall_s=self.receiver_stall_s,
            digests_checked=self.digests,
        )


class Ledgers:
    """The open ledgers: of the version under way, of newer snapshots, and of versions that somebody has yet to use."""

    def __init__(self, members: Membership) -> None:
        self._members = members
        self._open: dict[int, Ledger] = {}

    def of(self, version: int) -> Ledger:
        """The ledger of ``version``, opened if need be."""
        return self._open.setdefault(version, Ledger(version))

    def discard(self, version: int) -> None:
        """``version`` is given up."""
        self._open.pop(version, None)

    def unblocked(self, join: m.Join, message: m.Unblocked, *, began: bool) -> list[CoordinatorEvent]:
        """A worker goes on."""
        if began and message.version not in self._open:
            return []  # the last word about a version that was given up or closed without this worker
        ledger = self.of(message.version)
        stalls = ledger.sender_stall_s if join.role == "sender" else ledger.receiver_stall_s
        stalls[join.worker] = message.stall_s
        was_blocked = ledger.blocked.pop(join.worker, None) is not None
        others = [self._members.joined[worker].replica for worker in ledger.blocked]
        told: list[CoordinatorEvent] = []
        ranks = {m.receiver_name(join.replica, rank) for rank in range(join.world)}  # one may have left without it
        if was_blocked and join.replica not in others and ledger.receiver_stall_s.keys() >= ranks:
            told.append(ReplicaAt(join.replica, message.version))
        return told + self.close()

    def forget(self, gone: list[str]) -> None:
        """Do not wait for these any more."""
        for ledger in self._open.values():
            for worker in gone:
                ledger.blocked.pop(worker, None)

    def close(self) -> list[CoordinatorEvent]:
        """Close what landed and blocks nobody any more."""
        senders = set(self._members.sender_names())
        done = [
            ledger
            for ledger in self._open.values()
            if ledger.landed and not ledger.blocked and ledger.sender_stall_s.keys() >= senders
        ]
        for ledger in done:
            del self._open[ledger.version]
        return [UpdateDone(ledger.version, ledger.stats()) for ledger in done]

    def longest_blocked(self) -> tuple[float, str, int] | None:
        """Since when, who and by which version."""
        return min(
            ((since, worker, book.version) for book in self._open.values() for worker, since in book.blocked.items()),
            default=None,
        )
