"""rlbridge: asynchronous RL post-training for language models whose weights never wait.

The library is ``rlbridge.sync`` over ``rlbridge.transport``; the names below are its public face. They are loaded when
they are first used, so that ``import rlbridge.sync`` costs neither Hydra, nor wandb, nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlbridge.sync.adapters import ReceiverAdapter, SenderAdapter
    from rlbridge.sync.config import SyncConfig, SyncMode
    from rlbridge.sync.coordinator import Coordinator
    from rlbridge.transport.config import TransportConfig
    from rlbridge.transport.errors import ConfigError, DeadlineExceededError, RlbridgeError

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "Coordinator",
    "DeadlineExceededError",
    "ReceiverAdapter",
    "RlbridgeError",
    "SenderAdapter",
    "SyncConfig",
    "SyncMode",
    "TransportConfig",
    "__version__",
]

_HOMES = {
    "ConfigError": "rlbridge.transport.errors",
    "Coordinator": "rlbridge.sync.coordinator",
    "DeadlineExceededError": "rlbridge.transport.errors",
    "ReceiverAdapter": "rlbridge.sync.adapters",
    "RlbridgeError": "rlbridge.transport.errors",
    "SenderAdapter": "rlbridge.sync.adapters",
    "SyncConfig": "rlbridge.sync.config",
    "SyncMode": "rlbridge.sync.config",
    "TransportConfig": "rlbridge.transport.config",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'rlbridge' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
