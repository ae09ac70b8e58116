"""The coordinator's decisions: gather, plan, link; then per update announce, start, commit, release.

One rule covers every loss: drop the replica, and if anything is under way make a new epoch of those that are left and
deliver the version again. Receivers that hold it already relay only, so nothing is applied twice.
"""

from __future__ import annotations

from enum import Enum

from rlbridge.sync import messages as m
from rlbridge.sync.machines.coordinator_events import (
    Event,
    Finish,
    Gone,
    Heard,
    Instruction,
    Lose,
    MakePlan,
    NoPlan,
    Planned,
    Publish,
    Tell,
    Tick,
)
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.update import Ledger, Update
from rlbridge.sync.reports import PlanMade, ReplicaAt, ReplicaLost, UpdateDone
from rlbridge.transport.errors import (
    DeadlineExceededError,
    LayoutError,
    PeerDiedError,
    PlanError,
    ProtocolError,
    RlbridgeError,
    WorkerError,
)

VERDICT_S = 1.0
"""After a link broke: seconds in which a death may explain it, before the same members try again."""
MAX_BREAKS = 2
"""Unexplained breaks of one update that are answered by trying again; the next one costs a replica."""


class Phase(Enum):
    """What the coordinator waits for."""

    GATHERING = "the first members"
    PLANNING = "a plan"
    PARTING = "closing of the old links"
    LINKING = "opening of the new links"
    IDLE = "a version that every sender offers"
    READYING = "room for the version (is poll_requests called between inference steps?)"
    MOVING = "end of the transfer"
    ENDED = "nothing"


