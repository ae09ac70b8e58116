"""The bridge: what goes where, how it moves, and when. Imports neither Hydra nor wandb, and no trainer or engine.

Usable alone inside somebody else's framework: host a ``Coordinator``, give trainer ranks a ``SenderAdapter`` and engine
ranks a ``ReceiverAdapter``. Names load on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlbridge.sync.adapters import (
        AsyncReceiverAdapter,
        AsyncSenderAdapter,
        AsyncSendHandle,
        ReceiverAdapter,
        SenderAdapter,
        SendHandle,
    )
    from rlbridge.sync.config import AtBound, KvCachePolicy, OnBusy, SyncConfig, SyncMode
    from rlbridge.sync.coordinator import Coordinator
    from rlbridge.sync.layout.checkpoint import read_spec
    from rlbridge.sync.layout.discover import discover
    from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
    from rlbridge.sync.reports import PlanMade, ReplicaAt, ReplicaLost, UpdateDone, UpdateStats
    from rlbridge.sync.stall import Span, Timeline

_HOME = {
    "adapters": (
        "AsyncReceiverAdapter",
        "AsyncSendHandle",
        "AsyncSenderAdapter",
        "ReceiverAdapter",
        "SendHandle",
        "SenderAdapter",
    ),
    "config": ("AtBound", "KvCachePolicy", "OnBusy", "SyncConfig", "SyncMode"),
    "coordinator": ("Coordinator",),
    "layout.checkpoint": ("read_spec",),
    "layout.discover": ("discover",),
    "layout.spec": ("CheckpointSpec", "TensorSpec"),
    "reports": ("PlanMade", "ReplicaAt", "ReplicaLost", "UpdateDone", "UpdateStats"),
    "stall": ("Span", "Timeline"),
}
_MODULE_OF = {name: f"rlbridge.sync.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "AsyncReceiverAdapter",
    "AsyncSendHandle",
    "AsyncSenderAdapter",
    "AtBound",
    "CheckpointSpec",
    "Coordinator",
    "KvCachePolicy",
    "OnBusy",
    "PlanMade",
    "ReceiverAdapter",
    "ReplicaAt",
    "ReplicaLost",
    "SendHandle",
    "SenderAdapter",
    "Span",
    "SyncConfig",
    "SyncMode",
    "TensorSpec",
    "Timeline",
    "UpdateDone",
    "UpdateStats",
    "discover",
    "read_spec",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
