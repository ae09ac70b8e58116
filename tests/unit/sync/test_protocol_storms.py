"""The protocol while everything goes wrong at once, in all modes: ranks die or hang, digests are wrong, links break,
deadlines pass, the host gives up, workers leave early, join and are replaced.

The world itself checks every step (``protocol_world``); here is what must be true at the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from depth import interleavings
from hypothesis import given
from hypothesis import strategies as st
from protocol_worker import Worker
from protocol_world import World

from rlbridge.sync.config import OnBusy, SyncMode
from rlbridge.sync.machines import coordinator_events as c
from rlbridge.sync.reports import ReplicaAt, UpdateDone

Mischief = Callable[[World, int], None]


def a_receiver(world: World, pick: int) -> Worker:
    receivers = world.receivers()
    return receivers[pick % len(receivers)]


def kill_rank(world: World, pick: int) -> None:
    world.kill(a_receiver(world, pick))


def kill_replica(world: World, pick: int) -> None:
    world.kill_replica(a_receiver(world, pick).join.replica)


def kill_sender(world: World, pick: int) -> None:
    world.kill(world.senders()[pick % len(world.senders())])


def host_gives_up(world: World, pick: int) -> None:
    world.tell_coordinator(c.Lose(a_receiver(world, pick).join.replica, "killed by its host"))


def deadline_passes(world: World, pick: int) -> None:
    if world.coordinator.deadline_s is not None:
        world.pass_time()


def wrong_digest(world: World, pick: int) -> None:
    world.digests.add(a_receiver(world, pick).name)


def link_breaks(world: World, pick: int) -> None:
    world.breaks += 1


def hang(world: World, pick: int) -> None:
    a_receiver(world, pick).frozen = True


def crawl(world: World, pick: int) -> None:
    a_receiver(world, pick).slow_from = (world.coordinator.epoch, pick % world.versions)


def leave_rank(world: World, pick: int) -> None:
    a_receiver(world, pick).leaves_early = True


def leave_replica(world: World, pick: int) -> None:
    for worker in world.receivers(a_receiver(world, pick).join.replica):
        worker.leaves_early = True


def join(world: World, pick: int) -> None:
    replica = 20 + sum(1 for w in world.receivers() if w.join.rank == 0)
    for rank in range(1 + pick % 2):
        world.add("receiver", replica, rank, 1 + pick % 2).joined_late = True


def join_half(world: World, pick: int) -> None:
    """One rank of two comes; the other never does."""
    world.add("receiver", 40 + sum(1 for w in world.receivers() if w.join.rank == 0), pick % 2, 2).joined_late = True


def replace(world: World, pick: int) -> None:
    dead = sorted({w.join.replica for w in world.receivers() if not w.alive})
    if dead:
        world.replace(dead[pick % len(dead)])


GENTLE = [wrong_digest, link_breaks, hang, crawl, leave_rank, leave_replica, join, join_half, replace]
HARSH = [kill_rank, kill_replica, host_gives_up, deadline_passes]
STORMS = st.lists(
    st.tuples(
        st.integers(0, 300),
        st.sampled_from([*GENTLE, *GENTLE, *HARSH, *HARSH, replace, replace, join, kill_sender]),
        st.integers(0, 11),
    ),
    min_size=1,
    max_size=6,
)
WORLDS = st.fixed_dictionaries(
    {
        "on_busy": st.sampled_from(list(OnBusy)),
        "ranks": st.integers(1, 3),
        "replicas": st.dictionaries(st.integers(0, 3), st.integers(1, 3), min_size=1, max_size=3),
        "versions": st.integers(1, 6),
    }
)


def check_ends(world: World) -> None:
    """Everybody is through or was told why not; what was delivered was delivered alike."""
    assert world.finished is not None
    for worker in world.workers.values():
        assert not worker.up or worker.stage == "left", f"{worker.name} is left behind, {worker.stage}"
    check_fates(world)
    check_histories(world)


def check_fates(world: World) -> None:
    through = [w for w in world.senders() if w.stage == "left"]
    assert all(sorted(w.fates) == list(range(world.versions)) for w in through), "a version without a fate"
    for version in range(world.versions):
        fates = {w.fates[version] for w in world.senders() if version in w.fates}
        assert len(fates) <= 1, f"trainer ranks disagree about version {version}"


def check_histories(world: World) -> None:
    """No gap between the first and the last version that a receiver computed with."""
    withdrawn = {v for w in world.senders() for v, delivered in w.fates.items() if not delivered}
    for worker in world.receivers():
        seen = worker.history
        expected = [v for v in range(seen[0], seen[-1] + 1) if v not in withdrawn] if seen else []
        assert seen == expected, f"{worker.name} missed a version"
    done = [report.version for report in world.published if isinstance(report, UpdateDone)]
    assert len(set(done)) == len(done), "an update is done twice"
    at = [(report.replica, report.version) for report in world.published if isinstance(report, ReplicaAt)]
    assert len(at) == len(set(at)) or any(w.joined_late for w in world.receivers()), "said twice"


def run(world: dict, mode: SyncMode, seed: int, storm: list, chained: bool) -> World:
    simulated = World(mode, **world)
    simulated.chained = chained
    mischief: dict[int, list] = {}
    for step, act, pick in storm:
        steps = range(step, step + 100) if act is replace else (step,)  # tried until the end of the old one is known
        for at in steps:
            mischief.setdefault(at, []).append(lambda act=act, pick=pick: act(simulated, pick))
    simulated.run(random.Random(seed), mischief)
    return simulated


@pytest.mark.parametrize("mode", SyncMode)
def test_whatever_happens_versions_stay_whole_and_every_wait_ends(mode: SyncMode) -> None:
    @interleavings(275)
    @given(world=WORLDS, seed=st.integers(0, 2**32), storm=STORMS, chained=st.booleans())
    def storms(world: dict, seed: int, storm: list, chained: bool) -> None:
        check_ends(run(world, mode, seed, storm, chained))

    storms()
