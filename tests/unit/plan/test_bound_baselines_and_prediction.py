"""Worked examples: what the bound finds that its terms do not, what the baselines cost, and how long updates take."""

from __future__ import annotations

import dataclasses

import pytest

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.plan import sharing
from rlbridge.sync.plan.baselines import BaselineKind, pipeline_stages, plan_baseline
from rlbridge.sync.plan.bound import lower_bound
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.report import link_bytes
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import NodeRates, Topology

ROWS, COLUMNS, KIB = 1024, 256, 1024
SPEC = CheckpointSpec({f"w{i}": TensorSpec((ROWS, COLUMNS), "float32") for i in range(4)})
MODEL_BYTES = 4 * ROWS * COLUMNS * 4
RATES = NodeRates(1e6, 1e6, 1e7)


def shard(rank: int = 0, ranks: int = 1, names: tuple[str, ...] = tuple(SPEC.tensors)) -> SourceMap:
    rows = ROWS // ranks
    boxes = [Box(n, n, (rank * rows, 0), (rows, COLUMNS), (1, 1), 0, (COLUMNS, 1)) for n in names]
    return SourceMap({n: TensorSpec((rows, COLUMNS), "float32") for n in names}, boxes)


def job(senders: dict[str, SourceMap], receivers: dict[str, SourceMap], nodes: dict[str, str], **overrides: NodeRates):
    return correspond(SPEC, senders, receivers), Topology(nodes, RATES, overrides)


def replicas(count: int, per_node: int = 1):
    senders = {f"t{i}": shard(i, 2) for i in range(2)}
    receivers = {f"r{i:02}": shard(i % per_node, per_node) for i in range(count * per_node)}
    nodes = {name: name for name in senders} | {name: f"N{i // per_node}" for i, name in enumerate(receivers)}
    return job(senders, receivers, nodes)


def test_a_slow_node_passes_less_on():
    senders = {"t": shard()}
    receivers = {f"r{i}": shard() for i in range(3)}
    slow = NodeRates(2.5e5, 1e6, 1e7)
    nodes = {name: name for name in [*senders, *receivers]}
    correspondence, topology = job(senders, receivers, nodes, r0=slow, t=NodeRates(1e7, 1e7, 1e7))
    bound = lower_bound(correspondence, topology)
    # Two copies are passed on, over rates of 1/4, 1 and 1.
    assert bound.external_s == pytest.approx(max(MODEL_BYTES / 1e6, 2 * MODEL_BYTES / 2.25e6), rel=1e-5)
    plan = plan_transfer(correspondence, topology, bucket_bytes=16 * KIB)
    sent = {link: sum(stages.values()) for link, stages in link_bytes(plan).items()}
    assert sent["out:r0"] <= bound.seconds * 2.5e5 + 16 * KIB
    assert plan.report()["over_bound"] <= 1.01


def test_the_bound_is_above_every_term_where_holders_overlap():
    """Two tensors over three nodes in chains: only the programme sees that those three have to share both."""
    senders = {"a": ("w0",), "b": ("w0", "w1"), "c": ("w1",), "d": ("w2", "w3")}
    nodes = {name: name for name in [*senders, "r"]}
    fast = NodeRates(1e9, 1e9, 1e9)
    layouts = {name: shard(names=names) for name, names in senders.items()}
    correspondence, topology = job(layouts, {"r": shard()}, nodes, r=fast, d=fast)
    bound = lower_bound(correspondence, topology)
    assert bound.seconds == pytest.approx(MODEL_BYTES / 2 / 3e6, rel=1e-5)
    assert max(bound.terms_s.values()) == pytest.approx(MODEL_BYTES / 4 / 2e6, rel=1e-5)
    assert plan_transfer(correspondence, topology, bucket_bytes=16 * KIB).report()["over_bound"] <= 1.01


def test_a_programme_that_is_too_large_leaves_the_closed_form(monkeypatch):
    monkeypatch.setattr(sharing, "_PROGRAMME_OPTIONS_MAX", 0)
    correspondence, topology = replicas(3)
    bound = lower_bound(correspondence, topology)
    assert (bound.method, bound.seconds) == ("closed form", max(bound.terms_s.values()))
    report = plan_transfer(correspondence, topology, bucket_bytes=16 * KIB).report()
    assert report["over_bound"] <= 1.15


def test_pipeline_stages_are_ranks_that_share_tensors():
    first, second = ("w0", "w1"), ("w2", "w3")
    senders = {f"t{i}": shard(i % 2, 2, first if i < 2 else second) for i in range(4)}
    correspondence = correspond(SPEC, senders, {"r": shard()})
    stages = pipeline_stages(correspondence.table)
    assert stages == {"t0": ["t0", "t1"], "t1": ["t0", "t1"], "t2": ["t2", "t3"], "t3": ["t2", "t3"]}


