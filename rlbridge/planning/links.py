"""A plan's links as a person thinks of them: equal nodes together, each with its ways out, in and inside. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from rlbridge.sync.plan.report import link_bytes, link_rate
from rlbridge.sync.plan.tables import STAGES
from rlbridge.sync.plan.transfer_plan import TransferPlan

_SAME = 0.01
"""Nodes whose loads differ by less than this share of the larger one are drawn as one."""

_WAYS = {"out": "out of", "in": "into", "inside": "inside"}


class Load(msgspec.Struct, frozen=True):
    """One kind of link, and as many of its like as carry the same.

    Attributes:
        way: ``"out"`` or ``"in"`` for a node's link, ``"inside"`` for the busiest worker's link within the node.
        nodes: whose it is, sorted.
        roles: who lives there: ``"trainer"``, ``"rollout"`` or ``"trainer+rollout"``.
        bytes_by_stage: on each of them (of nearly equal ones, the busiest).
        seconds: that it takes at full rate.
    """

    way: str
    nodes: list[str]
    roles: str
    bytes_by_stage: dict[str, int]
    seconds: float

    @property
    def total_bytes(self) -> int:
        """Of all stages."""
        return sum(self.bytes_by_stage.values())

    @property
    def label(self) -> str:
        """``out of 2 trainer nodes``, ``into node4 (rollout)``."""
        one = len(self.nodes) == 1
        whose = f"{self.nodes[0]} ({self.roles})" if one else f"{len(self.nodes)} {self.roles} nodes"
        return f"{_WAYS[self.way]} {whose}"


def loads_of(plan: TransferPlan) -> list[Load]:
    """All links that carry something, equal ones collapsed, the busiest first."""
    single = _single_loads(plan)
    groups: list[list[Load]] = []
    for load in single:
        for group in groups:
            if _alike(load, group[0]):
                group.append(load)
                break
        else:
            groups.append([load])
    found = []
    for group in groups:
        busiest = max(group, key=lambda load: load.seconds)
        nodes = [node for load in group for node in load.nodes]
        found.append(msgspec.structs.replace(busiest, nodes=nodes))
    return sorted(found, key=lambda load: (-load.seconds, load.nodes, load.way))


def _single_loads(plan: TransferPlan) -> list[Load]:
    roles: dict[str, set[str]] = {}
    for worker, node in plan.topology.nodes.items():
        roles.setdefault(node, set()).add("trainer" if worker in plan.correspondence.senders else "rollout")
    found: dict[tuple[str, str], Load] = {}
    for link, stages in link_bytes(plan).items():
        way, name = link.split(":", 1)
        within = way in ("send", "take")
        node = plan.topology.nodes[name] if within else name
        by_stage = {str(stage): stages[stage] for stage in STAGES if stage in stages}
        seconds = sum(by_stage.values()) / link_rate(plan, link)
        load = Load("inside" if within else way, [node], "+".join(sorted(roles[node], reverse=True)), by_stage, seconds)
        known = found.get((node, load.way))
        if known is None or known.seconds < load.seconds:
            found[node, load.way] = load
    return [found[key] for key in sorted(found)]


def _alike(load: Load, other: Load) -> bool:
    if (load.way, load.roles) != (other.way, other.roles):
        return False
    return _near(load.bytes_by_stage, other.bytes_by_stage) and _near({"s": load.seconds}, {"s": other.seconds})


def _near(one: Mapping[str, float], other: Mapping[str, float]) -> bool:
    most = max([*one.values(), *other.values()])
    return all(abs(one.get(stage, 0) - other.get(stage, 0)) <= _SAME * most for stage in {*one, *other})
