"""Moving bytes between workers. Knows nothing of weights, layouts or RL."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "InprocHub": "rlbridge.transport.inproc",
    "InprocTransport": "rlbridge.transport.inproc",
    "Topology": "rlbridge.transport.topology",
    "Transport": "rlbridge.transport.protocol",
    "TransportAddress": "rlbridge.transport.protocol",
    "TransportConfig": "rlbridge.transport.config",
    "UcxxTransport": "rlbridge.transport.ucxx_transport",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562): UCX and torch cost a second that most importers do not owe."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)
