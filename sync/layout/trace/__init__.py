"""The trace: a backend's own loader is run on tensors without memory, and its copies are read off the dispatcher."""

from rlbridge.sync.layout.trace.run import Traced, trace, trace_layout

__all__ = ["Traced", "trace", "trace_layout"]
