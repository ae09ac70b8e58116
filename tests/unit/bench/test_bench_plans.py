"""What a benchmark moves, asks for and shows, without processes."""

from __future__ import annotations

import argparse
import io

import pytest
import torch
from rich.console import Console

from rlbridge.bench import command
from rlbridge.bench.hosts import DEVICE, check_able, leftovers, network_commands
from rlbridge.bench.loopback import LinkResult, LoopbackResult, WayResult
from rlbridge.bench.show import show_loopback, show_transfer
from rlbridge.bench.transfer import KINDS, Bench, KindResult, TransferResult, make_plans
from rlbridge.bench.workload import Workload, empty_tensors, fill, wrong_elements
from rlbridge.sync.correspondence import correspond
from rlbridge.sync.plan.simulate import simulate
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import ConfigError

SMALL = Workload(trainers=2, rollouts=2, workers_per_host=2, model_bytes=2_000_000)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(["transfer", *arguments])


@pytest.mark.parametrize(("trainers", "rollouts", "per_host"), [(1, 1, 1), (2, 4, 2), (3, 1, 4)])
def test_every_shape_of_job_has_programs_that_deliver_everything(trainers: int, rollouts: int, per_host: int) -> None:
    workload = Workload(trainers=trainers, rollouts=rollouts, workers_per_host=per_host, model_bytes=1_000_000)
    spec, senders, receivers = workload.spec(), workload.senders(), workload.receivers()
    assert set(senders) | set(receivers) == set(workload.nodes())
    config = TransportConfig(bucket_bytes=200_000)
    plans = make_plans(Bench(workload=workload, config=config, rounds=1, link_mbps=200))
    assert tuple(plans) == KINDS
    for plan in plans.values():
        simulate(spec, senders, receivers, {worker: plan.program(worker) for worker in workload.nodes()})


def test_hosts_apart_are_nodes_and_loopback_is_one() -> None:
    bench = Bench(workload=SMALL, config=TransportConfig(), rounds=1, link_mbps=200)
    assert len(set(bench.topology.nodes.values())) == 4
    assert bench.topology.rates.egress_bytes_per_s == 25e6
    loopback = Bench(workload=SMALL, config=TransportConfig(), rounds=1)
    assert len(set(loopback.topology.nodes.values())) == 1


def test_the_model_is_about_as_large_as_asked_for() -> None:
    workload = Workload(trainers=2, rollouts=4, workers_per_host=2, model_bytes=200_000_000)
    table = correspond(workload.spec(), workload.senders(), workload.receivers()).table
    assert sum(table.class_bytes.tolist()) == pytest.approx(200_000_000, rel=0.01)


def test_values_tell_elements_and_versions_apart() -> None:
    layout = SMALL.receivers()["rollout0-1"]
    tensors = empty_tensors(layout)
    elements = sum(tensor.numel() for tensor in tensors.values())
    assert wrong_elements(layout, tensors, 1) > 0.99 * elements
    fill(layout, tensors, 1)
    assert wrong_elements(layout, tensors, 1) == 0
    assert wrong_elements(layout, tensors, 2) == elements
    matrix = next(tensor for tensor in tensors.values() if tensor.dim() == 2)
    matrix[[0, 1]] = matrix[[1, 0]].clone()
    assert wrong_elements(layout, tensors, 1) > matrix.shape[1]


def test_all_workers_write_the_same_to_the_same_element() -> None:
    """A trainer's rows, cut as a tensor parallel rank has them, are that rank's values."""
    sender, receiver = SMALL.senders()["trainer0-0"], SMALL.receivers()["rollout1-1"]
    held, wanted = empty_tensors(sender), empty_tensors(receiver)
    fill(sender, held, 3)
    fill(receiver, wanted, 3)
    name = "layers.001.weight"  # cut by columns
    rows, columns = held[name].shape[0], wanted[name].shape[1]
    assert torch.equal(held[name][:, columns:].view(torch.int16), wanted[name][:rows].view(torch.int16))


