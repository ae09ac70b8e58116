"""One version on its way, and what is known about versions that landed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlbridge.sync import messages as m
from rlbridge.sync.reports import UpdateStats


@dataclass(slots=True)
class Update:
    """The version under way: who verified it, which replicas may use it, whether the senders' memory is free."""

    version: int
    verified: set[str] = field(default_factory=set)
    committed: set[int] = field(default_factory=set)
    released: bool = False


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
