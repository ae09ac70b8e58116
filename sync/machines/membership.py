"""Who takes part: what was expected, who joined, who is left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from rlbridge.sync import messages as m
from rlbridge.sync.formats import differences
from rlbridge.sync.plan.program import Program
from rlbridge.transport.errors import ConfigError, LayoutError, ProtocolError
from rlbridge.transport.protocol import TransportAddress


@dataclass(slots=True)
class Membership:
    """The workers of one job.

    Args:
        senders: trainer ranks; all of them, always.
        receivers: ranks of each rollout replica that the first epoch waits for. Other replicas may join later.
    """

    senders: int
    receivers: dict[int, int]
    joined: dict[str, m.Join] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.senders < 1 or not self.receivers or min(self.receivers.values()) < 1:
            raise ConfigError(
                f"a bridge needs at least one sender and one receiver of at least one rank, "
                f"got {self.senders} senders and receivers {dict(self.receivers)}"
            )

    def add(self, join: m.Join) -> None:
        """Take a worker in.

        Raises:
            ProtocolError: it is not expected, or there already.
            LayoutError: it sees another checkpoint than the others.
        """
        if join.worker in self.joined:
            raise ProtocolError(f"{join.worker} joined twice; give every worker its own replica and rank")
        world = self.senders if join.role == "sender" else self._ranks(join.replica, join.world)
        if join.world != world or not 0 <= join.rank < world:
            raise ProtocolError(f"{join.worker} says rank {join.rank} of {join.world}, expected {world} ranks")
        if join.worker == m.sender_name(0) and join.spec is None:
            raise ProtocolError(f"{join.worker} did not send the checkpoint's spec")
        for other in self.joined.values():
            if _compared(join, other) and other.spec_hash != join.spec_hash:
                raise _different(join, other)
        self.joined[join.worker] = self._sharing(join)

    def _sharing(self, join: m.Join) -> m.Join:
        """``join`` with the one spec in memory that all have: a large checkpoint's has megabytes."""
        known = next((other.spec for other in self.joined.values() if other.spec is not None), None)
        return msgspec.structs.replace(join, spec=known) if join.spec is not None and known is not None else join

    def _ranks(self, replica: int, said: int) -> int:
        here = [join.world for join in self.joined.values() if join.role == "receiver" and join.replica == replica]
        return here[0] if here else self.receivers.get(replica, said)

    def missing(self) -> list[str]:
        """Who is expected for the first epoch and has not joined."""
        expected = [m.sender_name(rank) for rank in range(self.senders)]
        expected += [m.receiver_name(r, rank) for r, ranks in sorted(self.receivers.items()) for rank in range(ranks)]
        return [worker for worker in expected if worker not in self.joined]

    def sender_names(self) -> list[str]:
        """The senders that joined, by rank."""
        return sorted((w for w, j in self.joined.items() if j.role == "sender"), key=lambda w: self.joined[w].rank)

    def replicas(self) -> dict[int, list[str]]:
        """Replicas of which every rank is here, and their workers by rank."""
        found: dict[int, list[m.Join]] = {}
        for join in self.joined.values():
            if join.role == "receiver":
                found.setdefault(join.replica, []).append(join)
        return {
            replica: [join.worker for join in sorted(joins, key=lambda join: join.rank)]
            for replica, joins in sorted(found.items())
            if len(joins) == joins[0].world
        }

    def incomplete(self) -> dict[int, list[str]]:
        """Replicas of which some ranks are here and others are not, and who these are."""
        here = {join.replica: join.world for join in self.joined.values() if join.role == "receiver"}
        names = {replica: [m.receiver_name(replica, rank) for rank in range(world)] for replica, world in here.items()}
        absent = {replica: [name for name in ranks if name not in self.joined] for replica, ranks in names.items()}
        return {replica: ranks for replica, ranks in sorted(absent.items()) if ranks}

    def replicas_among(self, workers: list[str]) -> list[int]:
        """The replicas that these workers belong to, in their order, each once; senders belong to none."""
        joins = [self.joined[worker] for worker in workers if worker in self.joined]
        return list(dict.fromkeys(join.replica for join in joins if join.role == "receiver"))

    def receivers_among(self, workers: Iterable[str]) -> list[str]:
        """Those of ``workers`` that are receivers and still here."""
        return [w for w in workers if w in self.joined and self.joined[w].role == "receiver"]

    def addresses(self, program: Program) -> dict[str, TransportAddress]:
        """Where the workers are that ``program`` talks to."""
        peers = {peer for bucket in program.buckets for peer in (*bucket.send_to, bucket.recv_from) if peer}
        return {peer: self.joined[peer].address for peer in sorted(peers)}

    def remove_replica(self, replica: int) -> list[str]:
        """Forget every rank of ``replica`` that joined; returns their names."""
        gone = [w for w, j in self.joined.items() if j.role == "receiver" and j.replica == replica]
        for worker in gone:
            del self.joined[worker]
        return gone


def _compared(join: m.Join, other: m.Join) -> bool:
    """Ranks of one side or replica with each other, and the rank 0 of each, which send their specs, with all others.

    So the first difference that is found can be named, whoever joins first; in the end everybody is compared.
    """
    together = (join.role, join.replica) == (other.role, other.replica)
    return together or join.rank == other.rank == 0


def _different(join: m.Join, other: m.Join) -> LayoutError:
    named = differences(join.worker, join.spec, other.worker, other.spec) if join.spec and other.spec else ""
    return LayoutError(
        f"{join.worker} and {other.worker} see different checkpoints:"
        + (named or " compare names, shapes, dtypes")
        + "\nGive trainer and rollouts the same checkpoint format: the model directory, or what loads it, differs."
    )
