"""Starting whole jobs for the system tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import Start, started_jobs


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start ``rlbridge run RECIPE SMALL... OVERRIDES...``."""
    yield from started_jobs(tmp_path)
