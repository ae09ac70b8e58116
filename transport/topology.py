"""Which worker lives on which node, and how fast the links are. Pure: the planner's view of the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import msgspec

from rlbridge.transport.config import TransportConfig, parse_node_gbps
from rlbridge.transport.errors import ConfigError
from rlbridge.transport.node import host_of
from rlbridge.transport.protocol import TransportAddress

_BYTES_PER_S_OF_GBPS = 1e9 / 8


class NodeRates(msgspec.Struct, frozen=True):
    """Rates of one node, bytes per second.

    Attributes:
        egress_bytes_per_s, ingress_bytes_per_s: its link to other nodes, out and in.
        local_bytes_per_s: what each of its workers can send to, and receive from, the others of the node.
    """

    egress_bytes_per_s: float
    ingress_bytes_per_s: float
    local_bytes_per_s: float

    @classmethod
    def of_gbps(cls, external: float, local: float) -> Self:
        """The same external rate in both directions; both in Gbit/s."""
        return cls(*(rate * _BYTES_PER_S_OF_GBPS for rate in (external, external, local)))


_CONFIG = TransportConfig()
DEFAULT_RATES = NodeRates.of_gbps(_CONFIG.external_gbps, _CONFIG.local_gbps)


@dataclass(frozen=True, slots=True)
class Topology:
    """Workers, the nodes they live on, and link rates.

    Attributes:
        nodes: worker -> node; workers of one node share memory.
        rates: of every node that ``overrides`` does not name.
        overrides: node -> its own rates.

    Raises:
        ConfigError: there is no worker, or a rate is not positive.
    """

    nodes: Mapping[str, str]
    rates: NodeRates = DEFAULT_RATES
    overrides: Mapping[str, NodeRates] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a topology needs at least one worker")
        for node, rates in {"every node": self.rates, **self.overrides}.items():
            for name, rate in msgspec.structs.asdict(rates).items():
                if not rate > 0:
                    raise ConfigError(f"topology: {name} of {node} must be positive, not {rate}")

    @classmethod
    def of(cls, addresses: Mapping[str, TransportAddress], config: TransportConfig) -> Self:
        """The topology of the members behind ``addresses`` (worker -> address), with the configured rates.

        Raises:
            ConfigError: see the class and ``parse_node_gbps``.
        """
        nodes = {worker: address.node for worker, address in addresses.items()}
        by_host = parse_node_gbps(config.node_gbps)
        overrides = {
            node: NodeRates.of_gbps(*by_host[host])
            for node in sorted(set(nodes.values()))
            for host in (node, host_of(node))
            if host in by_host
        }
        return cls(nodes, NodeRates.of_gbps(config.external_gbps, config.local_gbps), overrides)

    def rates_of(self, node: str) -> NodeRates:
        """The rates of ``node``."""
        return self.overrides.get(node, self.rates)
