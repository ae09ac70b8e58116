"""Real benchmarks, small: processes of this host, and of two simulated hosts where the machine can have them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

KINDS = ["planned", "broadcast", "p2p"]
ABLE = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "tc", "unshare", "nsenter"))
needs_namespaces = pytest.mark.skipif(not ABLE, reason="simulated hosts need root, iproute2 and util-linux")
SMALL = ("--workers-per-host", "1", "--mb", "4", "--rounds", "1", "--bucket-bytes", "300000")
COMMAND = (sys.executable, "-P", "-m", "rlbridge", "bench", "transfer")


def bench(tmp_path: Path, *arguments: str) -> dict:
    target = tmp_path / "result.json"
    done = subprocess.run(
        [*COMMAND, *arguments, "--json", str(target)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(target.read_text())


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for name in listed.split() if name.startswith("rlbridge-")]


def test_three_kinds_between_processes(tmp_path: Path) -> None:
    result = bench(tmp_path, "--trainers", "1", "--rollouts", "2", *SMALL)
    assert [kind["kind"] for kind in result["kinds"]] == KINDS
    planned = result["kinds"][0]
    assert planned["ratio"] == 1
    for kind in result["kinds"]:
        assert len(kind["times_s"]) == 1
        assert kind["digests_checked"] > 0
        assert 0 < kind["peak_staging_bytes"] <= result["staging_bytes"]
        assert sum(kind["bytes_by_stage"].values()) >= 2 * result["model_bytes"]


def test_the_way_of_a_bucket_beside_bare_ucxx(tmp_path: Path) -> None:
    result = bench(tmp_path, "--loopback", *SMALL)
    assert [link["link"] for link in result["links"]] == ["shared memory", "tcp"]
    for link in result["links"]:
        assert [way["way"] for way in link["ways"]] == ["bare", "carry", "full"]
        assert all(way["gb_per_s"] > 0 for way in link["ways"])
        assert set(link["sender_s"]) == {"pack and digest", "send"}
        assert set(link["receiver_s"]) == {"receive", "check", "unpack"}


@needs_namespaces
def test_two_simulated_hosts_are_as_slow_as_their_links_and_leave_nothing(tmp_path: Path) -> None:
    result = bench(tmp_path, "--hosts", "2", "--link-mbps", "100", *SMALL)
    for kind in result["kinds"]:
        # Were memory shared between the hosts, or a link not limited, it would be faster than the link can be.
        # (A bucket shaper lets a burst of 256 KiB pass.)
        assert kind["median_s"] > (result["model_bytes"] - 262_144) / 12.5e6
    assert namespaces() == []


@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_benchmark_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """Killed outright it can remove no namespaces, but its processes end, and the next benchmark clears up."""
    process = subprocess.Popen([*COMMAND, "--hosts", "2", *SMALL, "--rounds", "500"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    with process:
        for line in process.stderr:
            if line.startswith("round"):
                break
        own = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert own
        process.send_signal(number)
        process.stderr.read()
        assert process.wait(60) == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]
    deadline_s = time.monotonic() + 60
    while any(psutil.pid_exists(pid) for pid in own) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not [pid for pid in own if psutil.pid_exists(pid)]
    if number is signal.SIGKILL:
        assert namespaces()
        bench(tmp_path, "--hosts", "2", *SMALL)
    assert namespaces() == []
