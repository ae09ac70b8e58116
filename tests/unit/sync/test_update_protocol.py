"""The protocol under every order of events, in all modes: calm jobs, deaths, replacements, links that break, slowness.
No I/O, no clock."""

from __future__ import annotations

import random

from depth import interleavings
from hypothesis import given
from hypothesis import strategies as st
from protocol_world import World

from rlbridge.sync.config import OnBusy, SyncMode
from rlbridge.sync.reports import ReplicaAt, ReplicaLost, UpdateDone
from rlbridge.transport.errors import DeadlineExceededError, PeerDiedError

WORLDS = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(list(SyncMode)),
        "on_busy": st.sampled_from(list(OnBusy)),
        "ranks": st.integers(1, 3),
        "replicas": st.dictionaries(st.integers(0, 3), st.integers(1, 2), min_size=1, max_size=3),
        "versions": st.integers(1, 6),
    }
)
SETTINGS = interleavings(150)


def killing(world: World, deaths: list[tuple[int, int]], pause: int | None = None) -> dict[int, list]:
    """Mischief: replicas die at these steps; ``pause`` steps later others take their places, once it is known."""
    plan: dict[int, list] = {}
    for at, replica in deaths:
        plan.setdefault(at, []).append(lambda replica=replica: world.kill_replica(replica))
        for step in range(at + pause, at + pause + 200) if pause is not None else ():
            plan.setdefault(step, []).append(lambda replica=replica: world.replace(replica))
    return plan


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
    simulated.run(random.Random(seed))
    check_books(simulated)
    if world["on_busy"] is not OnBusy.SUPERSEDE or not world["mode"].sender_staging:
        assert all(simulated.workers["trainer-0"].fates.values()), "only supersede may skip a version"


@SETTINGS
@given(world=WORLDS, seed=st.integers(0, 2**32), death=st.integers(20, 300), pause=st.integers(0, 60))
def test_a_replacement_gets_every_version_from_its_epoch_on(world, seed, death, pause) -> None:
    world["replicas"] |= {7: 1, 8: 2}
    simulated = World(**world)
    victim = 7 + seed % 2
    simulated.run(random.Random(seed), killing(simulated, [(death, victim)], pause))
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
    simulated.run(random.Random(seed), killing(simulated, deaths))
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
    simulated.run(random.Random(seed))
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
    simulated.run(random.Random(seed))
    assert lost_replicas(simulated) <= {slow.join.replica}
    check_end(simulated, DeadlineExceededError, slow.name)


def test_a_slow_only_replica_ends_it_by_name() -> None:
    simulated = World(SyncMode.FULLY_ASYNC, OnBusy.QUEUE, 2, {0: 1}, 2)
    simulated.workers["rollout-0"].slow_from = (1, 1)
    simulated.run(random.Random(0))
    assert isinstance(simulated.finished.error, DeadlineExceededError)
    assert simulated.finished.error.who == "rollout-0"
