"""The coordinator's decisions: gather, plan, link; then per update announce, start, commit, release.

One rule covers every loss: drop the replica; if anything is under way, make a new epoch of those that are left and
deliver the version again. Receivers that hold it only relay, so nothing is applied twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlbridge.sync import messages as m
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines.blame import missing
from rlbridge.sync.machines.deadlines import Deadlines
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.phases import MAX_BREAKS, Break, Phase, stage
from rlbridge.sync.machines.update import Ledgers, Offers, Update
from rlbridge.sync.plan.program import Program
from rlbridge.sync.reports import PlanMade, ReplicaLost
from rlbridge.transport.errors import (
    ConfigError,
    DeadlineExceededError,
    LayoutError,
    PeerDiedError,
    PlanError,
    ProtocolError,
    RlbridgeError,
    SyncError,
    WorkerError,
)


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
        self.epoch = 0
        self.update: Update | None = None
        self._stage = stage(Phase.GATHERING, now_s)
        self._deadlines = Deadlines(connect_timeout_s, update_timeout_s)
        self._unexplained, self._now_s = 0, now_s
        self._stale = True  # the membership is another one than the plan's
        self._newcomers: set[str] = set()
        self._plan: c.Planned | None = None
        self._offers = Offers()
        self._ledgers = Ledgers(membership)

    @property
    def phase(self) -> Phase:
        """What it waits for."""
        return self._stage.phase

    @property
    def _programs(self) -> Mapping[str, Program]:
        return self._plan.programs if self._plan is not None else {}

    # --- time ------------------------------------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float | None:
        """When ``Tick`` has something to do, if nothing else happens before."""
        return self._deadlines.next_s(self._stage, self._ledgers.longest_blocked(), offered=bool(self._offers.by))

    def _enter(self, phase: Phase, waiting: Iterable[str] = ()) -> None:
        self._stage = stage(phase, self._now_s, waiting)

    def _on_tick(self) -> list[c.Instruction]:
        if self._stage.verdict_s is not None and self._now_s >= self._stage.verdict_s:
            return self._judge_break()
        blocked = self._ledgers.longest_blocked()
        if blocked is not None and self._deadlines.unused(blocked, self._now_s):
            what = f"use of version {blocked[2]} (is poll_requests called?)"
            return self._too_late([blocked[1]], what, blocked[0])
        for replica, since_s in self._deadlines.late_halves(self._now_s).items():
            absent, what = ", ".join(self.members.incomplete()[replica]), "join, or leave, together with its replica"
            return self._drop(replica, DeadlineExceededError(absent, what, self._now_s - since_s))
        end_s = self._deadlines.phase_end_s(self._stage, offered=bool(self._offers.by))
        if end_s is None or self._now_s < end_s:
            return []
        who = missing(self._stage, self.members, self._offers, self._programs)
        return self._too_late(who, self.phase.value, self._stage.since_s)

    def _too_late(self, who: list[str], what: str, since_s: float) -> list[c.Instruction]:
        """Drop the receivers that are missing; a missing sender, or a missing first member, is the end."""
        error = DeadlineExceededError(", ".join(who), what, self._now_s - since_s)
        replicas = self.members.replicas_among(who)
        if replicas and self.phase is not Phase.GATHERING:
            return [instruction for replica in replicas for instruction in self._drop(replica, error)]
        return self._finish(error)

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, event: c.Event, now_s: float) -> list[c.Instruction]:
        """Take one event that happened at ``now_s``."""
        if self.phase is Phase.ENDED:
            return []
        self._now_s = now_s
        match event:
            case c.Heard(worker, message):
                todo = self._on_message(worker, message)
            case c.Gone(worker, reason):
                todo = self._on_failure(worker, PeerDiedError(f"{worker}: {reason}"))
            case c.Lose(replica, reason):
                todo = self._drop(replica, PeerDiedError(f"rollout replica {replica}: {reason}"))
            case c.Planned():
                todo = self._on_planned(event)
            case c.NoPlan(epoch, error):
                todo = self._finish(error) if epoch == self.epoch else []
            case c.Tick():
                todo = self._on_tick()
        todo += self._advance()
        self._deadlines.see_halves(self.members.incomplete() if self.phase is not Phase.GATHERING else (), now_s)
        return todo

    def _on_message(self, worker: str, message: m.FromWorker) -> list[c.Instruction]:
        if isinstance(message, m.Join):
            return self._on_join(message)
        if isinstance(message, m.Refused):
            return self._on_refused(message)
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
                if self._answered(worker, Phase.READYING, epoch) and not self._stage.waiting:
                    return self._start()
            case m.Sent() | m.Verified():
                return self._on_executed(worker, message)
            case m.Unblocked():
                return self._on_unblocked(worker, message)
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
        self._stage.waiting.discard(worker)
        return True

    # --- membership ------------------------------------------------------------------------------------------------

    def _on_join(self, join: m.Join) -> list[c.Instruction]:
        try:
            self.members.add(join)
        except (ProtocolError, LayoutError) as error:
            if self.phase is Phase.GATHERING:
                return self._finish(error)
            return [c.Tell(join.worker, m.Stop(m.ErrorReport.of(error)))]
        self._stale = True
        self._newcomers.add(join.worker)
        return []

    def _on_refused(self, refused: m.Refused) -> list[c.Instruction]:
        """A worker that never joins: a misfit ends a job that has not begun, anything else costs its replica."""
        error = refused.error.rebuild()
        if refused.worker in self.members.joined:
            return []  # one of the same name is here
        if refused.role == "sender" or (self.phase is Phase.GATHERING and isinstance(error, LayoutError | ConfigError)):
            return self._finish(error) if self.phase is Phase.GATHERING else []
        return self._drop(refused.replica, error) or [c.Publish(ReplicaLost(refused.replica, str(error)))]

    def _on_failure(self, worker: str, error: RlbridgeError) -> list[c.Instruction]:
        if worker not in self.members.joined:
            return []  # dropped before
        replicas = self.members.replicas_among([worker])
        return self._drop(replicas[0], error) if replicas else self._finish(error)

    def _drop(self, replica: int, error: RlbridgeError) -> list[c.Instruction]:
        was_whole = replica in self.members.replicas()
        gone = self.members.remove_replica(replica)
        expected = self.phase is Phase.GATHERING and self.members.receivers.pop(replica, None) is not None
        if not gone and not expected:
            return []
        if self.update is not None:
            self.update.committed.discard(replica)
        todo: list[c.Instruction] = [c.Tell(worker, m.Stop(m.ErrorReport.of(error))) for worker in gone]
        todo.append(c.Publish(ReplicaLost(replica, str(error))))
        if self.phase is Phase.GATHERING:
            return todo if self.members.receivers else todo + self._finish(error)
        if not self.members.joined:
            return todo + self._forget(gone, lost=True) + self._finish(None)
        if was_whole and not self.members.replicas() and self.members.sender_names():
            return todo + self._finish(error)
        return todo + self._forget(gone, lost=True)

    def _on_leave(self, worker: str) -> list[c.Instruction]:
        join = self.members.joined.pop(worker)
        if not self.members.joined:
            return [*self._forget([worker], lost=False), *self._finish(None)]
        if self.update is not None and not self.update.released:
            if join.role == "sender":
                return self._finish(WorkerError(f"{worker} left while version {self.update.version} was under way"))
            if not self.members.replicas():
                return self._finish(WorkerError(f"{worker}, the last receiver, left during an update"))
        return self._forget([worker], lost=False)

    def _forget(self, gone: list[str], *, lost: bool) -> list[c.Instruction]:
        """Go on without ``gone``, which are no members any more: land what they held up, then plan again if needed."""
        self._stale = True
        self._stage.waiting.difference_update(gone)
        self._newcomers.difference_update(gone)
        if self.update is not None:
            self.update.verified.difference_update(gone)
        self._ledgers.forget(gone)
        todo = self._land()
        update = self.update  # even if it is released, its programs run, and may wait for who is lost
        torn = update is not None and (lost or not update.released or bool(self._stage.breaks))
        if self.phase in (Phase.PARTING, Phase.LINKING) or (torn and self.phase is not Phase.PLANNING):
            todo += self._make_plan()
        return todo + [c.Publish(report) for report in self._ledgers.close()]

    # --- epochs ----------------------------------------------------------------------------------------------------

    def _make_plan(self) -> list[c.Instruction]:
        over = len(self.members.sender_names()) < self.members.senders  # one left in peace: no more versions will come
        possible = not over and bool(self.members.replicas())
        self._enter(Phase.PLANNING if possible else Phase.IDLE)
        todo = self._land()  # nothing runs any more
        if not possible:
            return todo + self._turn_away() if over else todo
        self._stale = False
        self.epoch += 1
        workers = self.members.sender_names() + [w for ranks in self.members.replicas().values() for w in ranks]
        self._newcomers.difference_update(workers)
        return [*todo, c.MakePlan(self.epoch, tuple(self.members.joined[worker] for worker in workers))]

    def _turn_away(self) -> list[c.Instruction]:
        """Tell newcomers that they are too late."""
        late, self._newcomers = self._newcomers, set()
        for worker in late:
            self.members.joined.pop(worker, None)
        error = m.ErrorReport.of(SyncError("the trainer has left the bridge: no more versions will come"))
        todo: list[c.Instruction] = [c.Tell(worker, m.Stop(error)) for worker in sorted(late)]
        return todo if self.members.joined else todo + self._finish(None)

    def _on_planned(self, plan: c.Planned) -> list[c.Instruction]:
        if plan.epoch != self.epoch:
            return []
        if self._stale:
            return self._make_plan()
        self._plan = plan
        self._enter(Phase.PARTING, plan.programs)
        return [
            c.Tell(worker, m.NewEpoch(plan.epoch, program, self.members.addresses(program), plan.exports))
            for worker, program in plan.programs.items()
        ]

    def _on_epoch_step(self, worker: str, message: m.Parted | m.Linked, epoch: int) -> list[c.Instruction]:
        plan = self._plan
        phase = Phase.PARTING if isinstance(message, m.Parted) else Phase.LINKING
        if plan is None or not self._answered(worker, phase, epoch):
            return []
        if isinstance(message, m.Linked) and message.plan_hash != plan.plan_hash:
            return self._finish(PlanError(f"{worker} holds plan {message.plan_hash}, not {plan.plan_hash}"))
        if self._stage.waiting:
            return []
        if phase is Phase.PARTING:
            self._enter(Phase.LINKING, plan.programs)
            return [c.Tell(peer, m.OpenLinks(epoch)) for peer in plan.programs]
        self._enter(Phase.IDLE)
        todo: list[c.Instruction] = [c.Publish(PlanMade(epoch, plan.plan_hash, list(plan.programs), plan.report))]
        return todo + self._announce() if self.update is not None else todo

    def _on_link_broken(self, worker: str, epoch: int, peer: str, error: RlbridgeError) -> None:
        if epoch != self.epoch or self.phase not in (Phase.LINKING, Phase.MOVING):
            return
        self._stage.broke(Break(worker, peer, error), self._now_s)

    def _judge_break(self) -> list[c.Instruction]:
        """Nobody died, yet a link broke: try again; after ``MAX_BREAKS`` tries in vain give up its receiving end."""
        first = self._stage.breaks[0]
        delivered = self.update is not None and self.update.released
        self._unexplained += not delivered
        if delivered or self._unexplained <= MAX_BREAKS:
            return self._make_plan()
        ends = self.members.replicas_among([first.peer, first.worker])
        return self._drop(ends[0], first.error) if ends else self._finish(first.error)

    # --- updates ---------------------------------------------------------------------------------------------------

    def _advance(self) -> list[c.Instruction]:
        """Whatever can begin now."""
        if self.phase is Phase.GATHERING and not self.members.missing():
            return self._make_plan()
        if self.phase is not Phase.IDLE or self.update is not None:
            return []
        offered = self._offers.complete(self.members)
        if offered and not self.members.replicas():
            return self._finish(WorkerError(f"no rollout replica is left to receive version {offered[0]}"))
        # A whole replica that has just come is planned for at once; losses wait for the next version.
        came = any(self._newcomers.issuperset(ranks) for ranks in self.members.replicas().values())
        if self._stale and (offered or came):
            return self._make_plan()
        if not offered:
            return []
        self.update = self._offers.begin(offered[0])
        self._ledgers.of(self.update.version)
        self._unexplained = 0
        return self._announce()

    def _announce(self) -> list[c.Instruction]:
        update, receivers = self.update, self.members.receivers_among(self._programs)
        if update is None:
            return []
        self._enter(Phase.READYING, receivers)
        return [c.Tell(worker, m.Announce(self.epoch, update.version)) for worker in receivers]

    def _on_offer(self, worker: str, version: int) -> list[c.Instruction]:
        if version in self._offers.withdrawn:
            return []  # crossed the withdrawal, which every sender hears
        if self._offers.began(version):
            newest = self._offers.newest
            return self._finish(ProtocolError(f"{worker} offers version {version} after {newest}: versions only grow"))
        if not self._offers.by and self.phase is Phase.IDLE:
            self._enter(Phase.IDLE)  # the other ranks' time counts from here
        self._offers.by.setdefault(version, set()).add(worker)
        return []

    def _on_supersede(self, worker: str, old: int) -> list[c.Instruction]:
        if old in self._offers.withdrawn:
            return []  # another rank asked first, and every sender heard
        if self._offers.began(old):
            return [c.Tell(worker, m.Kept(old))]
        self._offers.withdraw(old)
        self._ledgers.discard(old)
        return [c.Tell(sender, m.Withdrawn(old)) for sender in self.members.sender_names()]

    def _start(self) -> list[c.Instruction]:
        update, plan = self.update, self._plan
        if update is None or plan is None:
            return []
        self._enter(Phase.MOVING, plan.programs)
        self._ledgers.of(update.version).start(self._now_s, plan.lower_bound_s)
        return [c.Tell(worker, m.Start(self.epoch, update.version)) for worker in plan.programs]

    def _on_executed(self, worker: str, message: m.Sent | m.Verified) -> list[c.Instruction]:
        self._answered(worker, Phase.MOVING, message.epoch)
        update = self.update
        if update is None or update.version != message.version:
            return []
        self._ledgers.of(update.version).count(message, self._now_s)
        if isinstance(message, m.Verified):
            update.verified.add(worker)
        return self._commit(update) + self._land()

    def _commit(self, update: Update) -> list[c.Instruction]:
        todo: list[c.Instruction] = []
        for replica, ranks in self.members.replicas().items():
            if replica in update.committed or not update.verified.issuperset(ranks):
                continue
            update.committed.add(replica)
            self._ledgers.of(update.version).blocked.update(dict.fromkeys(ranks, self._now_s))
            todo += [c.Tell(rank, m.Commit(update.version)) for rank in ranks]
        return todo

    def _land(self) -> list[c.Instruction]:
        """Release the senders once every receiver of the plan holds the version; end it once no program runs."""
        update, receivers = self.update, self.members.receivers_among(self._programs)
        if update is None:
            return []
        todo: list[c.Instruction] = []
        if not update.released and receivers and update.verified.issuperset(receivers):
            update.released = True
            todo += [c.Tell(sender, m.Release(update.version)) for sender in self.members.sender_names()]
        if update.released and not (self.phase is Phase.MOVING and self._stage.waiting):
            self.update = None
            self._ledgers.of(update.version).landed = True
            if self.phase in (Phase.MOVING, Phase.READYING):
                self._enter(Phase.IDLE)
            todo += [c.Publish(report) for report in self._ledgers.close()]
        return todo

    def _on_unblocked(self, worker: str, message: m.Unblocked) -> list[c.Instruction]:
        if message.version in self._offers.withdrawn:
            return []
        join, began = self.members.joined[worker], self._offers.began(message.version)
        return [c.Publish(report) for report in self._ledgers.unblocked(join, message, began=began)]

    def _finish(self, error: RlbridgeError | None) -> list[c.Instruction]:
        self._enter(Phase.ENDED)
        return [c.Finish(error)]
