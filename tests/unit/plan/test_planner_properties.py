"""What holds for every plan, whatever the layouts, the nodes and the rates of their links."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_jobs import Job, jobs

from rlbridge.sync.correspondence import correspond
from rlbridge.sync.plan.baselines import BaselineKind, plan_baseline
from rlbridge.sync.plan.bound import lower_bound
from rlbridge.sync.plan.planner import plan_transfer
from rlbridge.sync.plan.predict import predict
from rlbridge.sync.plan.program import HEADER_BYTES
from rlbridge.sync.plan.report import link_bytes, link_rate
from rlbridge.sync.plan.simulate import simulate
from rlbridge.sync.plan.transfer_plan import TransferPlan

some = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(job: Job) -> TransferPlan:
    correspondence = correspond(job.spec, job.senders, job.receivers)
    return plan_transfer(correspondence, job.topology, bucket_bytes=job.bucket_bytes)


@given(jobs())
@some
def test_every_element_arrives_exactly_once_and_the_slow_links_carry_one_copy(job):
    plan = planned(job)
    simulate(job.spec, job.senders, job.receivers, {worker: plan.program(worker) for worker in plan.workers})
    held, needed = job.elements(job.senders), job.elements(job.receivers)
    abroad = set().union(*(needed[node] - held[node] for node in needed))
    assert plan.report()["trainer_egress_external_bytes"] == job.size_bytes(abroad)
    loads = link_bytes(plan)
    for node in set(job.topology.nodes.values()):
        imported = sum(loads.get(f"in:{node}", {}).values())
        assert imported == job.size_bytes(needed[node] - held[node])
    assert (plan.buckets.payload_bytes <= job.bucket_bytes).all()


@given(jobs())
@some
def test_the_busiest_link_is_close_to_the_bound(job):
    plan = planned(job)
    bound = lower_bound(plan.correspondence, job.topology)
    assert bound.method == "linear programme"
    assert max(bound.terms_s.values()) <= bound.seconds * (1 + 1e-6)
    for link, stages in link_bytes(plan).items():
        seconds = (sum(stages.values()) - job.bucket_bytes) / link_rate(plan, link)
        assert seconds <= 1.05 * bound.seconds, (link, stages, bound)
    assert plan.report()["over_bound"] >= 1 - 1e-6, "no plan beats the bound"


@given(jobs(), st.sampled_from(BaselineKind))
@some
def test_baselines_deliver_everything_exactly_once_too(job, kind):
    correspondence = correspond(job.spec, job.senders, job.receivers)
    plan = plan_baseline(kind, correspondence, job.topology, bucket_bytes=job.bucket_bytes)
    simulate(job.spec, job.senders, job.receivers, {worker: plan.program(worker) for worker in plan.workers})
    assert plan.report()["kind"] == kind


@given(jobs(), st.sampled_from(["planned", *BaselineKind]), st.sampled_from([1, 3, 1000]))
@some
def test_no_plan_stands_still_or_holds_more_than_its_budget(job, kind, buckets):
    correspondence = correspond(job.spec, job.senders, job.receivers)
    if kind == "planned":
        plan = planned(job)
    else:
        plan = plan_baseline(kind, correspondence, job.topology, bucket_bytes=job.bucket_bytes)
    budget_bytes = buckets * (job.bucket_bytes + HEADER_BYTES)
    prediction = predict(plan, staging_bytes=budget_bytes)
    assert max(prediction.peak_staging_bytes.values()) <= budget_bytes
    assert prediction.seconds >= prediction.worst_link_s
    assert prediction == predict(plan, staging_bytes=budget_bytes)
