"""Settings of the transport and the control plane (config group ``transport``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """How bytes and control messages travel.

    Attributes:
        bind_host: address that control sockets bind; loopback unless the run spans hosts.
        net_devices: network devices UCX may use (``UCX_NET_DEVICES``), comma separated.
        shared_memory: use shared memory and CMA between processes of one host; else TCP.
        bucket_bytes: upper size of one packed message.
        staging_bytes: budget for bucket buffers in flight on one worker.
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
    heartbeat_s: float = 1.0
    dead_after_s: float = 10.0
    connect_timeout_s: float = 120.0
    update_timeout_s: float = 60.0
