"""Runs a plan's programs over a model of links and tells how long it takes. Pure.

The model: every worker takes its buckets in the one global order and buys their buffers from a byte budget in that
order, as the executor does; a hop begins when its sender has the bucket and its receiver has the buffer; a buffer is
given back when everything is sent. A link serves its messages one after the other at full rate, a message passes the
sending and the receiving link at the same time as far as they are free, and arrives a latency later. There is no
barrier.
If nothing can happen although somebody is not done, the plan has a deadlock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from itertools import count

import msgspec
import numpy as np

from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.plan.report import link_bytes, link_rate, link_seconds
from rlbridge.sync.plan.tables import Buckets, Routes
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.errors import PlanError

LATENCY_S = 50e-6
"""From the end of sending to the receiver's knowledge of it: UCX over TCP, one small message."""


class Prediction(msgspec.Struct, frozen=True):
    """What the model says of one update.

    Attributes:
        seconds: until the last worker is done.
        worst_link, worst_link_s: the link with the most work, and that work at full rate.
        peak_staging_bytes: worker to the most bytes of bucket buffers that it held at a time.
        simulated: part of the plan that was run; the rest of its time is what the same rate gives.
    """

    seconds: float
    worst_link: str | None
    worst_link_s: float
    peak_staging_bytes: dict[str, int]
    simulated: float = 1.0


