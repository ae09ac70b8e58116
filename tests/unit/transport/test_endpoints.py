"""How control endpoints are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlbridge.transport.control.endpoint import TcpEndpoint, UnixEndpoint, parse_endpoint
from rlbridge.transport.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "endpoint"),
    [
        ("tcp://127.0.0.1:0", TcpEndpoint("127.0.0.1", 0)),
        ("tcp://trainhost:5000", TcpEndpoint("trainhost", 5000)),
        ("tcp://[::1]:5000", TcpEndpoint("::1", 5000)),
        ("unix:///run/x.sock", UnixEndpoint(Path("/run/x.sock"))),
    ],
)
def test_an_endpoint_is_read_and_written_alike(text, endpoint):
    assert parse_endpoint(text) == endpoint
    assert str(endpoint) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "127.0.0.1:5000",
        "tcp://host",
        "tcp://:5000",
        "tcp://host:x",
        "tcp://host:99999",
        "unix://x",
        "udp://h:1",
        "tcp://h:1/p",
    ],
)
def test_what_is_no_endpoint_is_refused(text):
    with pytest.raises(ConfigError, match="no endpoint"):
        parse_endpoint(text)