def loads(plan: TransferPlan) -> dict[str, int]:
    return {link: sum(stages.values()) for link, stages in link_bytes(plan).items()}


def test_broadcast_gathers_and_sends_whole_tensors_to_every_rank():
    correspondence, topology = replicas(3, per_node=2)
    plan = plan_baseline(BaselineKind.BROADCAST, correspondence, topology, bucket_bytes=64 * KIB)
    by_link = loads(plan)
    assert by_link["out:t1"] == by_link["in:t0"] == MODEL_BYTES // 2
    assert by_link["out:t0"] == by_link["in:N0"] == by_link["in:N2"] == MODEL_BYTES
    assert "out:N2" not in by_link
    assert plan.report()["bytes_by_stage"] == {
        "gather": MODEL_BYTES // 2,
        "receive": MODEL_BYTES,
        "exchange": 2 * MODEL_BYTES,
        "distribute": 3 * MODEL_BYTES,
    }


def test_p2p_serves_every_replica_from_the_trainers():
    for count in (2, 8):
        correspondence, topology = replicas(count)
        plan = plan_baseline(BaselineKind.P2P, correspondence, topology, bucket_bytes=64 * KIB)
        by_link = loads(plan)
        assert by_link["out:t0"] == MODEL_BYTES * count // 2 + MODEL_BYTES // 2
        assert all(by_link[f"in:N{i}"] == MODEL_BYTES for i in range(count))


@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_planned_update_takes_about_as_long_as_the_bound(count):
    correspondence, topology = replicas(count, per_node=2)
    plan = plan_transfer(correspondence, topology, bucket_bytes=16 * KIB)
    prediction = predict(plan, staging_bytes=256 * KIB, latency_s=1e-5)
    bound = lower_bound(correspondence, topology)
    assert bound.seconds <= prediction.seconds <= 1.1 * bound.seconds
    p2p = plan_baseline(BaselineKind.P2P, correspondence, topology, bucket_bytes=16 * KIB)
    assert predict(p2p, staging_bytes=256 * KIB, latency_s=1e-5).seconds >= count / 2 * bound.seconds


def test_one_bucket_over_one_link_takes_its_size_and_the_latency():
    correspondence, topology = job({"t": shard()}, {"r": shard()}, {"t": "a", "r": "b"})
    plan = plan_transfer(correspondence, topology, bucket_bytes=2 * MODEL_BYTES)
    prediction = predict(plan, staging_bytes=1, latency_s=0.5)
    assert prediction.seconds == pytest.approx((MODEL_BYTES + 64) / 1e6 + 0.5)
    assert prediction.peak_staging_bytes == {"r": MODEL_BYTES + 64, "t": MODEL_BYTES + 64}


def test_a_small_budget_makes_a_long_way_slow():
    correspondence, topology = job({"t": shard()}, {"r": shard()}, {"t": "a", "r": "b"})
    plan = plan_transfer(correspondence, topology, bucket_bytes=16 * KIB)
    wide, narrow = (predict(plan, staging_bytes=n * 17 * KIB, latency_s=0.1).seconds for n in (64, 1))
    assert narrow > len(plan.buckets.route) * 0.1 > wide


@pytest.mark.parametrize("kind", ["planned", "p2p"])
def test_of_large_plans_a_part_is_run(kind):
    correspondence, topology = replicas(4, per_node=2)
    if kind == "planned":
        plan = plan_transfer(correspondence, topology, bucket_bytes=KIB)
    else:
        plan = plan_baseline(BaselineKind(kind), correspondence, topology, bucket_bytes=KIB)
    exact = predict(plan, staging_bytes=8 * KIB, latency_s=2e-3)
    part = predict(plan, staging_bytes=8 * KIB, latency_s=2e-3, hops_max=3000)
    assert exact.seconds > 1.02 * exact.worst_link_s, "latency costs something with so little room"
    assert exact.simulated == 1.0
    assert part.simulated < 0.5
    assert part.seconds == pytest.approx(exact.seconds, rel=0.05)


def test_an_order_that_deadlocks_is_found():
    """A worker that waits for itself stands for any circle."""
    senders = {"t0": shard(0, 2), "t1": shard(1, 2)}
    correspondence, topology = job(
        senders, {"r0": shard(), "r1": shard()}, {"t0": "a", "t1": "b", "r0": "c", "r1": "d"}
    )
    plan = plan_transfer(correspondence, topology, bucket_bytes=MODEL_BYTES)
    assert len(plan.buckets.route) >= 2
    predict(plan, staging_bytes=1)
    sender = plan.routes.sender.copy()
    sender[plan.routes.hop_begin[0]] = plan.routes.receiver[plan.routes.hop_begin[0]]  # it waits for itself
    broken = dataclasses.replace(plan, routes=dataclasses.replace(plan.routes, sender=sender))
    with pytest.raises(PlanError, match=r"deadlock: .*r"):
        predict(broken, staging_bytes=1)