class CoordinatorMachine:
    """Takes one event at a time, with the time it happened; returns what to do, in order.

    Args:
        membership: who is expected.
        connect_timeout_s: deadline for joining, parting and linking.
        update_timeout_s: deadline for each phase of an update.
        now_s: monotonic seconds; joining counts from here.
    """

    def __init__(
        self, membership: Membership, *, connect_timeout_s: float, update_timeout_s: float, now_s: float
    ) -> None:
        self.members = membership
        self.phase = Phase.GATHERING
        self.epoch = 0
        self.update: Update | None = None
        self.delivered: int | None = None
        self._connect_timeout_s, self._update_timeout_s = connect_timeout_s, update_timeout_s
        self._phase_since_s = now_s
        self._verdict_s: float | None = None
        self._breaks: list[tuple[str, str, RlbridgeError]] = []
        self._unexplained = 0
        self._stale = True
        self._plan: Planned | None = None
        self._waiting: set[str] = set()
        self._offers: dict[int, set[str]] = {}
        self._withdrawn: set[int] = set()
        self._ledgers: dict[int, Ledger] = {}
        self._now_s = now_s

    # --- time ------------------------------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        """When ``Tick`` has something to do, if nothing else happens before."""
        blocked = [since for ledger in self._ledgers.values() for since in ledger.blocked.values()]
        ends = [since + self._update_timeout_s for since in blocked]
        if self._phase_timeout_s() is not None:
            ends.append(self._phase_since_s + (self._phase_timeout_s() or 0.0))
        if self._verdict_s is not None:
            ends.append(self._verdict_s)
        return min(ends, default=None)

    def _phase_timeout_s(self) -> float | None:
        match self.phase:
            case Phase.GATHERING | Phase.PARTING | Phase.LINKING:
                return self._connect_timeout_s
            case Phase.READYING | Phase.MOVING:
                return self._update_timeout_s
            case Phase.IDLE if self._offers:
                return self._update_timeout_s
            case _:
                return None

    def _enter(self, phase: Phase, waiting: list[str] | None = None) -> None:
        self.phase, self._phase_since_s = phase, self._now_s
        self._waiting = set(waiting or ())
        self._verdict_s, self._breaks = None, []

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now_s: float) -> list[Instruction]:
        """Take one event that happened at ``now_s``."""
        if self.phase is Phase.ENDED:
            return []
        self._now_s = now_s
        match event:
            case Heard(worker, message):
                todo = self._on_message(worker, message)
            case Gone(worker, reason):
                todo = self._on_failure(worker, PeerDiedError(f"{worker}: {reason}"))
            case Lose(replica, reason):
                todo = self._drop(replica, PeerDiedError(f"rollout replica {replica}: {reason}"))
            case Planned():
                todo = self._on_planned(event)
            case NoPlan(epoch, error):
                todo = self._finish(error) if epoch == self.epoch else []
            case Tick():
                todo = self._on_tick()
        return todo + self._advance()

    def _on_message(self, worker: str, message: m.FromWorker) -> list[Instruction]:
        if isinstance(message, m.Join):
            return self._on_join(message)
        if worker not in self.members.joined:
            return []  # dropped; its channel ends soon
        match message:
            case m.Parted(epoch) | m.Linked(epoch):
                return self._on_epoch_step(worker, message, epoch)
            case m.Offer(version):
                return self._on_offer(worker, version)
            case m.Supersede(old):
                return self._on_supersede(worker, old)
            case m.Ready(epoch, version):
                if self._answered(worker, Phase.READYING, epoch) and not self._waiting:
                    return self._start()
            case m.Sent() | m.Verified():
                return self._on_executed(worker, message)
            case m.Unblocked(version, stall_s):
                return self._on_unblocked(worker, version, stall_s)
            case m.LinkBroken(epoch, peer, error):
                self._on_link_broken(worker, epoch, peer, error.rebuild())
            case m.Failed(error):
                return self._on_failure(worker, error.rebuild())
            case m.Leave():
                return self._on_leave(worker)
        return []

    def _answered(self, worker: str, phase: Phase, epoch: int) -> bool:
        if self.phase is not phase or epoch != self.epoch:
            return False
        self._waiting.discard(worker)
        return True

    # --- membership ------------------------------------------------------------------------------------------------

    def _on_join(self, join: m.Join) -> list[Instruction]:
        try:
            self.members.add(join)
        except (ProtocolError, LayoutError) as error:
            if self.phase is Phase.GATHERING:
                return self._finish(error)
            return [Tell(join.worker, m.Stop(m.ErrorReport.of(error)))]
        self._stale = True
        return []

    def _on_failure(self, worker: str, error: RlbridgeError) -> list[Instruction]:
        join = self.members.joined.get(worker)
        if join is None:
            return []  # dropped before
        return self._finish(error) if join.role == "sender" else self._drop(join.replica, error)

    def _drop(self, replica: int, error: RlbridgeError) -> list[Instruction]:
        gone = self.members.remove_replica(replica)
        expected = self.phase is Phase.GATHERING and self.members.receivers.pop(replica, None) is not None
        if not gone and not expected:
            return []
        todo: list[Instruction] = [Tell(worker, m.Stop(m.ErrorReport.of(error))) for worker in gone]
        todo.append(Publish(ReplicaLost(replica, str(error))))
        if self.phase is Phase.GATHERING:
            return todo if self.members.receivers else todo + self._finish(error)
        if not self.members.joined:
            return todo + self._forget(gone) + self._finish(None)
        if not self.members.replicas() and self.members.sender_names():
            return todo + self._finish(error)
        return todo + self._forget(gone)

    def _on_leave(self, worker: str) -> list[Instruction]:
        join = self.members.joined.pop(worker)
        if not self.members.joined:
            return [*self._forget([worker]), *self._finish(None)]
        if self.update is not None and not self.update.released:
            if join.role == "sender":
                return self._finish(WorkerError(f"{worker} left while version {self.update.version} was under way"))
            if not self.members.replicas():
                return self._finish(WorkerError(f"{worker}, the last receiver, left during an update"))
        return self._forget([worker])

    def _forget(self, gone: list[str]) -> list[Instruction]:
        """Go on without ``gone``, which are no members any more: land what they held up, then plan again if needed."""
        self._stale = True
        self._waiting.difference_update(gone)
        for ledger in self._ledgers.values():
            for worker in gone:
                ledger.blocked.pop(worker, None)
        todo = self._land()
        linking = self.phase in (Phase.PARTING, Phase.LINKING)
        if linking or (self.update is not None and not self.update.released and self.phase is not Phase.PLANNING):
            todo += self._make_plan()
        for version in list(self._ledgers):
            todo += self._close_ledger(version)
        return todo

    # --- epochs ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> list[Instruction]:
        if len(self.members.sender_names()) < self.members.senders:
            self._enter(Phase.IDLE)  # a sender left in peace: there will be no more versions
            return []
        if not self.members.replicas():
            self._enter(Phase.IDLE)
            return []
        self._stale = False
        self.epoch += 1
        self._enter(Phase.PLANNING)
        todo = self._land()
        workers = self.members.sender_names() + [w for ranks in self.members.replicas().values() for w in ranks]
        return [*todo, MakePlan(self.epoch, tuple(self.members.joined[worker] for worker in workers))]

    def _on_planned(self, plan: Planned) -> list[Instruction]:
        if plan.epoch != self.epoch:
            return []
        if self._stale:
            return self._make_plan()
        self._plan = plan
        self._enter(Phase.PARTING, list(plan.programs))
        todo: list[Instruction] = []
        for worker, program in plan.programs.items():
            talks_to = {peer for bucket in program.buckets for peer in (*bucket.send_to, bucket.recv_from) if peer}
            peers = {peer: self.members.joined[peer].address for peer in sorted(talks_to)}
            todo.append(Tell(worker, m.NewEpoch(plan.epoch, program, peers)))
        return todo

    def _on_epoch_step(self, worker: str, message: m.Parted | m.Linked, epoch: int) -> list[Instruction]:
        plan = self._plan
        phase = Phase.PARTING if isinstance(message, m.Parted) else Phase.LINKING
        if plan is None or not self._answered(worker, phase, epoch):
            return []
        if isinstance(message, m.Linked) and message.plan_hash != plan.plan_hash:
            return self._finish(PlanError(f"{worker} holds plan {message.plan_hash}, not {plan.plan_hash}"))
        if self._waiting:
            return []
        if phase is Phase.PARTING:
            self._enter(Phase.LINKING, list(plan.programs))
            return [Tell(peer, m.OpenLinks(epoch)) for peer in plan.programs]
        self._enter(Phase.IDLE)
        todo: list[Instruction] = [Publish(PlanMade(epoch, plan.plan_hash, list(plan.programs), plan.report))]
        return todo + self._announce() if self.update is not None else todo

    def _on_link_broken(self, worker: str, epoch: int, peer: str, error: RlbridgeError) -> None:
        if epoch != self.epoch or self.phase not in (Phase.LINKING, Phase.MOVING):
            return
        self._breaks.append((worker, peer, error))
        if self._verdict_s is None:
            self._verdict_s = self._now_s + VERDICT_S

    def _judge_break(self) -> list[Instruction]:
        """Nobody died, yet a link broke: try again, and after ``MAX_BREAKS`` tries give up its receiving end."""
        worker, peer, error = self._breaks[0]
        self._unexplained += 1
        if self._unexplained <= MAX_BREAKS:
            return self._make_plan()
        ends = [self.members.joined[end] for end in (peer, worker) if end in self.members.joined]
        receiver = next((join for join in ends if join.role == "receiver"), None)
        if receiver is None:
            return self._finish(error)
        return self._drop(receiver.replica, error)

    # --- updates ---------------------------------------------------------------------------------------------------

    def _advance(self) -> list[Instruction]:
        """Whatever can begin now."""
        if self.phase is Phase.GATHERING and not self.members.missing():
            return self._make_plan()
        if self.phase is not Phase.IDLE or self.update is not None:
            return []
        senders = set(self.members.sender_names())
        offered = [v for v, by in self._offers.items() if by >= senders and len(by) == self.members.senders]
        if not offered:
            return []
        if not self.members.replicas():
            return self._finish(WorkerError(f"no rollout replica is left to receive version {min(offered)}"))
        if self._stale:
            return self._make_plan()
        version = min(offered)
        del self._offers[version]
        self.update = Update(version)
        self._unexplained = 0
        return self._announce()

    def _announce(self) -> list[Instruction]:
        update, receivers = self.update, self._receivers()
        if update is None:
            return []
        self._enter(Phase.READYING, receivers)
        return [Tell(worker, m.Announce(self.epoch, update.version)) for worker in receivers]

    def _receivers(self) -> list[str]:
        """Receivers of the plan that are still members."""
        programs = self._plan.programs if self._plan is not None else {}
        return [w for w in programs if w in self.members.joined and self.members.joined[w].role == "receiver"]

    def _ledger(self, version: int) -> Ledger:
        return self._ledgers.setdefault(version, Ledger(version))

    def _on_offer(self, worker: str, version: int) -> list[Instruction]:
        newest = self.update.version if self.update is not None else self.delivered
        if version in self._withdrawn:
            return []  # crossed the withdrawal, which every sender hears
        if newest is not None and version <= newest:
            return self._finish(ProtocolError(f"{worker} offers version {version} after {newest}: versions only grow"))
        if not self._offers and self.phase is Phase.IDLE:
            self._phase_since_s = self._now_s
        self._offers.setdefault(version, set()).add(worker)
        return []

    def _on_supersede(self, worker: str, old: int) -> list[Instruction]:
        if old in self._withdrawn:
            return []  # another rank asked first, and every sender heard
        newest = self.update.version if self.update is not None else self.delivered
        if newest is not None and old <= newest:
            return [Tell(worker, m.Kept(old))]
        self._withdrawn.add(old)
        self._offers.pop(old, None)
        self._ledgers.pop(old, None)
        return [Tell(sender, m.Withdrawn(old)) for sender in self.members.sender_names()]

    def _start(self) -> list[Instruction]:
        update, plan = self.update, self._plan
        if update is None or plan is None:
            return []
        self._enter(Phase.MOVING, list(plan.programs))
        ledger = self._ledger(update.version)
        ledger.started_s = self._now_s if ledger.started_s is None else ledger.started_s
        ledger.lower_bound_s = plan.lower_bound_s
        return [Tell(worker, m.Start(self.epoch, update.version)) for worker in plan.programs]

    def _on_executed(self, worker: str, message: m.Sent | m.Verified) -> list[Instruction]:
        self._answered(worker, Phase.MOVING, message.epoch)
        update = self.update
        if update is None or update.version != message.version:
            return []
        self._ledger(update.version).count(message, self._now_s)
        if isinstance(message, m.Verified):
            update.verified.add(worker)
        return self._commit(update) + self._land()

    def _commit(self, update: Update) -> list[Instruction]:
        todo: list[Instruction] = []
        for replica, ranks in self.members.replicas().items():
            if replica in update.committed or not update.verified.issuperset(ranks):
                continue
            update.committed.add(replica)
            self._ledger(update.version).blocked.update(dict.fromkeys(ranks, self._now_s))
            todo += [Tell(rank, m.Commit(update.version)) for rank in ranks]
        return todo

    def _land(self) -> list[Instruction]:
        """Release the senders once every receiver of the plan holds the version; end it once no program runs."""
        update = self.update
        if update is None:
            return []
        todo: list[Instruction] = []
        receivers = self._receivers()
        if not update.released and receivers and update.verified.issuperset(receivers):
            update.released = True
            self.delivered = update.version
            self._withdrawn = {v for v in self._withdrawn if v > update.version}
            todo += [Tell(sender, m.Release(update.version)) for sender in self.members.sender_names()]
        if update.released and not (self.phase is Phase.MOVING and self._waiting):
            self.update = None
            self._ledger(update.version).landed = True
            if self.phase in (Phase.MOVING, Phase.READYING):
                self._enter(Phase.IDLE)
            todo += self._close_ledger(update.version)
        return todo

    def _on_unblocked(self, worker: str, version: int, stall_s: float) -> list[Instruction]:
        if version in self._withdrawn or self._is_over(version):
            return []
        ledger, join = self._ledger(version), self.members.joined[worker]
        stalls = ledger.sender_stall_s if join.role == "sender" else ledger.receiver_stall_s
        stalls[worker] = stall_s
        todo: list[Instruction] = []
        if ledger.blocked.pop(worker, None) is not None and not any(
            self.members.joined[other].replica == join.replica for other in ledger.blocked
        ):
            todo.append(Publish(ReplicaAt(join.replica, version)))
        return todo + self._close_ledger(version)

    def _is_over(self, version: int) -> bool:
        return version not in self._ledgers and self.delivered is not None and version <= self.delivered

    def _close_ledger(self, version: int) -> list[Instruction]:
        ledger = self._ledgers[version]
        if not ledger.landed or ledger.blocked or not ledger.sender_stall_s.keys() >= set(self.members.sender_names()):
            return []
        del self._ledgers[version]
        return [Publish(UpdateDone(version, ledger.stats()))]

    # --- the end ---------------------------------------------------------------------------------------------------

    def _on_tick(self) -> list[Instruction]:
        if self._verdict_s is not None and self._now_s >= self._verdict_s:
            return self._judge_break()
        for ledger in self._ledgers.values():
            for worker, since in ledger.blocked.items():
                if self._now_s >= since + self._update_timeout_s:
                    return self._too_late([worker], f"use of version {ledger.version} (poll_requests)", since)
        timeout_s = self._phase_timeout_s()
        if timeout_s is None or self._now_s < self._phase_since_s + timeout_s:
            return []
        return self._too_late(self._missing(), self.phase.value, self._phase_since_s)

    def _missing(self) -> list[str]:
        if self.phase is Phase.GATHERING:
            return self.members.missing()
        if self.phase is Phase.IDLE:
            by = self._offers[min(self._offers)]
            return [sender for sender in self.members.sender_names() if sender not in by]
        return sorted(self._waiting)

    def _too_late(self, missing: list[str], what: str, since_s: float) -> list[Instruction]:
        """Drop the receivers that are missing; a missing sender, or a missing first member, is the end."""
        error = DeadlineExceededError(", ".join(missing), what, self._now_s - since_s)
        joined = [self.members.joined[worker] for worker in missing if worker in self.members.joined]
        replicas = {join.replica for join in joined if join.role == "receiver"}
        if self.phase is Phase.GATHERING or not replicas:
            return self._finish(error)
        return [instruction for replica in sorted(replicas) for instruction in self._drop(replica, error)]

    def _finish(self, error: RlbridgeError | None) -> list[Instruction]:
        self._enter(Phase.ENDED)
        return [Finish(error)]
