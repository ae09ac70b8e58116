"""Settings of the transport and the control plane (config group ``transport``)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rlbridge.transport.errors import ConfigError

_NODE_GBPS = re.compile(r"([^=,/\s]+)=([0-9.]+)/([0-9.]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How bytes and control messages travel.

    Attributes:
        bind_host: address that control sockets bind; loopback unless the run spans hosts.
        net_devices: network devices UCX may use (``UCX_NET_DEVICES``), comma separated.
        shared_memory: use shared memory and CMA between processes of one host; else TCP.
        bucket_bytes: upper size of one packed message.
        staging_bytes: budget for bucket buffers in flight on one worker.
        external_gbps: rate of each node's link to other nodes, both ways, in Gbit/s; what plans are made for.
        local_gbps: rate between the workers of one node, each way, in Gbit/s.
        node_gbps: other rates of single nodes, ``HOST=EXTERNAL/LOCAL``, comma separated; HOST is a host's name.
        heartbeat_s: seconds between heartbeats of a control channel.
        dead_after_s: silence after which the peer of a control channel counts as dead.
        connect_timeout_s: deadline for a worker to join and for a link to open.
        update_timeout_s: deadline for each phase of one weight update.
    """

    bind_host: str = "127.0.0.1"
    net_devices: str = "lo"
    shared_memory: bool = True
    bucket_bytes: int = 8 * 1024 * 1024
    staging_bytes: int = 256 * 1024 * 1024
    external_gbps: float = 10.0
    local_gbps: float = 40.0
    node_gbps: str | None = None
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    connect_timeout_s: float = 120.0
    update_timeout_s: float = 60.0


def parse_node_gbps(text: str | None) -> dict[str, tuple[float, float]]:
    """``transport.node_gbps`` as host to (external, local) Gbit/s.

    Raises:
        ConfigError: the text has another form, or a rate is not positive.
    """
    rates: dict[str, tuple[float, float]] = {}
    for entry in (text or "").replace(" ", "").split(",") if text else ():
        match = _NODE_GBPS.fullmatch(entry)
        try:
            external, local = (float(rate) for rate in match.groups()[1:]) if match else (0.0, 0.0)
        except ValueError:
            external = local = 0.0
        if match is None or not (external > 0 and local > 0):
            raise ConfigError(
                f"transport.node_gbps={text}: {entry!r} is not HOST=EXTERNAL/LOCAL with rates above 0 in Gbit/s, "
                "e.g. gpu07=100/400"
            )
        rates[match[1]] = (external, local)
    return rates
