"""The planner's view of nodes and links."""

from __future__ import annotations

import pytest

from rlbridge.transport.config import TransportConfig, parse_node_gbps
from rlbridge.transport.errors import ConfigError
from rlbridge.transport.inproc import InprocHub
from rlbridge.transport.node import host_of, node_identity
from rlbridge.transport.topology import NodeRates, Topology


def test_addresses_say_who_lives_where_and_settings_how_fast():
    hub = InprocHub()
    addresses = {name: hub.transport(name, node).address for name, node in [("a", "n-0"), ("b", "m-1"), ("c", "n-0")]}
    topology = Topology.of(addresses, TransportConfig(external_gbps=8, local_gbps=80, node_gbps="m=16/160, absent=1/1"))
    assert topology.nodes == {"a": "n-0", "b": "m-1", "c": "n-0"}
    assert topology.rates_of("n-0") == NodeRates(1e9, 1e9, 1e10)
    assert topology.rates_of("m-1") == NodeRates(2e9, 2e9, 2e10)


def test_the_default_rates_are_those_of_the_settings():
    addresses = {"a": InprocHub().transport("a", "n").address}
    assert Topology.of(addresses, TransportConfig()) == Topology({"a": "n"})


@pytest.mark.parametrize("rates", [(0.0, 1.0, 1.0), (1.0, -1.0, 1.0), (1.0, 1.0, float("nan"))])
def test_a_rate_that_is_none_is_refused(rates):
    with pytest.raises(ConfigError, match="of every node must be positive"):
        Topology({"a": "n"}, NodeRates(*rates))
    with pytest.raises(ConfigError, match="of n must be positive"):
        Topology({"a": "n"}, overrides={"n": NodeRates(*rates)})


@pytest.mark.parametrize("text", ["gpu07", "gpu07=1", "gpu07=1/0", "=1/1", "a=1/1,", "a=1.2.3/1"])
def test_rates_of_single_nodes_that_cannot_be_read_are_refused(text):
    with pytest.raises(ConfigError, match=r"transport.node_gbps=.*HOST=EXTERNAL/LOCAL"):
        parse_node_gbps(text)
    assert parse_node_gbps(None) == {}


def test_a_world_without_workers_is_refused():
    with pytest.raises(ConfigError, match="at least one worker"):
        Topology({})


def test_this_node_has_one_identity():
    assert node_identity() == node_identity() != ""
    assert host_of("gpu-07-3f9a01c2b4d6") == "gpu-07"
