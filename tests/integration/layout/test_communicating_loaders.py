"""A loader that communicates across ranks is run equally often on all of them, although they find different things."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rlbridge.sync.layout.source_map import SourceMap

PROGRAM = Path(__file__).with_name("communicating_loader.py")
WORLD = 2
DEADLINE_S = 150.0


@pytest.mark.parametrize("method", ["auto", "probe"])
def test_ranks_that_find_different_things_load_in_step(tmp_path, method):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    outs = [tmp_path / f"{rank}.json" for rank in range(WORLD)]
    ranks = [
        subprocess.Popen(
            [sys.executable, PROGRAM, str(rank), str(WORLD), method, tmp_path / "meeting", out], env=environment
        )
        for rank, out in enumerate(outs)
    ]
    try:
        codes = [process.wait(DEADLINE_S) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert codes == [0] * WORLD
    first, second = (msgspec.json.decode(out.read_bytes(), type=SourceMap) for out in outs)
    assert first.opaque == []
    assert {box.runtime for box in first.boxes} == {"plain", "odd", "wide"}
    assert [(part.runtime, part.count, part.inputs) for part in second.opaque] == [("odd", (6,), ("odd",))]
    assert {box.runtime: box.start for box in second.boxes} == {"plain": (4, 0), "wide": (0, 5)}
