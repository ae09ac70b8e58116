"""Loaders that compute: what they made of each version equals what a fresh engine makes of the exported checkpoint."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from computing_engines import SPEC, Computing, Fused, OffsetNorm, Rows, Swapping, checkpoint_of, weights_of, wrong_at
from one_process_bridge import KIB, Job

from rlbridge.sync import SyncMode
from rlbridge.transport.config import TransportConfig
from rlbridge.transport.errors import LayoutError, WorkerError

MODES = list(SyncMode)


class Checked:
    """Compares each engine after each version with a fresh one, and lists what differs."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.compared = 0

    def __call__(self, engine: Any, version: int) -> None:
        fresh = Fused(engine.rank, engine.world) if isinstance(engine, Fused) else type(engine)()
        if isinstance(engine, Rows):
            fresh = Rows(dtype=engine.weights["embed"].dtype)
        self.wrong += [
            f"{type(engine).__name__}: {n} at {version}" for n in wrong_at(engine, fresh, checkpoint_of(version))
        ]
        self.compared += 1


@pytest.mark.parametrize("mode", MODES)
def test_each_version_equals_a_fresh_load_in_engines_of_all_kinds_at_once(mode: SyncMode) -> None:
    checked = Checked()
    replicas = [[Computing()], [Rows()], [Fused(0, 2), Fused(1, 2)], [Swapping()]]
    outcome = Job(mode=mode, trainers=[Rows(0, 2), Rows(1, 2)], replicas=replicas, applied=checked).run()
    assert outcome.errors == {}
    assert checked.wrong == []
    assert checked.compared == 5 * 3
    assert outcome.report["buckets"] > 10, "several buckets for the same tensors"
    by_name = {each["worker"]: each for each in outcome.report["coverage"]["receivers"]}
    assert by_name["rollout-0"]["computed_tensors"] == 4
    assert by_name["rollout-0"]["whole"] == 3
    assert by_name["rollout-0"]["replicated"] == 512 * 128
    assert by_name["rollout-1"]["computed"] == by_name["rollout-1"]["constant"] == 0


def test_a_cloned_head_follows_the_embedding() -> None:
    class EmbeddingOnly(Rows):
        def train(self, version: int) -> None:
            super().train(0)
            self.weights["embed"].add_(version)

    heads: list[torch.Tensor] = []
    engine = Computing()
    job = Job(
        mode=SyncMode.FULLY_ASYNC,
        trainers=[EmbeddingOnly()],
        replicas=[[engine]],
        applied=lambda engine, version: heads.append(engine.live["head"].clone()),
    )
    assert job.run().errors == {}
    assert not torch.equal(heads[0], heads[1])
    assert torch.equal(heads[-1], engine.live["embed"])


def test_quantisation_sees_the_exported_value_and_not_the_master() -> None:
    checked, engine = Checked(), Computing()
    job = Job(mode=SyncMode.FULLY_SYNC, trainers=[Rows()], replicas=[[engine]], applied=checked)
    assert job.run().errors == {}
    assert checked.wrong == []
    assert wrong_at(engine, Computing(), weights_of(2)), "the test can tell the two apart"


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.SENDER_STAGED])
def test_a_wire_dtype_of_its_own_reaches_the_loader(mode: SyncMode) -> None:
    """An fp32 checkpoint that travels in bf16: loaders get bf16, as if it had been exported so."""
    spec = type(SPEC)({name: type(tensor)(tensor.shape, "float32") for name, tensor in SPEC.tensors.items()})
    checked = Checked()
    job = Job(
        mode=mode, trainers=[Rows()], replicas=[[Computing()]], applied=checked, spec=spec, export_dtype="bfloat16"
    )
    assert job.run().errors == {}
    assert checked.wrong == []


class Group:
    """Two trainer ranks that export together."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(2)
        self.ranks: list[Gathered] = []
        self.calls: list[tuple[int, str]] = []


class Gathered(OffsetNorm):
    """One of two ranks; ``export`` waits for the other one, as a collective does."""

    def __init__(self, group: Group) -> None:
        self.group, self.rank = group, len(group.ranks)
        super().__init__(self.rank, 2)
        group.ranks.append(self)

    def export(self, name: str) -> torch.Tensor:
        self.group.calls.append((self.rank, name))
        self.group.barrier.wait(30.0)
        whole = torch.cat([rank.weights[name] for rank in self.group.ranks]) + 1
        self.group.barrier.wait(30.0)
        return whole


class Uneven(Gathered):
    """The second rank's shard of what is computed is empty."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.rows["norm"] = slice(0, 128 if self.rank == 0 else 0)
        self.weights["norm"] = torch.zeros(128)[self.rows["norm"]].clone()


