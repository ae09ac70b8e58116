"""What the tests of real loaders share."""

from __future__ import annotations

import pytest


@pytest.fixture
def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers loads in the calling thread: a trace does not follow casts made in other ones."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", "1")
