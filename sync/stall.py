"""One instrument for time: spans on one timeline, used by every worker and by the controller.

A span is a named interval. Names form families that the tracker groups by their first part:
``stall/trainer`` and ``stall/rollout`` (blocked by weight delivery), ``idle/...`` (blocked by something else, named by
its cause), ``work/...`` (useful), ``weights/...`` (the transfer itself). ``version`` ties a span to one weight update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

_EPOCH_S = time.time() - time.monotonic()
"""Wall time of the monotonic zero: spans of all processes of one host share an axis, and no clock step bends it."""


def now_s() -> float:
    """Seconds since the Unix epoch on this process's monotonic axis."""
    return _EPOCH_S + time.monotonic()


class Span(msgspec.Struct, frozen=True):
    """A named interval on one worker.

    Attributes:
        name: family and cause, e.g. ``stall/rollout`` or ``idle/trainer/wait_for_data``.
        start_s: start, seconds since the Unix epoch.
        duration_s: length in seconds.
        version: the policy version it belongs to, or ``None``.
    """

    name: str
    start_s: float
    duration_s: float
    version: int | None = None


class Timeline:
    """Collects the spans of one process. Thread-safe; costs about a microsecond per span."""

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def add(self, name: str, start_s: float, end_s: float, version: int | None = None) -> Span:
        """Record an interval that was measured elsewhere."""
        span = Span(name, start_s, max(0.0, end_s - start_s), version)
        with self._lock:
            self._spans.append(span)
        return span

    @contextmanager
    def span(self, name: str, version: int | None = None) -> Iterator[None]:
        """Record the time spent in the ``with`` block, also when it raises."""
        start_s = now_s()
        try:
            yield
        finally:
            self.add(name, start_s, now_s(), version)

    def drain(self) -> list[Span]:
        """Take what was recorded since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans
