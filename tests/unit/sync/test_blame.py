"""Who is dropped at the deadline of a transfer: never those who only wait for somebody else."""

from __future__ import annotations

import pytest

from rlbridge.sync.machines.blame import to_blame
from rlbridge.sync.plan.program import BucketProgram, Program

SENDERS = {"t0", "t1"}


def programs_of(*routes: str) -> dict[str, Program]:
    """One bucket for each route, as ``t0 a b``: from t0 to a, and from a to b."""
    workers = sorted(SENDERS | {worker for route in routes for worker in route.split()})
    buckets: dict[str, list[BucketProgram]] = {worker: [] for worker in workers}
    for number, route in enumerate(routes):
        names = route.split()
        for at, name in enumerate(names):
            recv_from = names[at - 1] if at else None
            buckets[name].append(BucketProgram(number, 8, recv_from, tuple(names[at + 1 : at + 2]), ()))
    return {worker: Program(worker, "hash", tuple(workers), tuple(parts)) for worker, parts in buckets.items()}


CHAIN = ("t0 a b c", "t1 a b c")
TWO_CHAINS = ("t0 a b", "t1 c d")
RING = ("t0 a b", "t0 b a")


@pytest.mark.parametrize(
    ("routes", "late", "blamed"),
    [
        pytest.param(CHAIN, "a b c", "a", id="first of a chain"),
        pytest.param(CHAIN, "b c", "b", id="its forwarder is through"),
        pytest.param(CHAIN, "t0 a b c", "a", id="its sender is held up too"),
        pytest.param(CHAIN, "c", "c", id="last of a chain"),
        pytest.param(TWO_CHAINS, "a b c d", "a c", id="firsts of two chains"),
        pytest.param(TWO_CHAINS, "t0 a b t1 c d", "a c", id="firsts of two chains with their senders"),
        pytest.param(TWO_CHAINS, "t0 a b c d", "c", id="only one of them has everything sent to it"),
        pytest.param(RING, "a b", "a", id="one of a ring"),
        pytest.param(RING, "b", "b", id="a ring of which one is through"),
        pytest.param((*RING, "t1 b a"), "a b", "b", id="of a ring, who forwards most"),
        pytest.param((*RING, "t0 a c"), "t0 a b c", "a", id="a ring and who waits for it"),
        pytest.param((*RING, "t0 c a"), "t0 a b c", "c", id="a ring that waits for somebody"),
        pytest.param(CHAIN, "t1", "t1", id="only a sender"),
        pytest.param(CHAIN, "t0 t1", "t0 t1", id="only senders"),
    ],
)
def test_blamed_are_those_who_hold_up_the_others(routes, late, blamed) -> None:
    assert to_blame(set(late.split()), programs_of(*routes), SENDERS) == blamed.split()
