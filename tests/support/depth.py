"""How many random interleavings a test tries: few in every run, five times as many by ``make test-deep``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

DEEP = "RLBRIDGE_TEST_DEPTH"


def interleavings(count: int) -> settings:
    """Hypothesis settings for ``count`` examples, times the depth that the environment asks for."""
    depth = int(os.environ.get(DEEP, "1"))
    return settings(
        max_examples=count * depth,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