def predict(
    plan: TransferPlan, *, staging_bytes: int, latency_s: float = LATENCY_S, hops_max: int = 250_000
) -> Prediction:
    """Simulate one update in time.

    Args:
        plan: planned or a baseline.
        staging_bytes: budget for bucket buffers of one worker.
        latency_s: of one message.
        hops_max: about how many messages are simulated at most (each takes some microseconds). Of a larger plan the
            first part is run: all routes advance in proportion, so it has the same work as any other part.

    Raises:
        PlanError: the plan has a deadlock.
    """
    seconds = link_seconds(plan, link_bytes(plan))
    worst = max(seconds, key=lambda link: (seconds[link], link), default=None)
    busiest_s = seconds[worst] if worst else 0.0
    hops = np.cumsum(np.diff(plan.routes.hop_begin)[plan.buckets.route])
    within = int(np.searchsorted(hops, hops_max, side="right"))
    part = _run(plan, max(min(1, len(hops)), within), staging_bytes, latency_s)
    total_s = part.seconds
    if part.buckets < len(hops):
        # A shorter part tells what belongs to beginning and end, and what every second of work on a link takes.
        less = _run(plan, max(1, part.buckets // 2), staging_bytes, latency_s)
        work_s = part.busiest_s - less.busiest_s
        rate = max(1.0, (part.seconds - less.seconds) / work_s) if work_s > 0 else part.seconds / part.busiest_s
        total_s = part.seconds + rate * max(0.0, busiest_s - part.busiest_s)
    return Prediction(total_s, worst, busiest_s, part.peak_staging_bytes, part.buckets / max(1, len(hops)))


class _Part(msgspec.Struct, frozen=True):
    """The first ``buckets`` of a plan: when they are delivered, and what its busiest link has to do for them."""

    buckets: int
    seconds: float
    busiest_s: float
    peak_staging_bytes: dict[str, int]


def _run(plan: TransferPlan, first: int, staging_bytes: int, latency_s: float) -> _Part:
    whole = plan.buckets
    buckets = Buckets(whole.route[:first], whole.begin[:first], whole.end[:first])
    run = _Run(plan, buckets, staging_bytes, latency_s)
    run.run()
    routes = len(plan.cargo.route_bytes)
    route_bytes = np.zeros(routes, np.int64)
    np.add.at(route_bytes, buckets.route, buckets.payload_bytes)
    busiest_s = max(link_seconds(plan, link_bytes(plan, route_bytes)).values(), default=0.0)
    return _Part(first, run.seconds, busiest_s, dict(zip(plan.workers, run.peak_bytes, strict=True)))


class _Links:
    """Busy-until times of every worker's and node's links, as numbers."""

    def __init__(self, plan: TransferPlan) -> None:
        nodes = [plan.topology.nodes[worker] for worker in plan.workers]
        names: dict[str, int] = {}
        self.send, self.take = (
            [names.setdefault(f"{way}:{w}", len(names)) for w in plan.workers] for way in ("send", "take")
        )
        self.out, self.into = ([names.setdefault(f"{way}:{n}", len(names)) for n in nodes] for way in ("out", "in"))
        self.s_per_byte = [1.0 / link_rate(plan, name) for name in names]
        self.free_s = [0.0] * len(names)

    def of_hop(self, sender: int, receiver: int) -> tuple[int, int]:
        """The sending and the receiving link."""
        if self.out[sender] == self.out[receiver]:
            return self.send[sender], self.take[receiver]
        return self.out[sender], self.into[receiver]

    def occupy(self, link: int, now_s: float, size_bytes: int) -> tuple[float, float]:
        """Serve a message after those before it: its begin and end."""
        begin_s = max(now_s, self.free_s[link])
        self.free_s[link] = begin_s + size_bytes * self.s_per_byte[link]
        return begin_s, self.free_s[link]


_SENDING, _TAKING, _ARRIVED = range(3)


class _Run:
    """One simulated update. A *seat* is a worker's part in a bucket: the number ``bucket * workers + worker``."""

    def __init__(self, plan: TransferPlan, buckets: Buckets, budget_bytes: int, latency_s: float) -> None:
        self._workers, self._budget_bytes, self._latency_s = plan.workers, budget_bytes, latency_s
        self._links = _Links(plan)
        self._route = buckets.route.tolist()
        self._size = (buckets.payload_bytes + HEADER_BYTES).tolist()
        self._source = plan.routes.source.tolist()
        self._trees = [_children(plan.routes, route) for route in range(len(self._source))]
        self._order = _orders(plan.routes, buckets)
        workers = len(plan.workers)
        self._next = [0] * workers
        self._used_bytes = [0] * workers
        self.peak_bytes = [0] * workers
        self.seconds = 0.0
        self._has_buffer: set[int] = set()
        self._has_bytes: set[int] = set()
        self._unsent: dict[int, int] = {}
        self._events: list[tuple[float, int, int, int, int, int]] = []
        """(time, kind, bucket, turn, sender, receiver): at the same time the lower bucket comes first."""
        self._turns = count()

    def run(self) -> None:
        """Until nothing happens any more."""
        for worker in range(len(self._workers)):
            self._buy(worker, 0.0)
        while self._events:
            now_s, kind, bucket, _, sender, receiver = heapq.heappop(self._events)
            if kind == _SENDING:
                link = self._links.of_hop(sender, receiver)[0]
                begin_s, _ = self._links.occupy(link, now_s, self._size[bucket])
                self._happens(begin_s, _TAKING, bucket, sender, receiver)
            elif kind == _TAKING:
                sending, taking = self._links.of_hop(sender, receiver)
                _, end_s = self._links.occupy(taking, now_s, self._size[bucket])
                end_s = max(end_s, now_s + self._size[bucket] * self._links.s_per_byte[sending]) + self._latency_s
                self._happens(end_s, _ARRIVED, bucket, sender, receiver)
            else:
                self._arrived(bucket, sender, receiver, now_s)
        waiting = [w for w, order in enumerate(self._order) if self._next[w] < len(order) or self._used_bytes[w]]
        if waiting:
            who = ", ".join(self._workers[worker] for worker in waiting)
            raise PlanError(f"deadlock: nothing moves any more, and these workers are not done: {who}")

    def _seat(self, bucket: int, worker: int) -> int:
        return bucket * len(self._workers) + worker

    def _buy(self, worker: int, now_s: float) -> None:
        """Buffers for the next buckets, in order, as far as the budget goes."""
        order = self._order[worker]
        while self._next[worker] < len(order):
            bucket = order[self._next[worker]]
            used = self._used_bytes[worker]
            if used and used + self._size[bucket] > self._budget_bytes:
                return
            self._next[worker] += 1
            self._used_bytes[worker] = used + self._size[bucket]
            self.peak_bytes[worker] = max(self.peak_bytes[worker], self._used_bytes[worker])
            self._has_buffer.add(self._seat(bucket, worker))
            tree = self._trees[self._route[bucket]]
            self._unsent[self._seat(bucket, worker)] = len(tree[worker][1])
            parent = tree[worker][0]
            if parent is None:
                self._have(bucket, worker, now_s)
            elif self._seat(bucket, parent) in self._has_bytes:
                self._send(bucket, parent, worker, now_s)

    def _have(self, bucket: int, worker: int, now_s: float) -> None:
        """The worker has the bucket's bytes: pass them on to those who have a buffer for them."""
        self._has_bytes.add(self._seat(bucket, worker))
        for receiver in self._trees[self._route[bucket]][worker][1]:
            if self._seat(bucket, receiver) in self._has_buffer:
                self._send(bucket, worker, receiver, now_s)
        self._give_back_if_done(bucket, worker, now_s)

    def _send(self, bucket: int, sender: int, receiver: int, now_s: float) -> None:
        self._happens(now_s, _SENDING, bucket, sender, receiver)

    def _happens(self, at_s: float, kind: int, bucket: int, sender: int, receiver: int) -> None:
        heapq.heappush(self._events, (at_s, kind, bucket, next(self._turns), sender, receiver))

    def _arrived(self, bucket: int, sender: int, receiver: int, now_s: float) -> None:
        self._unsent[self._seat(bucket, sender)] -= 1
        self._have(bucket, receiver, now_s)
        self._give_back_if_done(bucket, sender, now_s)

    def _give_back_if_done(self, bucket: int, worker: int, now_s: float) -> None:
        seat = self._seat(bucket, worker)
        if self._unsent.get(seat) == 0:
            del self._unsent[seat]
            self._has_buffer.discard(seat)
            self._has_bytes.discard(seat)
            self._used_bytes[worker] -= self._size[bucket]
            self.seconds = now_s
            self._buy(worker, now_s)


def _children(routes: Routes, route: int) -> dict[int, tuple[int | None, Sequence[int]]]:
    """Worker to its parent and its children in a route's tree."""
    inside = slice(int(routes.hop_begin[route]), int(routes.hop_begin[route + 1]))
    sends: dict[int, list[int]] = defaultdict(list)
    parent: dict[int, int | None] = {int(routes.sender[inside][0]): None}
    for sender, receiver in zip(routes.sender[inside].tolist(), routes.receiver[inside].tolist(), strict=True):
        sends[sender].append(receiver)
        parent[receiver] = sender
    return {worker: (its, sends[worker]) for worker, its in parent.items()}


def _orders(routes: Routes, buckets: Buckets) -> list[list[int]]:
    """Per worker its buckets, ascending."""
    order: list[list[int]] = [[] for _ in routes.workers]
    members = [
        np.unique(np.append(routes.sender[a:b], routes.receiver[a:b])).tolist()
        for a, b in zip(routes.hop_begin[:-1].tolist(), routes.hop_begin[1:].tolist(), strict=True)
    ]
    for bucket, route in enumerate(buckets.route.tolist()):
        for worker in members[route]:
            order[worker].append(bucket)
    return order