@pytest.mark.parametrize(("kind", "exporting"), [(Gathered, [1, 1]), (Uneven, [1, 0])])
@pytest.mark.parametrize("mode", MODES)
def test_trainers_that_compute_export_together(mode: SyncMode, kind: type[Gathered], exporting: list[int]) -> None:
    group, checked = Group(), Checked()
    trainers = [kind(group), kind(group)]
    outcome = Job(mode=mode, trainers=trainers, replicas=[[Computing()], [Rows()]], applied=checked).run()
    assert outcome.errors == {}
    assert checked.wrong == []
    assert sorted(group.calls) == [(0, "norm")] * 3 + [(1, "norm")] * 3
    assert [sender["exported"] for sender in outcome.report["coverage"]["senders"]] == exporting


def test_a_trainer_that_computes_is_refused_by_name_without_export() -> None:
    class Silent(OffsetNorm):
        export = None

    job = Job(mode=SyncMode.FULLY_SYNC, trainers=[Silent()], replicas=[[Computing()]], applied=Checked())
    outcome = job.run()
    error = outcome.errors["trainer-0"]
    assert isinstance(error, LayoutError)
    for other in ("coordinator", "rollout-0"):  # they hear why, instead of waiting for it
        assert isinstance(outcome.errors[other], LayoutError)
        assert str(outcome.errors[other]) == f"trainer-0: {error}"
    assert "norm from norm" in str(error)
    assert "export" in str(error)


def test_whole_tensors_beyond_the_budget_are_refused_unless_they_are_staged() -> None:
    def run(mode: SyncMode) -> dict[str, BaseException]:
        transport = TransportConfig(bucket_bytes=16 * KIB, staging_bytes=64 * KIB)
        return (
            Job(mode=mode, trainers=[Rows()], replicas=[[Computing()]], applied=Checked(), transport=transport)
            .run()
            .errors
        )

    error = run(SyncMode.SENDER_STAGED)["rollout-0"]
    assert isinstance(error, LayoutError)
    assert f"{(128 * 256 + 128 + 16) * 2} bytes" in str(error)
    assert f"staging_bytes={64 * KIB}" in str(error)
    assert "receiver staging" in str(error)
    assert run(SyncMode.RECEIVER_STAGED) == {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("step", ["load_weights", "after_load"])
def test_code_of_the_engine_that_raises_costs_its_replica_only(mode: SyncMode, step: str) -> None:
    class Unlucky(Computing):
        connected = False

        def load_weights(self, weights: Any) -> None:
            if step == "load_weights" and self.connected:
                raise ValueError("out of luck")
            super().load_weights(weights)

        def after_load(self) -> None:
            if step == "after_load" and self.connected:
                raise ValueError("out of luck")
            super().after_load()

    checked = Checked()

    def applied(engine: Any, version: int) -> None:
        if isinstance(engine, Unlucky):
            engine.connected = True
        else:
            checked(engine, version)

    replicas = [[Unlucky()], [Computing()]]
    outcome = Job(mode=mode, trainers=[Rows()], replicas=replicas, applied=applied).run()
    error = outcome.errors.pop("rollout-0")
    assert outcome.errors == {}
    assert isinstance(error, WorkerError)
    assert "version 1" in str(error)
    assert step in str(error)
    assert "out of luck" in str(error)
    assert outcome.versions["rollout-0"] == [0]
    assert outcome.versions["rollout-1"] == [0, 1, 2]
    assert checked.wrong == []


def test_post_processing_that_replaces_live_tensors_is_named_before_anything_is_written() -> None:
    class Replacing(Computing):
        def after_load(self) -> None:
            super().after_load()
            self.live["gate_up"] = self.kernel

    outcome = Job(
        mode=SyncMode.FULLY_ASYNC, trainers=[Rows()], replicas=[[Replacing()]], applied=lambda engine, version: None
    ).run()
    error = outcome.errors["rollout-0"]
    assert isinstance(error, LayoutError)
    assert "gate_up was [512, 128] bfloat16, is [128, 512] bfloat16" in str(error)
    assert outcome.versions["rollout-0"] == [0]
