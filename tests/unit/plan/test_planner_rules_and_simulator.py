"""The planner's rules on worked examples, and the simulator on broken programs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import msgspec
import pytest

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.layout.source_map import Box, SourceMap
from rlbridge.sync.layout.spec import CheckpointSpec, TensorSpec
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.simulate import simulate
from rlbridge.sync.plan.tables import Stage
from rlbridge.sync.plan.transfer_plan import TransferPlan
from rlbridge.transport.errors import PlanError
from rlbridge.transport.topology import NodeRates, Topology

ROWS, COLUMNS, KIB = 1024, 512, 1024
SPEC = CheckpointSpec({f"w{i}": TensorSpec((ROWS, COLUMNS), "float32") for i in range(2)})
MODEL_BYTES = 2 * ROWS * COLUMNS * 4


def shard(rank: int = 0, ranks: int = 1) -> SourceMap:
    rows = ROWS // ranks
    boxes = [Box(n, n, (rank * rows, 0), (rows, COLUMNS), (1, 1), 0, (COLUMNS, 1)) for n in SPEC.tensors]
    return SourceMap({n: TensorSpec((rows, COLUMNS), "float32") for n in SPEC.tensors}, boxes)


def plan_for(
    senders: dict[str, SourceMap], receivers: dict[str, SourceMap], nodes: dict[str, str], bucket_bytes: int = 64 * KIB
) -> TransferPlan:
    topology = Topology(nodes, NodeRates(1e6, 1e6, 1e7))
    plan = plan_transfer(correspond(SPEC, senders, receivers), topology, bucket_bytes=bucket_bytes)
    simulate(SPEC, senders, receivers, {w: plan.program(w) for w in plan.workers})
    return plan


def link_bytes(plan: TransferPlan, key) -> Counter:
    total: Counter = Counter()
    for route, size_bytes in enumerate(plan.cargo.route_bytes.tolist()):
        for hop in plan.routes.hops(route):
            total[key(hop)] += size_bytes
    return total


def test_two_trainers_and_three_nodes_of_replicas():
    senders = {"t0": shard(), "t1": shard()}
    receivers = {f"r{node}{i}": shard() for node in range(3) for i in range(4)}
    nodes = {"t0": "T0", "t1": "T1"} | {name: f"N{name[1]}" for name in receivers}
    plan = plan_for(senders, receivers, nodes)
    report = plan.report()
    assert report["bytes_total"] == 12 * MODEL_BYTES
    assert report["trainer_egress_bytes"] == report["trainer_egress_external_bytes"] == MODEL_BYTES
    assert report["bytes_by_stage"] == {
        "gather": 0,
        "receive": MODEL_BYTES,
        "exchange": 2 * MODEL_BYTES,
        "distribute": 9 * MODEL_BYTES,
    }
    sent = link_bytes(plan, lambda hop: hop.sender)
    assert sent["t0"] == sent["t1"] == MODEL_BYTES // 2
    imported = link_bytes(plan, lambda hop: nodes[hop.receiver] if nodes[hop.sender] != nodes[hop.receiver] else "")
    assert all(imported[f"N{i}"] == MODEL_BYTES for i in range(3))
    exported = link_bytes(plan, lambda hop: nodes[hop.sender] if hop.stage == Stage.EXCHANGE else "")
    assert max(exported[f"N{i}"] for i in range(3)) <= 1.1 * 2 * MODEL_BYTES / 3
    first = link_bytes(plan, lambda hop: hop.receiver if hop.stage != Stage.DISTRIBUTE else "")
    assert max(first[name] for name in receivers) <= 1.25 * MODEL_BYTES / 4
    assert max(sent[name] for name in receivers) <= 1.25 * 11 * MODEL_BYTES / 12
    assert report["lower_bound_terms_s"]["trainer_egress"] == pytest.approx(MODEL_BYTES / 2 / 1e6)
    assert report["lower_bound_terms_s"]["node_import"] == pytest.approx(MODEL_BYTES / 1e6)
    assert report["lower_bound_terms_s"]["external_copies"] == pytest.approx(3 * MODEL_BYTES / 5 / 1e6)
    assert report["lower_bound_s"] == pytest.approx(MODEL_BYTES / 1e6)
    assert json.loads(json.dumps(report)) == report


def test_one_machine():
    senders = {f"t{r}": shard(r, 2) for r in range(2)}
    receivers = {f"r{i}": shard() for i in range(3)}
    plan = plan_for(senders, receivers, dict.fromkeys([*senders, *receivers], "here"))
    report = plan.report()
    assert report["trainer_egress_bytes"] == MODEL_BYTES
    assert report["trainer_egress_external_bytes"] == 0
    assert report["bytes_by_stage"] == {
        "gather": 0,
        "receive": MODEL_BYTES,
        "exchange": 0,
        "distribute": 2 * MODEL_BYTES,
    }
    assert report["lower_bound_s"] == pytest.approx(MODEL_BYTES / 1e7)


def test_a_rollout_beside_a_trainer_is_served_locally_and_the_others_once_from_outside():
    nodes = {"t0": "A", "t1": "B", "ra": "A", "rb": "B", "rc": "C", "rd": "D"}
    senders = {"t0": shard(), "t1": shard()}
    receivers = {name: shard() for name in ("ra", "rb", "rc", "rd")}
    plan = plan_for(senders, receivers, nodes)
    report = plan.report()
    assert report["trainer_egress_external_bytes"] == MODEL_BYTES
    local = link_bytes(plan, lambda hop: (hop.sender, hop.receiver))
    assert local["t0", "ra"] == local["t1", "rb"] == MODEL_BYTES
    outside = link_bytes(plan, lambda hop: hop.receiver if nodes[hop.sender] != nodes[hop.receiver] else "")
    assert outside["rc"] == outside["rd"] == MODEL_BYTES


def test_shards_on_both_sides_move_only_what_is_needed():
    senders = {f"t{r}": shard(r, 4) for r in range(4)}
    receivers = {f"r{r}": shard(r, 2) for r in range(2)}
    nodes = {name: name for name in [*senders, *receivers]}
    report = plan_for(senders, receivers, nodes).report()
    assert report["bytes_total"] == report["trainer_egress_bytes"] == MODEL_BYTES


def test_the_buckets_of_all_sources_begin_at_once_and_are_full():
    senders = {f"t{r}": shard(r, 4) for r in range(4)}
    plan = plan_for(senders, {"r": shard()}, {**{name: name for name in senders}, "r": "r"})
    first = plan.routes.source[plan.buckets.route[:4]]
    assert {plan.workers[worker] for worker in first} == set(senders)
    assert (plan.buckets.payload_bytes == 64 * KIB).all()


def test_small_tensors_share_a_bucket():
    plan = plan_for({"t": shard()}, {"r": shard()}, {"t": "a", "r": "b"}, bucket_bytes=2 * MODEL_BYTES)
    (bucket,) = plan.program("r").buckets
    assert len({piece.runtime for piece in bucket.pieces}) == 2


def test_programs_are_those_of_the_worker():
    plan = plan_for({"t": shard()}, {"r": shard()}, {"t": "a", "r": "b"})
    program = plan.program("r")
    assert (program.worker, program.plan_hash, program.workers) == ("r", plan.hash, ("r", "t"))
    assert all(bucket.recv_from == "t" and bucket.send_to == () for bucket in program.buckets)
    with pytest.raises(PlanError, match="'x' is not in the plan"):
        plan.program("x")


def test_what_cannot_be_planned_is_refused():
    correspondence = correspond(SPEC, {"t": shard()}, {"r": shard()})
    with pytest.raises(PlanError, match="which node these workers are: r"):
        plan_transfer(correspondence, Topology({"t": "a"}), bucket_bytes=64)
    with pytest.raises(PlanError, match="bucket_bytes=8"):
        plan_transfer(correspondence, Topology({"t": "a", "r": "a"}), bucket_bytes=8)


def test_any_change_changes_the_hash():
    nodes = {"t0": "a", "t1": "b", "r": "c"}
    one = plan_for({"t0": shard(), "t1": shard()}, {"r": shard()}, nodes)
    hashes = {
        one.hash,
        plan_for({"t0": shard(), "t1": shard()}, {"r": shard()}, nodes, bucket_bytes=32 * KIB).hash,
        plan_for({"t0": shard()}, {"r": shard()}, nodes).hash,
    }
    assert len(hashes) == 3


def test_another_process_plans_the_same(tmp_path):
    senders = {f"t{r}": shard(r, 2) for r in range(2)}
    receivers = {f"r{i}": shard() for i in range(4)}
    nodes = {name: name[-1] for name in [*senders, *receivers]}
    expected = plan_for(senders, receivers, nodes).hash
    path = tmp_path / "job.json"
    path.write_bytes(msgspec.json.encode((SPEC, senders, receivers, nodes)))
    code = (
        "import sys, msgspec\n"
        "from rlbridge.sync.correspondence import correspond\n"
        "from rlbridge.sync.layout.source_map import SourceMap\n"
        "from rlbridge.sync.layout.spec import CheckpointSpec\n"
        "from rlbridge.sync.plan.planner import plan_transfer\n"
        "from rlbridge.transport.topology import NodeRates, Topology\n"
        "kind = tuple[CheckpointSpec, dict[str, SourceMap], dict[str, SourceMap], dict[str, str]]\n"
        "spec, senders, receivers, nodes = msgspec.json.decode(open(sys.argv[1]).read(), type=kind)\n"
        "topology = Topology(nodes, NodeRates(1e6, 1e6, 1e7))\n"
        "print(plan_transfer(correspond(spec, senders, receivers), topology, bucket_bytes=65536).hash)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.strip() == expected


def broken(change):
    senders, receivers = {"t": shard()}, {"r0": shard(), "r1": shard()}
    topology = Topology(dict.fromkeys(["t", "r0", "r1"], "here"))
    plan = plan_transfer(correspond(SPEC, senders, receivers), topology, bucket_bytes=256 * KIB)
    programs = {w: plan.program(w) for w in plan.workers}
    simulate(SPEC, senders, receivers, programs)
    change(programs)
    simulate(SPEC, senders, receivers, programs)


def edit(programs, worker, index, **fields):
    buckets = list(programs[worker].buckets)
    buckets[index] = msgspec.structs.replace(buckets[index], **fields)
    programs[worker] = msgspec.structs.replace(programs[worker], buckets=tuple(buckets))


def test_a_piece_that_is_not_unpacked():
    with pytest.raises(PlanError, match="not written exactly once"):
        broken(lambda p: edit(p, "r0", 0, pieces=()))


def test_a_piece_that_is_unpacked_twice():
    def change(programs):
        pieces = programs["r0"].buckets[0].pieces
        edit(programs, "r0", 0, pieces=pieces + pieces[:1])

    with pytest.raises(PlanError, match="not written exactly once"):
        broken(change)


def test_a_piece_in_the_wrong_place():
    def change(programs):
        piece = msgspec.structs.replace(programs["r0"].buckets[0].pieces[0], offset=1)
        edit(programs, "r0", 0, pieces=(piece,))

    with pytest.raises(PlanError, match="r0 would write wrong elements"):
        broken(change)


def test_a_payload_that_is_not_filled():
    with pytest.raises(PlanError, match="payload bytes are packed"):
        broken(lambda p: edit(p, "t", 0, pieces=()))


def test_a_send_that_nobody_receives():
    with pytest.raises(PlanError, match="deadlock"):
        broken(lambda p: edit(p, "t", 0, send_to=("t",)))
    with pytest.raises(PlanError, match="deadlock"):
        broken(lambda p: edit(p, "t", 0, send_to=()))


def test_an_order_that_would_deadlock():
    def change(programs):
        buckets = programs["r0"].buckets
        swapped = (
            msgspec.structs.replace(buckets[0], bucket=buckets[1].bucket),
            msgspec.structs.replace(buckets[1], bucket=buckets[0].bucket),
        )
        programs["r0"] = msgspec.structs.replace(programs["r0"], buckets=(*swapped, *buckets[2:]))

    with pytest.raises(PlanError, match="global order"):
        broken(change)
