"""Which worker lives on which node, and how fast the links are. Pure: the planner's view of the world."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rlbridge.transport.errors import ConfigError
from rlbridge.transport.protocol import TransportAddress

DEFAULT_EXTERNAL_BYTES_PER_S = 1.25e9
"""One 10 Gbit/s port per node: what a plain cluster has at least."""

DEFAULT_LOCAL_BYTES_PER_S = 5e9
"""UCX over shared memory with CMA, one stream of 8 MiB buckets, measured on a small virtual machine."""


@dataclass(frozen=True, slots=True)
class Topology:
    """Workers, the nodes they live on, and link rates.

    Attributes:
        nodes: worker -> node; workers of one node share memory.
        external_bytes_per_s: rate of a node's link to other nodes, each direction.
        local_bytes_per_s: rate between two workers of one node.

    Raises:
        ConfigError: there is no worker, or a rate is not positive.
    """

    nodes: Mapping[str, str]
    external_bytes_per_s: float = DEFAULT_EXTERNAL_BYTES_PER_S
    local_bytes_per_s: float = DEFAULT_LOCAL_BYTES_PER_S
    _workers: Mapping[str, tuple[str, ...]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("a topology needs at least one worker")
        for name in ("external_bytes_per_s", "local_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"topology: {name} must be positive, not {getattr(self, name)}")
        by_node: dict[str, list[str]] = {}
        for worker in sorted(self.nodes):
            by_node.setdefault(self.nodes[worker], []).append(worker)
        object.__setattr__(self, "_workers", {node: tuple(by_node[node]) for node in sorted(by_node)})

    @classmethod
    def of(
        cls,
        addresses: Mapping[str, TransportAddress],
        external_bytes_per_s: float = DEFAULT_EXTERNAL_BYTES_PER_S,
        local_bytes_per_s: float = DEFAULT_LOCAL_BYTES_PER_S,
    ) -> Self:
        """The topology of the members behind ``addresses`` (worker -> address)."""
        nodes = {worker: address.node for worker, address in addresses.items()}
        return cls(nodes, external_bytes_per_s, local_bytes_per_s)

    @property
    def node_names(self) -> tuple[str, ...]:
        """All nodes, sorted."""
        return tuple(self._workers)

    def workers_on(self, node: str) -> tuple[str, ...]:
        """The workers of ``node``, sorted; none if nobody lives there."""
        return self._workers.get(node, ())

    def same_node(self, first: str, second: str) -> bool:
        """Whether two workers share memory.

        Raises:
            KeyError: a worker is not part of the topology.
        """
        return self.nodes[first] == self.nodes[second]
