"""The planner's view of nodes and links."""

from __future__ import annotations

import pytest

from rlbridge.transport.errors import ConfigError
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.node import node_identity
from rlbridge.transport.topology import Topology


def test_workers_are_grouped_by_node():
    topology = Topology({"r1": "east", "t0": "west", "r0": "east"})
    assert topology.node_names == ("east", "west")
    assert topology.workers_on("east") == ("r0", "r1")
    assert topology.workers_on("nowhere") == ()
    assert topology.same_node("r0", "r1")
    assert not topology.same_node("r0", "t0")


def test_addresses_say_who_lives_where():
    hub = InprocHub()
    addresses = {name: hub.transport(name, node).address for name, node in [("a", "n0"), ("b", "n1"), ("c", "n0")]}
    topology = Topology.of(addresses, external_bytes_per_s=1e9)
    assert topology == Topology({"a": "n0", "b": "n1", "c": "n0"}, 1e9)


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, -1.0), (float("nan"), 1.0)])
def test_a_rate_that_is_none_is_refused(rates):
    with pytest.raises(ConfigError, match="bytes_per_s must be positive"):
        Topology({"a": "n"}, *rates)


def test_a_world_without_workers_is_refused():
    with pytest.raises(ConfigError, match="at least one worker"):
        Topology({})


def test_this_node_has_one_identity():
    assert node_identity() == node_identity() != ""
