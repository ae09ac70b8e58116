"""Where control sockets live: ``tcp://host:port``, ``tcp://[ipv6]:port`` and ``unix:///path``."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import anyio
from anyio.abc import Listener, SocketAttribute, SocketStream

from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import ConfigError, DeadlineExceededError, TransportError

_FIRST_RETRY_S, _LAST_RETRY_S = 0.02, 0.5


class TcpEndpoint(NamedTuple):
    """A TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


class UnixEndpoint(NamedTuple):
    """A socket in the file system."""

    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


def parse_endpoint(text: str) -> TcpEndpoint | UnixEndpoint:
    """Read an endpoint.

    Raises:
        ConfigError: ``text`` is neither kind.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{text!r} is no endpoint: {error}") from error
    if parts.scheme == "tcp" and parts.hostname and port is not None and not parts.path:
        return TcpEndpoint(parts.hostname, port)
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return UnixEndpoint(Path(parts.path))
    raise ConfigError(f"{text!r} is no endpoint: write tcp://host:port, tcp://[ipv6]:port or unix:///path")


async def dial(text: str, timeout_s: float) -> SocketStream:
    """Connect, again and again while nobody listens yet.

    Raises:
        DeadlineExceededError: nobody answered within ``timeout_s``.
        ConfigError: ``text`` is no endpoint.
    """
    endpoint = parse_endpoint(text)
    refusal: OSError | None = None
    with anyio.move_on_after(timeout_s):
        pause_s = _FIRST_RETRY_S
        while True:
            try:
                return await _dial_once(endpoint)
            except OSError as error:
                refusal = error
            await anyio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
    raise DeadlineExceededError(text, "connection", timeout_s) from refusal


async def _dial_once(endpoint: TcpEndpoint | UnixEndpoint) -> SocketStream:
    if isinstance(endpoint, UnixEndpoint):
        return await anyio.connect_unix(endpoint.path)
    return await anyio.connect_tcp(endpoint.host, endpoint.port)


@asynccontextmanager
async def listen(text: str, config: TransportConfig) -> AsyncIterator[tuple[Listener[SocketStream], str]]:
    """Listen at an endpoint; yields the listener and the endpoint with its port resolved.

    Raises:
        ConfigError: ``text`` is no endpoint, or asks for another address than ``config.bind_host``.
        TransportError: the socket cannot be bound.
    """
    endpoint = parse_endpoint(text)
    if isinstance(endpoint, TcpEndpoint) and endpoint.host != config.bind_host:
        raise ConfigError(f"{text}: control sockets bind transport.bind_host={config.bind_host!r} only")
    try:
        listener = await _bind(endpoint)
    except OSError as error:
        raise TransportError(f"cannot listen at {text}: {error}") from error
    async with listener:
        try:
            yield listener, str(_bound(endpoint, listener))
        finally:
            if isinstance(endpoint, UnixEndpoint):
                endpoint.path.unlink(missing_ok=True)


async def _bind(endpoint: TcpEndpoint | UnixEndpoint) -> Listener[SocketStream]:
    if isinstance(endpoint, UnixEndpoint):
        return await anyio.create_unix_listener(endpoint.path, mode=0o600)
    # A name may stand for several addresses, which could not share one free port: the first is bound.
    found = await anyio.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return await anyio.create_tcp_listener(local_host=found[0][4][0], local_port=endpoint.port)


def _bound(endpoint: TcpEndpoint | UnixEndpoint, listener: Listener[SocketStream]) -> TcpEndpoint | UnixEndpoint:
    if isinstance(endpoint, UnixEndpoint):
        return endpoint
    return endpoint._replace(port=listener.extra(SocketAttribute.local_port))
