"""``trace.json``: the spans of all workers on one timeline, as Perfetto and chrome://tracing open it.

One process row per worker; within it one thread row per family of spans (``work``, ``stall``, ``idle``, ``weights``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from rlbridge.sync.stall import Span

_US_PER_S = 1e6


def write_trace(path: Path, spans: Mapping[str, Sequence[Span]]) -> None:
    """Write the spans of each worker, by name, in the Chrome trace event format. Time starts at the first span."""
    content = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(spans))}
    path.write_bytes(msgspec.json.encode(content))


def trace_events(spans: Mapping[str, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    """Metadata events that name the rows, then one complete event (``ph: X``, microseconds) per span."""
    origin_s = min((span.start_s for worker in spans.values() for span in worker), default=0.0)
    for pid, worker in enumerate(sorted(spans), start=1):
        yield _name("process_name", pid, 0, worker)
        families = sorted({_family(span) for span in spans[worker]})
        for tid, family in enumerate(families, start=1):
            yield _name("thread_name", pid, tid, family)
        for span in sorted(spans[worker], key=lambda span: span.start_s):
            yield {
                "ph": "X",
                "name": span.name,
                "cat": _family(span),
                "pid": pid,
                "tid": families.index(_family(span)) + 1,
                "ts": (span.start_s - origin_s) * _US_PER_S,
                "dur": span.duration_s * _US_PER_S,
                "args": {} if span.version is None else {"version": span.version},
            }


def _family(span: Span) -> str:
    return span.name.split("/", 1)[0]


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
