"""Settings of the launcher (config group ``launcher``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherConfig:
    """How worker processes start and end.

    Attributes:
        kind: ``local``: processes of this host.
        start_timeout_s: deadline for a worker to join the controller, model load included.
        stop_timeout_s: time a worker has to leave when asked, before it is killed.
        worker_timeout_s: longest wait for one answer of a worker: a training step, a batch, a version.
    """

    kind: Literal["local"] = "local"
    start_timeout_s: float = 120.0
    stop_timeout_s: float = 10.0
    worker_timeout_s: float = 600.0
