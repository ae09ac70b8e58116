"""SkyRL#1315, miles PR#1829: training on old tokens without any correction is refused in every mode that allows it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rlbridge.config import JobConfig, job_from_mapping, to_mapping
from rlbridge.sync.config import SyncMode
from rlbridge.transport.errors import ConfigError


def uncorrected(mode: SyncMode, max_staleness: int | None) -> dict[str, Any]:
    values = copy.deepcopy(to_mapping(JobConfig(recipe="grpo")))
    values["sync"] |= {"mode": mode.value, "max_staleness": max_staleness}
    values["algorithm"]["correction"] = "none"
    return values


@pytest.mark.parametrize("mode", SyncMode)
@pytest.mark.parametrize("max_staleness", [1, 4])
def test_a_lag_without_correction_is_refused(mode: SyncMode, max_staleness: int) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.correction=none while sync\.max_staleness={max_staleness}"):
        job_from_mapping(uncorrected(mode, max_staleness))


@pytest.mark.parametrize("mode", SyncMode)
def test_the_default_bound_of_a_mode_counts(mode: SyncMode) -> None:
    if mode is SyncMode.FULLY_SYNC:
        assert job_from_mapping(uncorrected(mode, None)).sync.mode is mode  # on-policy
    else:
        with pytest.raises(ConfigError, match="allow_uncorrected"):
            job_from_mapping(uncorrected(mode, None))


@pytest.mark.parametrize("mode", SyncMode)
def test_on_policy_needs_none(mode: SyncMode) -> None:
    assert job_from_mapping(uncorrected(mode, 0)).sync.max_staleness == 0
