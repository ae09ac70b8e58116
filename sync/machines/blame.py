"""Who is to blame when a transfer is late. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set

from rlbridge.sync.machines.membership import Membership
from rlbridge.sync.machines.phases import Phase, Stage
from rlbridge.sync.machines.update import Offers
from rlbridge.sync.plan.program import Program


def missing(stage: Stage, members: Membership, offers: Offers, programs: Mapping[str, Program]) -> list[str]:
    """Who has not done what the coordinator waits for in ``stage``."""
    match stage.phase:
        case Phase.GATHERING:
            return members.missing()
        case Phase.IDLE:
            return offers.missing(members)
        case Phase.MOVING if programs:
            return to_blame(stage.waiting, programs, set(members.sender_names()))
        case _:
            return sorted(stage.waiting)


def to_blame(late: Set[str], programs: Mapping[str, Program], senders: Set[str]) -> list[str]:
    """The workers that hold up the others, of those that are ``late``.

    A receiver that still waits for a late forwarder is not to blame. So blamed are the receivers that everybody has
    sent to who should have; if there are none, a late sender may itself be held up by one of its receivers, and the
    first receiver of each chain is blamed. Receivers that forward to each other form a ring without a first one; of a
    ring one is blamed, the one that forwards most to others that are late: nobody but all of them could be cleared.

    Returns:
        Receivers; only senders, and all of them, if no receiver is late.
    """
    receivers = late - senders
    sources = {w: {b.recv_from for b in programs[w].buckets if b.recv_from in late} for w in receivers}
    held_up_by_none = sorted(w for w, froms in sources.items() if not froms)
    if held_up_by_none or not receivers:
        return held_up_by_none or sorted(late)
    reached = {worker: _upstream(worker, sources) & receivers for worker in receivers}
    firsts = {frozenset({w} | up) for w, up in reached.items() if all(w in reached[other] for other in up)}
    return sorted(min(ring, key=lambda w: (-_forwards(programs[w], late), w)) for ring in firsts)


def _upstream(worker: str, sources: Mapping[str, Set[str | None]]) -> set[str]:
    """Everybody from whom something reaches ``worker``, over any number of hops."""
    found: set[str] = set()
    todo = [worker]
    while todo:
        new = {source for source in sources.get(todo.pop(), ()) if source is not None} - found
        found |= new
        todo += new
    return found


def _forwards(program: Program, late: Set[str]) -> int:
    """Bucket copies that the worker forwards to workers that are late."""
    return sum(b.recv_from is not None and peer in late for b in program.buckets for peer in b.send_to)
