"""Single cases of the protocol that random interleavings found, or that need words: slots, half replicas, refusals."""

from __future__ import annotations

import pytest
from protocol_world import World

from rlbridge.sync import messages as m
from rlbridge.sync.config import OnBusy, SyncMode
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.machines import events as e
from rlbridge.sync.machines.sender import SenderMachine
from rlbridge.sync.plan.program import Program
from rlbridge.sync.reports import ReplicaAt, ReplicaLost
from rlbridge.transport.errors import ConfigError, DeadlineExceededError, LayoutError, RlbridgeError, WorkerError

STATS = m.TransferStats()


def epoch(number: int) -> m.NewEpoch:
    return m.NewEpoch(number, Program("trainer-0", f"plan{number}", (), ()), {})


def sending(on_busy: OnBusy, *, staging: bool = True) -> SenderMachine:
    """A sender whose program for version 0 runs; with staging it waits for a slot for its last version."""
    machine = SenderMachine(staging=staging, on_busy=on_busy)
    machine.handle(epoch(1))
    machine.handle(e.LinksClosed(1))
    machine.handle(e.LinksOpened(1))
    for version in range(2 if staging and on_busy is not OnBusy.BLOCK else 1):
        machine.handle(e.Want(version))
        machine.handle(e.Filled(version, machine.held[version].slot))
    machine.handle(m.Start(1, 0))
    return machine


@pytest.mark.parametrize("on_busy", OnBusy)
@pytest.mark.parametrize("released_first", [True, False])
def test_a_slot_is_not_free_before_a_cancelled_program_has_let_go_of_it(on_busy: OnBusy, released_first: bool) -> None:
    machine = sending(on_busy)
    machine.handle(e.Want(2))
    todo = []
    for event in [m.Release(0), epoch(2)] if released_first else [epoch(2), m.Release(0)]:
        todo += machine.handle(event)
    assert not [t for t in todo if isinstance(t, e.Settle | e.Grant)]
    let_go = machine.handle(e.LinksClosed(2))
    assert [t for t in let_go if not isinstance(t, e.Transmit)] == [e.Settle(0, delivered=True), e.Grant(2, 0)]


def test_a_trainer_without_staging_goes_on_only_when_no_program_reads_its_weights() -> None:
    machine = sending(OnBusy.SUPERSEDE, staging=False)
    assert machine.handle(m.Release(0)) == []
    assert machine.handle(epoch(2))[1:] == []
    assert e.Settle(0, delivered=True) in machine.handle(e.LinksClosed(2))


def world(replicas: dict[int, int], mode: SyncMode = SyncMode.FULLY_ASYNC, versions: int = 1) -> World:
    return World(mode, OnBusy.QUEUE, 1, replicas, versions)


def settle(simulated: World, skip: tuple[str, ...] = ()) -> None:
    """Everything happens in order until nothing can without time passing, but the main threads ``skip`` stand still."""
    for worker in simulated.workers.values():
        worker.frozen = worker.name in skip
    while choices := simulated.choices():
        action, *arguments = choices[0]
        action(*arguments)


@pytest.mark.parametrize("mode", SyncMode)
def test_a_rank_whose_replica_left_without_it_hears_so(mode: SyncMode) -> None:
    simulated = world({0: 2, 1: 1}, mode, versions=2)
    simulated.workers["rollout-0"].leaves_early = True
    settle(simulated, skip=("trainer-0", "rollout-0.1"))
    simulated.workers["rollout-0.1"].frozen = False
    settle(simulated)
    while simulated.workers["rollout-0.1"].up:
        simulated.pass_time()
        settle(simulated)
    assert isinstance(simulated.workers["rollout-0.1"].error, DeadlineExceededError)
    assert "rollout-0: no join, or leave, together with its replica" in str(simulated.workers["rollout-0.1"].error)
    assert simulated.workers["rollout-1"].history == [0, 1]


def test_a_replica_of_which_half_joins_hears_so_and_harms_nobody() -> None:
    simulated = world({0: 1})
    settle(simulated, skip=("trainer-0",))
    simulated.add("receiver", 5, 1, 2)
    settle(simulated, skip=("trainer-0",))
    simulated.pass_time()
    settle(simulated, skip=("trainer-0",))
    assert isinstance(simulated.workers["rollout-5.1"].error, DeadlineExceededError)
    assert simulated.workers["rollout-5.1"].error.who == "rollout-5"
    settle(simulated)
    assert simulated.workers["rollout-0"].history == [0]


def test_a_replica_of_which_a_rank_left_is_not_said_to_hold_a_version() -> None:
    simulated = world({0: 2, 1: 1})
    settle(simulated, skip=("rollout-0", "rollout-0.1"))
    simulated.workers["rollout-0"].stage = "left"
    simulated.tell_coordinator(c.Heard("rollout-0", m.Leave()))
    settle(simulated)
    assert simulated.workers["rollout-0.1"].history == [0]
    assert [r.replica for r in simulated.published if isinstance(r, ReplicaAt)] == [1]


def refused(role: m.Role, error: RlbridgeError, replica: int = 0, rank: int = 0) -> c.Heard:
    message = m.Refused(role, replica, rank, m.ErrorReport.of(error))
    return c.Heard(message.worker, message)


@pytest.mark.parametrize(
    ("role", "error"),
    [
        ("sender", LayoutError("trainer-0: no export")),
        ("sender", WorkerError("trainer-0: the loader raised")),
        ("receiver", LayoutError("rollout-0: a tensor is missing")),
        ("receiver", ConfigError("rollout-0: more than memory_bytes")),
    ],
)
def test_a_misfit_ends_a_job_that_has_not_begun_at_once(role: m.Role, error: RlbridgeError) -> None:
    simulated = world({0: 1, 1: 1})
    for worker in list(simulated.workers.values())[2:]:
        simulated.do_deliver_up(worker)
    simulated.tell_coordinator(refused(role, error))
    assert simulated.finished is not None
    assert type(simulated.finished.error) is type(error)
    assert str(simulated.finished.error) == str(error)


def test_a_rank_that_breaks_before_it_joins_costs_its_replica() -> None:
    simulated = world({0: 2, 1: 1})
    del simulated.workers["rollout-0.1"]
    simulated.do_deliver_up(simulated.workers["rollout-0"])
    simulated.tell_coordinator(refused("receiver", WorkerError("rollout-0.1: out of memory"), rank=1))
    assert [r for r in simulated.published if isinstance(r, ReplicaLost)] == [
        ReplicaLost(0, "rollout-0.1: out of memory")
    ]
    settle(simulated)
    assert "out of memory" in str(simulated.workers["rollout-0"].error)
    assert simulated.workers["rollout-1"].history == [0]


def test_a_late_joiner_that_is_refused_harms_nobody_and_the_host_hears_why() -> None:
    simulated = world({0: 1})
    settle(simulated, skip=("trainer-0",))
    simulated.tell_coordinator(refused("receiver", LayoutError("rollout-7: another model"), replica=7))
    simulated.tell_coordinator(refused("receiver", LayoutError("rollout-0: a second one of this name")))
    assert simulated.published[-1] == ReplicaLost(7, "rollout-7: another model")
    settle(simulated)
    assert simulated.workers["rollout-0"].history == [0]
    assert simulated.finished is not None
    assert simulated.finished.error is None
