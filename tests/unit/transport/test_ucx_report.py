"""The doctor's words about UCX."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rlbridge.transport.inspect import UcxReport, explain, inspect_ucx, parse_resources

COMPLETE = UcxReport(
    version="1.21.0",
    library="/opt/ucx/lib/libucp.so.0",
    from_wheel=False,
    transports={},
    shared_memory=True,
    cma=True,
    tcp_devices=("eth0",),
    rdma_devices=("mlx5_0:1",),
    cuda=True,
    shm_total_bytes=2**30,
    shm_free_bytes=2**30,
    node="n",
    remarks=(),
)


def test_a_complete_machine_needs_no_words():
    assert explain(COMPLETE, rdma_hardware=["mlx5_0"], ptrace_scope=0) == ()


@pytest.mark.parametrize(
    ("change", "hardware", "ptrace_scope", "words"),
    [
        ({"rdma_devices": (), "from_wheel": True}, ["mlx5_0"], 0, "mlx5_0: PyPI's libucx is built without verbs"),
        ({"rdma_devices": ()}, ["mlx5_0"], 0, "mlx5_0: this libucx has no verbs"),
        ({"rdma_devices": ()}, [], 0, "this machine has no RDMA device"),
        ({"cuda": False}, [], 0, "no CUDA driver"),
        ({"shared_memory": False}, [], 0, "is /dev/shm mounted"),
        ({"cma": False}, [], 0, "no CMA"),
        ({}, [], 1, "ptrace_scope is 1"),
        ({"shm_total_bytes": 64 << 20}, [], 0, "only 64 MiB"),
        ({"tcp_devices": ()}, [], 0, "no TCP"),
    ],
)
def test_what_is_missing_is_named_with_its_mend(change, hardware, ptrace_scope, words):
    remarks = explain(replace(COMPLETE, **change), rdma_hardware=hardware, ptrace_scope=ptrace_scope)
    assert len(remarks) == 1
    assert words in remarks[0]


def test_resources_are_read_from_ucx_own_words():
    info = """
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 1  :  md 1  dev 1  flags -- tcp/eth0
#      resource 2  :  md 1  dev 2  flags -- tcp/lo
#      resource 3  :  md 5  dev 4  flags -- rc_mlx5/mlx5_0:1
"""
    assert parse_resources(info) == {"rc_mlx5": ("mlx5_0:1",), "self": ("memory",), "tcp": ("eth0", "lo")}


def test_this_machine_is_described():
    report = inspect_ucx()
    assert report.version.count(".") == 2
    assert "libucp" in report.library
    assert "lo" in report.tcp_devices
    assert report.shared_memory == ("posix" in report.transports or "sysv" in report.transports)
