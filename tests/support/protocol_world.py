"""A whole job without I/O or clock: the real coordinator and worker machines, one queue per channel and direction, and
shells and main threads that take one step at a time, in whatever order the caller's dice say.

Every step is checked: what engines compute with, what may be written or read, what the host is told.
"""

from __future__ import annotations

import random
from collections import deque

import msgspec
import pytest
from protocol_worker import TORN, Key, Worker, chain

from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy, SyncMode
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.coordinator import CoordinatorMachine
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.receiver import ReceiverMachine
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.sync.plan.program import BucketProgram, Program
from rlbridge.sync.reports import CoordinatorEvent, ReplicaAt
from rlbridge.transport.errors import PeerDiedError
from rlbridge.transport.protocol import TransportAddress

CONNECT_S = UPDATE_S = 10.0


class World:
    """Workers, the coordinator, and the network between them."""

    def __init__(self, mode: SyncMode, on_busy: OnBusy, ranks: int, replicas: dict[int, int], versions: int) -> None:
        self.mode, self.versions = mode, versions
        self.chained = False  # receivers forward to each other instead of hearing from the senders
        self.breaks = 0  # links that may break yet, although both ends live
        self.broken = 0
        self.coordinator = CoordinatorMachine(
            Membership(ranks, dict(replicas)), connect_timeout_s=CONNECT_S, update_timeout_s=UPDATE_S, now_s=0.0
        )
        self.now_s = 0.0
        self.plans: deque[c.MakePlan] = deque()
        self.published: list[CoordinatorEvent] = []
        self.finished: c.Finish | None = None
        self.workers: dict[str, Worker] = {}
        self.digests: set[str] = set()  # receivers whose next program finds a wrong digest
        for rank in range(ranks):
            self.add("sender", 0, rank, ranks, SenderMachine(staging=mode.sender_staging, on_busy=on_busy))
        for replica, world in replicas.items():
            for rank in range(world):
                self.add("receiver", replica, rank, world)

    def add(
        self, role: m.Role, replica: int, rank: int, world: int, machine: SenderMachine | ReceiverMachine | None = None
    ) -> Worker:
        join = m.Join(role, replica, rank, world, TransportAddress("none", "node", ()), SourceMap({}, []), "h")
        if (role, rank) == ("sender", 0):
            join = msgspec.structs.replace(join, spec=CheckpointSpec({}))
        machine = machine if machine is not None else ReceiverMachine(staging=self.mode.receiver_staging)
        worker = self.workers[join.worker] = Worker(join, machine)
        worker.outbox.append(join)
        return worker

    def senders(self) -> list[Worker]:
        return [w for w in self.workers.values() if w.sends]

    def receivers(self, replica: int | None = None) -> list[Worker]:
        return [w for w in self.workers.values() if not w.sends and replica in (None, w.join.replica)]

    # --- shells ----------------------------------------------------------------------------------------------------

    def tell_coordinator(self, event: c.Event) -> None:
        if self.finished is not None and isinstance(event, c.Heard) and isinstance(event.message, m.Join):
            gone = PeerDiedError("the coordinator is gone")
            self.workers[event.worker].inbox.append(m.Stop(m.ErrorReport.of(gone)))
        for todo in self.coordinator.handle(event, self.now_s):
            match todo:
                case c.Tell(name, message):
                    self.check_message(message, name)
                    self.workers[name].inbox.append(message)
                case c.MakePlan():
                    self.plans.append(todo)
                case c.Publish(report):
                    self.check_report(report)
                    self.published.append(report)
                case c.Finish():
                    assert self.finished is None, "ended twice"
                    self.finished = todo
                    if todo.error is not None:
                        for worker in self.workers.values():
                            worker.inbox.append(m.Stop(m.ErrorReport.of(todo.error)))

    def check_message(self, message: m.ToWorker, name: str) -> None:
        if isinstance(message, m.Commit):
            ranks = self.receivers(self.workers[name].join.replica)
            assert all(w.machine.verified is not None and w.machine.verified >= message.version for w in ranks)

    def check_report(self, report: CoordinatorEvent) -> None:
        if isinstance(report, ReplicaAt):
            for worker in self.receivers(report.replica):
                assert worker.history[-1:] == [report.version], "said to hold a version that a rank does not"

    def feed(self, worker: Worker, event: e.WorkerEvent) -> None:
        for todo in worker.machine.handle(event):
            match todo:
                case e.Transmit(message):
                    worker.outbox.append(message)
                case e.CloseLinks(new):
                    worker.dying = worker.running() or worker.dying
                    worker.activities.clear()
                    worker.activities.append(todo)
                    worker.peers = sorted(new.peers)
                    worker.sources = [b.recv_from for b in new.program.buckets if b.recv_from is not None]
                case e.ConnectPeers():
                    worker.activities.append(todo)
                case e.Execute():
                    self.check_execute(worker, todo)
                    worker.activities.append(todo)
                case e.Grant(version, slot):
                    assert not worker.reads(slot), "a slot is free although a transfer may read it"
                    worker.grant = (version, slot)
                case e.Settle(version, delivered):
                    assert version not in worker.fates, "settled twice"
                    worker.fates[version] = delivered
                case e.Wake():
                    worker.woken = True
                case e.Resume(version):
                    assert worker.stage == "quiesced"
                    assert worker.live == version, "resumed with torn or other weights"
                    assert not worker.writes(), "resumed although a transfer may write"
                    worker.resume = version
                case e.Abandon(error):
                    worker.error = error
                    worker.activities.clear()

    def check_execute(self, worker: Worker, execute: e.Execute) -> None:
        assert worker.running() is None, "two programs at once"
        assert worker.dying is None, "a program starts before the last one has ended"
        if execute.treatment is e.Treatment.SEND:
            assert worker.slots[execute.slot] == execute.version
        if execute.treatment is e.Treatment.UNPACK:
            assert worker.stage == "quiesced", "wrote into weights in use"
            worker.live = TORN
        if execute.treatment is e.Treatment.KEEP:
            assert worker.held is None, "overwrote a version that waits to be applied"
            assert worker.stage != "applying", "overwrote a version that is being applied"

    def check_computing(self, worker: Worker) -> None:
        """An engine between two polls generates tokens: with one whole version, the one that it was told."""
        if not worker.sends and worker.up and worker.stage == "idle" and worker.resume is None:
            assert worker.live == (worker.history[-1] if worker.history else None), "tokens of torn weights"

    # --- what can happen next --------------------------------------------------------------------------------------

    def choices(self) -> list:
        found: list = [(self.do_plan,)] if self.plans else []
        for worker in self.workers.values():
            if worker.outbox:
                found.append((self.do_deliver_up, worker))
            if not worker.up:
                continue
            if worker.inbox:
                found.append((self.do_deliver_down, worker))
            if worker.dying is not None and self.outcome(worker, worker.dying) is not None:
                found.append((self.do_late, worker))
            if worker.activities and (outcome := self.outcome(worker, worker.activities[0])) is not None:
                found.append((self.do_activity, worker, outcome))
            if self.breaks and worker.links and worker.running() is not None:
                found.append((self.do_break, worker))
            if not worker.frozen:
                step = self.sender_step(worker) if worker.sends else self.receiver_step(worker)
                found += [step] if step is not None else []
        return found

    def outcome(self, worker: Worker, activity: e.CloseLinks | e.ConnectPeers | e.Execute) -> e.WorkerEvent | None:
        match activity:
            case e.CloseLinks(new):
                return e.LinksClosed(new.epoch)
            case e.ConnectPeers(epoch):
                return e.LinksOpened(epoch)
        key = (activity.epoch, activity.version)
        if worker.name in self.digests:
            return e.Trouble(PeerDiedError(f"{worker.name} found a wrong digest"))
        for other in worker.links:
            hung_up = other.stage == "left" and key not in other.executed
            if not other.up or hung_up:
                return e.LinkFailed(activity.epoch, other.name, PeerDiedError(f"{other.name} is gone"))
        if self.is_held_up(worker, key):
            return None
        if all(key in other.executed or self.is_at(other, key) for other in worker.links):
            return e.Executed(activity.epoch, activity.version, m.TransferStats(1.0, 1, 1, 1, 1))
        return None

    def is_held_up(self, worker: Worker, key: Key) -> bool:
        if key in worker.executed:
            return False
        slow = worker.slow_from is not None and key >= worker.slow_from
        return slow or any(self.is_held_up(self.workers[source], key) for source in worker.sources)

    def is_at(self, worker: Worker, key: Key) -> bool:
        at = worker.running()
        return at is not None and (at.epoch, at.version) == key

    def do_plan(self) -> None:
        order = self.plans.popleft()
        names = tuple(join.worker for join in order.members)
        senders = tuple(n for n in names if n.startswith("trainer"))
        receivers = tuple(n for n in names if n.startswith("rollout"))
        sends = tuple(BucketProgram(i, 8, None, receivers, ()) for i, _ in enumerate(senders))
        takes = tuple(BucketProgram(i, 8, sender, (), ()) for i, sender in enumerate(senders))
        parts = {n: (sends[i],) for i, n in enumerate(senders)} | dict.fromkeys(receivers, takes)
        if self.chained:
            parts = chain(senders, receivers)
        programs = {name: Program(name, f"plan{order.epoch}", names, part) for name, part in parts.items()}
        self.tell_coordinator(c.Planned(order.epoch, f"plan{order.epoch}", programs, 0.5, {}))

    def do_break(self, worker: Worker) -> None:
        activity, peer = worker.activities.popleft(), worker.links[0]
        self.breaks, self.broken = self.breaks - 1, self.broken + 1
        self.feed(worker, e.LinkFailed(activity.epoch, peer.name, PeerDiedError(f"the link to {peer.name} broke")))

    def do_deliver_up(self, worker: Worker) -> None:
        message = worker.outbox.popleft()
        self.tell_coordinator(message if isinstance(message, c.Gone) else c.Heard(worker.name, message))

    def do_deliver_down(self, worker: Worker) -> None:
        self.feed(worker, worker.inbox.popleft())

    def do_late(self, worker: Worker) -> None:
        """The cancelled program had come to its end: its event is of an epoch that is over."""
        execute, worker.dying = worker.dying, None
        outcome = self.outcome(worker, execute)
        if isinstance(outcome, e.Executed):
            self.arrive(worker, execute)
        self.feed(worker, outcome)

    def do_activity(self, worker: Worker, outcome: e.WorkerEvent) -> None:
        activity = worker.activities.popleft()
        if isinstance(outcome, e.LinksClosed):
            worker.dying = None  # ``CloseLinks`` is carried out after what ran before has ended
        if isinstance(outcome, e.Executed):
            self.arrive(worker, activity)
            if activity.treatment is e.Treatment.KEEP:
                worker.held = outcome.version
        if isinstance(outcome, e.LinksOpened):
            worker.links = [self.workers[peer] for peer in worker.peers]
        self.feed(worker, outcome)

    def arrive(self, worker: Worker, execute: e.Execute) -> None:
        worker.executed.add((execute.epoch, execute.version))
        if execute.treatment is e.Treatment.UNPACK:
            worker.live = execute.version
        if execute.treatment is e.Treatment.SEND:
            assert worker.slots[execute.slot] == execute.version, "the slot was overwritten while it was read"

    # --- main threads ----------------------------------------------------------------------------------------------

    def sender_step(self, worker: Worker):
        version = worker.next_version
        match worker.stage:
            case "idle" if worker.machine.linked or worker.machine.epoch:
                if version < self.versions:
                    return (self.do_want, worker)
                if len(worker.fates) == self.versions:
                    return (self.do_leave, worker)
            case "wanting" if worker.grant is not None or version in worker.fates:
                return (self.do_fill, worker)
            case "waiting" if version in worker.fates:
                return (self.do_unblock, worker)
        return None

    def do_want(self, worker: Worker) -> None:
        worker.stage = "wanting"
        self.feed(worker, e.Want(worker.next_version))

    def do_fill(self, worker: Worker) -> None:
        if worker.grant is None:  # superseded before its snapshot
            self.do_unblock(worker)
            return
        (version, slot), worker.grant = worker.grant, None
        assert not worker.reads(slot), "overwrites a slot that a transfer may read"
        worker.slots[slot] = version
        self.feed(worker, e.Filled(version, slot))
        worker.stage = "waiting"
        if self.mode.sender_staging:
            self.do_unblock(worker)

    def do_unblock(self, worker: Worker) -> None:
        worker.stage = "idle"
        if not self.mode.sender_staging:
            assert not worker.reads(0), "the trainer goes on although a transfer may read its weights"
            worker.slots[0] = None
        self.feed(worker, e.Resumed(worker.next_version, 0.25))
        worker.next_version += 1

    def do_leave(self, worker: Worker) -> None:
        worker.stage = "left"
        worker.outbox.append(m.Leave())

    def receiver_step(self, worker: Worker):
        if worker.stage == "left":
            return None
        if worker.resume is not None:
            return (self.do_resume, worker)
        if worker.stage == "applying":
            return (self.do_applied, worker)
        if worker.stage == "idle" and worker.leaves_early and worker.links:
            return (self.do_leave, worker)
        if worker.stage == "idle" and worker.woken:
            return (self.do_poll, worker)
        over = worker.joined_late and all(sender.stage == "left" for sender in self.senders())
        if worker.stage == "idle" and (worker.machine.version == self.versions - 1 or over):
            return (self.do_leave, worker)
        return None

    def do_poll(self, worker: Worker) -> None:
        worker.woken = False
        if not self.mode.receiver_staging:
            worker.stage = "quiesced"
            self.feed(worker, e.Quiesced())
            return
        worker.stage, worker.live = "applying", TORN

    def do_applied(self, worker: Worker) -> None:
        worker.stage, worker.live, worker.held = "idle", worker.held, None
        self.took(worker, worker.live)

    def do_resume(self, worker: Worker) -> None:
        version, worker.resume, worker.stage = worker.resume, None, "idle"
        self.took(worker, version)

    def took(self, worker: Worker, version: int) -> None:
        assert not worker.history or version > worker.history[-1], "versions only grow"
        worker.history.append(version)
        for other in self.receivers(worker.join.replica):
            shorter = sorted((worker.history, other.history), key=len)
            assert len(shorter[1]) - len(shorter[0]) <= 1, "a rank is ahead by more than one boundary"
            assert shorter[1][: len(shorter[0])] == shorter[0], "ranks of a replica differ"
        self.feed(worker, e.Resumed(version, 0.5))

    # --- running ---------------------------------------------------------------------------------------------------

    def kill(self, worker: Worker) -> None:
        if worker.alive and worker.stage != "left":
            worker.alive = False
            worker.outbox.append(c.Gone(worker.name, "killed"))

    def kill_replica(self, replica: int) -> None:
        for worker in self.receivers(replica):
            self.kill(worker)

    def replace(self, replica: int) -> None:
        """A new process takes the place of a dead replica, once the coordinator knows that it is dead."""
        old = self.receivers(replica)
        if any(worker.up or worker.outbox for worker in old) or all(worker.alive for worker in old):
            return
        for worker in old:
            self.add("receiver", replica, worker.join.rank, worker.join.world).joined_late = True

    def step(self, turn: random.Random) -> bool:
        """One thing that can happen happens; False if nothing can any more."""
        choices = self.choices()
        if choices:
            action, *arguments = turn.choice(choices)
            action(*arguments)
            if arguments:
                self.check_computing(arguments[0])
            return True
        if self.finished is not None:
            return False
        self.pass_time()
        return True

    def pass_time(self) -> None:
        """Nothing can happen any more but that time passes."""
        deadline_s = self.coordinator.deadline_s
        if deadline_s is None:
            return self.thaw()
        self.now_s = max(self.now_s, deadline_s)
        return self.tell_coordinator(c.Tick())

    def thaw(self) -> None:
        """Whoever stands still may do so for ever, unless somebody waits for it."""
        waiting = [w.name for w in self.workers.values() if w.up and w.stage not in ("idle", "left") and not w.frozen]
        assert not waiting, f"{waiting} wait for ever in {self.coordinator.phase}"
        frozen = [w for w in self.workers.values() if w.up and w.frozen]
        assert frozen, f"stands still for ever in {self.coordinator.phase}"
        for worker in frozen:
            worker.frozen = False

    def run(self, turn: random.Random, mischief: dict[int, list] | None = None) -> None:
        """To the end; ``mischief`` maps a step to functions that are called before it."""
        for step in range(20_000):
            for act in (mischief or {}).get(step, ()):
                act()
            if not self.step(turn):
                return
        pytest.fail("does not end")