@pytest.mark.parametrize(
    "changes",
    [{"trainers": 0}, {"rollouts": 0}, {"workers_per_host": 0}, {"workers_per_host": 3}, {"model_bytes": 1000}],
)
def test_a_job_that_cannot_be_is_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        Workload(**{"trainers": 1, "rollouts": 1, "workers_per_host": 1, "model_bytes": 1_000_000} | changes)


@pytest.mark.parametrize(
    ("arguments", "sides"),
    [
        ((), (2, 2)),
        (("--rollouts", "4"), (2, 4)),
        (("--hosts", "6"), (2, 4)),
        (("--hosts", "2"), (1, 1)),
        (("--hosts", "6", "--trainers", "3"), (3, 3)),
        (("--hosts", "6", "--rollouts", "5"), (1, 5)),
        (("--hosts", "6", "--trainers", "2", "--rollouts", "4"), (2, 4)),
    ],
)
def test_sides_follow_from_what_is_given(arguments: tuple[str, ...], sides: tuple[int, int]) -> None:
    bench = command.bench_of(parsed(*arguments))
    assert (bench.workload.trainers, bench.workload.rollouts) == sides
    assert bench.link_mbps == (200.0 if "--hosts" in arguments else None)
    assert bench.config.net_devices == (DEVICE if "--hosts" in arguments else "lo")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--hosts", "4", "--trainers", "2", "--rollouts", "3"),
        ("--hosts", "2", "--trainers", "2"),
        ("--rounds", "0"),
        ("--mb", "-1"),
        ("--link-mbps", "0"),
        ("--loopback", "--hosts", "2"),
        ("--json", "/nowhere/at/all.json"),
    ],
)
def test_contradictions_are_refused_before_anything_starts(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        command.bench_command(parsed(*arguments))


def test_hosts_need_root_and_their_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/usr/sbin/{tool}")
    with pytest.raises(ConfigError, match="'tc' of the package iproute2"):
        check_able(2)
    monkeypatch.setattr("shutil.which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="only root"):
        check_able(2)
    with pytest.raises(ConfigError, match="--hosts must be"):
        check_able(1)


def test_both_ends_of_every_link_are_limited() -> None:
    commands = network_commands(3, 200)
    limited = [(c[2], c[6]) for c in commands if c[0] == "tc"]
    assert sorted(limited) == sorted(
        [(f"rlbridge-host{i}", DEVICE) for i in range(3)] + [("rlbridge-switch", f"port{i}") for i in range(3)]
    )
    assert all("200000000bit" in c for c in commands if c[0] == "tc")
    assert all(len(c[c.index("add") + 1]) < 16 for c in commands if c[3:5] == ["link", "add"]), "names fit IFNAMSIZ"


def test_only_a_benchmarks_namespaces_are_leftovers() -> None:
    assert leftovers("rlbridge-host0 (id: 3)\nother\n\nrlbridge-switch\n") == ["rlbridge-host0", "rlbridge-switch"]


def test_tables_hold_what_was_measured() -> None:
    kind = KindResult(
        kind="planned",
        times_s=[1.0, 3.0, 2.0],
        median_s=2.0,
        ratio=1.0,
        predicted_s=1.6,
        bound_s=1.0,
        over_bound=2.0,
        bytes_by_stage={"receive": 7_000_000},
        busiest_link="out:host0",
        busiest_link_bytes=5_000_000,
        peak_staging_bytes=3_000_000,
        digests_checked=42,
    )
    result = TransferResult(
        trainers=1,
        rollouts=1,
        workers_per_host=1,
        model_bytes=7_000_000,
        bucket_bytes=1_000_000,
        staging_bytes=9_000_000,
        rounds=3,
        link_mbps=200.0,
        kinds=[kind],
    )
    console = Console(record=True, width=200, file=io.StringIO())
    show_transfer(console, result)
    way = WayResult("full", [1.0], 1.5, 0.42)
    link = LinkResult("tcp", 3, [way], {"pack": 0.25}, {"check": 0.125}, 1)
    show_loopback(console, LoopbackResult(1, 2, 3, 1, [link]))
    text = console.export_text()
    for figure in ("2.000", "1.250", "out:host0", "200 Mbit/s", "42", "42%", "pack 0.250", "check 0.125"):
        assert figure in text
