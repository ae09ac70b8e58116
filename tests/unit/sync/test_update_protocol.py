"""The protocol under every order of events: a world of machines whose messages, activities and main threads take turns
as hypothesis says, with receivers that die at any moment. No I/O, no clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy, SyncMode
from rlbridge.sync.layout.source_map import SourceMap
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.coordinator import CoordinatorMachine
from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.receiver import ReceiverMachine
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.sync.plan.program import BucketProgram, Program
from rlbridge.sync.reports import ReplicaAt, ReplicaLost, UpdateDone
from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError
from rlbridge.transport.protocol import TransportAddress


@dataclass
class Worker:
    """A machine, its queues, and what its shell and main thread are at."""

    join: m.Join
    machine: SenderMachine | ReceiverMachine
    inbox: deque = field(default_factory=deque)
    outbox: deque = field(default_factory=deque)
    activities: deque = field(default_factory=deque)
    executed: set = field(default_factory=set)
    links: list = field(default_factory=list)
    peers: list = field(default_factory=list)
    sources: list = field(default_factory=list)
    alive: bool = True
    error: Exception | None = None
    # sender's main thread
    next_version: int = 0
    stage: str = "idle"
    grant: tuple[int, int] | None = None
    fates: dict = field(default_factory=dict)
    slots: dict = field(default_factory=dict)
    # receiver's main thread
    woken: bool = False
    resume: int | None = None
    live: int | None = None
    held: int | None = None
    history: list = field(default_factory=list)
    joined_late: bool = False
    slow_from: tuple[int, int] | None = None  # of this epoch and version on, it takes for ever, although it lives

    @property
    def name(self) -> str:
        return self.join.worker


class World:
    def __init__(self, mode: SyncMode, on_busy: OnBusy, ranks: int, replicas: dict[int, int], versions: int) -> None:
        self.mode, self.versions = mode, versions
        self.chained = False  # receivers forward to each other instead of hearing from the senders
        self.breaks = 0  # links that may break yet, although both ends live
        self.broken = 0
        self.coordinator = CoordinatorMachine(
            Membership(ranks, dict(replicas)), connect_timeout_s=10.0, update_timeout_s=10.0, now_s=0.0
        )
        self.now_s = 0.0
        self.plans: deque[c.MakePlan] = deque()
        self.published: list = []
        self.finished: c.Finish | None = None
        self.workers: dict[str, Worker] = {}
        for rank in range(ranks):
            self._add("sender", 0, rank, ranks, SenderMachine(staging=mode.sender_staging, on_busy=on_busy))
        for replica, world in replicas.items():
            for rank in range(world):
                self._add("receiver", replica, rank, world, ReceiverMachine(staging=mode.receiver_staging))

    def _add(self, role: m.Role, replica: int, rank: int, world: int, machine) -> None:
        join = m.Join(role, replica, rank, world, TransportAddress("none", "node", ()), SourceMap({}, []), "h")
        if (role, rank) == ("sender", 0):
            join = m.msgspec.structs.replace(join, spec=m.CheckpointSpec({}))
        worker = self.workers[join.worker] = Worker(join, machine)
        worker.outbox.append(join)

    # --- shells ----------------------------------------------------------------------------------------------------

    def tell_coordinator(self, event: c.Event) -> None:
        for todo in self.coordinator.handle(event, self.now_s):
            match todo:
                case c.Tell(name, message):
                    self.check_message(message, name)
                    self.workers[name].inbox.append(message)
                case c.MakePlan():
                    self.plans.append(todo)
                case c.Publish(report):
                    self.published.append(report)
                case c.Finish():
                    self.finished = todo
                    if todo.error is not None:
                        for worker in self.workers.values():
                            worker.inbox.append(m.Stop(m.ErrorReport.of(todo.error)))

    def check_message(self, message: m.ToWorker, name: str) -> None:
        if isinstance(message, m.Commit):
            replica = self.workers[name].join.replica
            ranks = [w for w in self.workers.values() if w.join.role == "receiver" and w.join.replica == replica]
            assert all(w.machine.verified is not None and w.machine.verified >= message.version for w in ranks)

    def feed(self, worker: Worker, event: e.WorkerEvent) -> None:
        for todo in worker.machine.handle(event):
            match todo:
                case e.Transmit(message):
                    worker.outbox.append(message)
                case e.CloseLinks(new):
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
                    assert not any(isinstance(a, e.Execute) and a.slot == slot for a in worker.activities)
                    worker.grant = (version, slot)
                case e.Settle(version, delivered):
                    assert version not in worker.fates, "settled twice"
                    worker.fates[version] = delivered
                case e.Wake():
                    worker.woken = True
                case e.Resume(version):
                    assert worker.stage == "quiesced"
                    assert worker.live == version, "resumed with torn or other weights"
                    worker.resume = version
                case e.Abandon(error):
                    worker.error = error
                    worker.activities.clear()

    def check_execute(self, worker: Worker, execute: e.Execute) -> None:
        assert not any(isinstance(a, e.Execute) for a in worker.activities), "two programs at once"
        if execute.treatment is e.Treatment.SEND:
            assert worker.slots[execute.slot] == execute.version
        if execute.treatment is e.Treatment.UNPACK:
            assert worker.stage == "quiesced", "wrote into weights in use"
        if execute.treatment is e.Treatment.KEEP:
            assert worker.held is None, "overwrote a version that waits to be applied"

    # --- what can happen next --------------------------------------------------------------------------------------

    def choices(self) -> list:
        found: list = [(self.do_plan,)] if self.plans else []
        for worker in self.workers.values():
            if worker.outbox:
                found.append((self.do_deliver_up, worker))
            if not worker.alive or worker.error is not None:
                continue
            if worker.inbox:
                found.append((self.do_deliver_down, worker))
            if worker.activities and (outcome := self.outcome(worker)) is not None:
                found.append((self.do_activity, worker, outcome))
            if self.breaks and worker.links and worker.activities and isinstance(worker.activities[0], e.Execute):
                found.append((self.do_break, worker))
            step = self.sender_step(worker) if worker.join.role == "sender" else self.receiver_step(worker)
            if step is not None:
                found.append(step)
        return found

    def outcome(self, worker: Worker) -> e.WorkerEvent | None:
        activity = worker.activities[0]
        match activity:
            case e.CloseLinks(new):
                return e.LinksClosed(new.epoch)
            case e.ConnectPeers(epoch):
                return e.LinksOpened(epoch)
        key = (activity.epoch, activity.version)
        for other in worker.links:
            hung_up = other.stage == "left" and key not in other.executed
            if not other.alive or other.error is not None or hung_up:
                return e.LinkFailed(activity.epoch, other.name, PeerDiedError(f"{other.name} is gone"))
        if self.is_held_up(worker, key):
            return None
        if all(key in other.executed or self.is_at(other, key) for other in worker.links):
            return e.Executed(activity.epoch, activity.version, m.TransferStats(1.0, 1, 1, 1, 1))
        return None

    def is_held_up(self, worker: Worker, key: tuple[int, int]) -> bool:
        if key in worker.executed:
            return False
        slow = worker.slow_from is not None and key >= worker.slow_from
        return slow or any(self.is_held_up(self.workers[source], key) for source in worker.sources)

    def is_at(self, worker: Worker, key: tuple[int, int]) -> bool:
        return any(isinstance(a, e.Execute) and (a.epoch, a.version) == key for a in worker.activities)

    def do_plan(self) -> None:
        order = self.plans.popleft()
        names = tuple(join.worker for join in order.members)
        senders = tuple(n for n in names if n.startswith("trainer"))
        receivers = tuple(n for n in names if n.startswith("rollout"))
        sends = tuple(BucketProgram(i, 8, None, receivers, ()) for i, _ in enumerate(senders))
        takes = tuple(BucketProgram(i, 8, sender, (), ()) for i, sender in enumerate(senders))
        parts = {n: (sends[i],) for i, n in enumerate(senders)} | dict.fromkeys(receivers, takes)
        if self.chained:
            parts = self.chain(senders, receivers)
        programs = {name: Program(name, f"plan{order.epoch}", names, part) for name, part in parts.items()}
        self.tell_coordinator(c.Planned(order.epoch, f"plan{order.epoch}", programs, 0.5, {}))

    def chain(self, senders: tuple[str, ...], receivers: tuple[str, ...]) -> dict[str, tuple[BucketProgram, ...]]:
        """Each bucket goes from its sender to the first receiver, from there to the second, and so on."""
        hops = {name: receivers[i + 1 : i + 2] for i, name in enumerate(receivers)}
        before = {peer: name for name, peers in hops.items() for peer in peers}
        return {s: (BucketProgram(i, 8, None, receivers[:1], ()),) for i, s in enumerate(senders)} | {
            name: tuple(BucketProgram(i, 8, before.get(name, s), hops[name], ()) for i, s in enumerate(senders))
            for name in receivers
        }

    def do_break(self, worker: Worker) -> None:
        activity, peer = worker.activities.popleft(), worker.links[0]
        self.breaks, self.broken = self.breaks - 1, self.broken + 1
        self.feed(worker, e.LinkFailed(activity.epoch, peer.name, PeerDiedError(f"the link to {peer.name} broke")))

    def do_deliver_up(self, worker: Worker) -> None:
        message = worker.outbox.popleft()
        self.tell_coordinator(message if isinstance(message, c.Gone) else c.Heard(worker.name, message))

    def do_deliver_down(self, worker: Worker) -> None:
        self.feed(worker, worker.inbox.popleft())

    def do_activity(self, worker: Worker, outcome: e.WorkerEvent) -> None:
        activity = worker.activities.popleft()
        if isinstance(outcome, e.Executed):
            worker.executed.add((outcome.epoch, outcome.version))
            if activity.treatment is e.Treatment.UNPACK:
                worker.live = outcome.version
            if activity.treatment is e.Treatment.KEEP:
                worker.held = outcome.version
        if isinstance(outcome, e.LinksOpened):
            worker.links = [self.workers[peer] for peer in worker.peers]
        self.feed(worker, outcome)

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
        worker.slots[slot] = version
        self.feed(worker, e.Filled(version, slot))
        worker.stage = "waiting"
        if self.mode.sender_staging:
            self.do_unblock(worker)

    def do_unblock(self, worker: Worker) -> None:
        worker.stage = "idle"
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
        if worker.stage == "idle" and worker.woken:
            return (self.do_poll, worker)
        senders = [w for w in self.workers.values() if w.join.role == "sender"]
        over = worker.joined_late and all(sender.stage == "left" for sender in senders)
        if worker.stage == "idle" and (worker.machine.version == self.versions - 1 or over):
            return (self.do_leave, worker)
        return None

    def do_poll(self, worker: Worker) -> None:
        worker.woken = False
        if not self.mode.receiver_staging:
            worker.stage = "quiesced"
            self.feed(worker, e.Quiesced())
            return
        worker.live, worker.held = worker.held, None
        self.took(worker, worker.live)

    def do_resume(self, worker: Worker) -> None:
        version, worker.resume, worker.stage = worker.resume, None, "idle"
        self.took(worker, version)

    def took(self, worker: Worker, version: int) -> None:
        assert not worker.history or version > worker.history[-1], "versions only grow"
        worker.history.append(version)
        self.feed(worker, e.Resumed(version, 0.5))

    def kill(self, replica: int) -> None:
        for worker in self.workers.values():
            if worker.join.role == "receiver" and worker.join.replica == replica and worker.alive:
                if worker.stage == "left":
                    continue
                worker.alive = False
                worker.outbox.append(c.Gone(worker.name, "killed"))

    def replace(self, replica: int) -> None:
        """A new process takes the place of a dead replica, once the coordinator knows that it is dead."""
        dead = [w for w in self.workers.values() if w.join.role == "receiver" and w.join.replica == replica]
        if any(worker.alive or worker.outbox for worker in dead):
            return
        for old in dead:
            self._add(
                "receiver", replica, old.join.rank, old.join.world, type(old.machine)(staging=old.machine._staging)
            )
            self.workers[old.name].joined_late = True

    def run(
        self, turn: random.Random, deaths: list[tuple[int, int]], replacements: list[tuple[int, int]] | None = None
    ) -> None:
        for step in range(20_000):
            for at, replica in replacements or ():
                if at <= step <= at + 200:
                    self.replace(replica)
            for at, replica in deaths:
                if at == step:
                    self.kill(replica)
            choices = self.choices()
            if choices:
                action, *arguments = turn.choice(choices)
                action(*arguments)
            elif self.finished is not None:
                return
            else:
                deadline_s = self.coordinator.deadline_s
                assert deadline_s is not None, f"stands still for ever in {self.coordinator.phase}"
                self.now_s = max(self.now_s, deadline_s)
                self.tell_coordinator(c.Tick())
        pytest.fail("does not end")


WORLDS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(list(SyncMode)),
        "on_busy": st.sampled_from(list(OnBusy)),
        "ranks": st.integers(1, 3),
        "replicas": st.dictionaries(st.integers(0, 3), st.integers(1, 2), min_size=1, max_size=3),
        "versions": st.integers(1, 6),
    }
)
SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_books(world: World) -> None:
    senders = [w for w in world.workers.values() if w.join.role == "sender"]
    receivers = [w for w in world.workers.values() if w.join.role == "receiver"]
    killed = {w.join.replica for w in receivers if not w.alive}
    survivors = [w for w in receivers if w.join.replica not in killed]
    assert world.finished is not None
    assert world.finished.error is None, world.finished.error
    fates = senders[0].fates
    assert all(sender.fates == fates for sender in senders), "trainer ranks disagree"
    assert fates[world.versions - 1] is True, "the newest version must arrive"
    delivered = [version for version, fate in sorted(fates.items()) if fate]
    for worker in survivors:
        first = delivered.index(worker.history[0]) if worker.history else 0
        assert worker.history == delivered[first : first + len(worker.history)], "a gap"
        assert worker.joined_late or worker.history == delivered
        assert worker.live == (worker.history[-1] if worker.history else None)
    for replica in {w.join.replica for w in survivors if not w.joined_late}:
        assert [r.version for r in world.published if isinstance(r, ReplicaAt) and r.replica == replica] == delivered
    assert [report.version for report in world.published if isinstance(report, UpdateDone)] == delivered


def check_end(world: World, error: type[Exception] = PeerDiedError, words: str = "killed") -> None:
    """Either all books are right, or every replica is dead or had left already and the error says who died."""
    if world.finished.error is None:
        check_books(world)
        return
    assert isinstance(world.finished.error, error)
    assert words in str(world.finished.error)
    receivers = [w for w in world.workers.values() if w.join.role == "receiver"]
    over = {w.join.replica for w in receivers if not w.alive or w.joined_late or w.stage == "left"}
    assert over == {w.join.replica for w in receivers}, "some replica could have gone on"


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32))
def test_every_interleaving_delivers_the_newest_version_to_every_replica(world, seed) -> None:
    simulated = World(**world)
    simulated.run(random.Random(seed), [])
    check_books(simulated)
    if world["on_busy"] is not OnBusy.SUPERSEDE or not world["mode"].sender_staging:
        assert all(simulated.workers["trainer-0"].fates.values()), "only supersede may skip a version"


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32), death=st.integers(20, 300), pause=st.integers(0, 60))
def test_a_replacement_gets_every_version_from_its_epoch_on(world, seed, death, pause) -> None:
    world["replicas"] |= {7: 1, 8: 2}
    simulated = World(**world)
    victim = 7 + seed % 2
    simulated.run(random.Random(seed), [(death, victim)], [(death + pause, victim)])
    check_end(simulated)
    if simulated.finished.error is None:
        for worker in simulated.workers.values():
            too_late = worker.error is not None and "the trainer has left" in str(worker.error)
            assert not worker.joined_late or worker.stage == "left" or too_late


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32), data=st.data())
def test_a_death_at_any_moment_costs_one_replica_or_ends_in_an_error(world, seed, data) -> None:
    simulated = World(**world)
    deaths = data.draw(
        st.lists(st.tuples(st.integers(0, 400), st.sampled_from(sorted(world["replicas"]))), min_size=1, max_size=2)
    )
    simulated.run(random.Random(seed), deaths)
    assert simulated.finished is not None
    lost = {report.replica for report in simulated.published if isinstance(report, ReplicaLost)}
    assert lost <= {replica for _, replica in deaths}
    check_end(simulated)


def lost_replicas(world: World) -> set[int]:
    """Replicas that the coordinator gave up; the books of the others are to be right."""
    lost = {report.replica for report in world.published if isinstance(report, ReplicaLost)}
    for worker in world.workers.values():
        if worker.join.role == "receiver" and worker.join.replica in lost:
            worker.alive = False
    return lost


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32), breaks=st.integers(1, 9), chained=st.booleans())
def test_links_that_break_for_no_reason_cost_a_replica_only_at_the_third_time(world, seed, breaks, chained) -> None:
    simulated = World(**world)
    simulated.breaks, simulated.chained = breaks, chained
    simulated.run(random.Random(seed), [])
    assert len(lost_replicas(simulated)) <= simulated.broken // 3
    check_end(simulated, words="broke")


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32), data=st.data())
def test_a_slow_forwarder_costs_only_itself(world, seed, data) -> None:
    world["replicas"] = {0: 1, 1: 2, 2: 1}
    simulated = World(**world)
    simulated.chained, simulated.breaks = True, data.draw(st.integers(0, 2))
    slow = data.draw(st.sampled_from([w for w in simulated.workers.values() if w.join.role == "receiver"]))
    slow.slow_from = data.draw(st.tuples(st.integers(1, 3), st.integers(0, world["versions"] - 1)))
    simulated.run(random.Random(seed), [])
    assert lost_replicas(simulated) <= {slow.join.replica}
    check_end(simulated, DeadlineExceededError, slow.name)


def test_a_slow_only_replica_ends_it_by_name() -> None:
    simulated = World(SyncMode.FULLY_ASYNC, OnBusy.QUEUE, 2, {0: 1}, 2)
    simulated.workers["rollout-0"].slow_from = (1, 1)
    simulated.run(random.Random(0), [])
    assert isinstance(simulated.finished.error, DeadlineExceededError)
    assert simulated.finished.error.who == "rollout-0"
