"""The trainer process: batches from a real job plane, versions to a real bridge."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest
import torch
from safetensors.torch import load_file

from rlbridge.rollout.trajectory import Trajectory, VersionSpan
from rlbridge.sync.config import SyncConfig, SyncMode
from rlbridge.trainer.config import AlgorithmConfig
from rlbridge.trainer.messages import (
    Example,
    SaveCheckpoint,
    Saved,
    Started,
    StepDone,
    StopTrainer,
    TrainerFailed,
    TrainStep,
    WarmUp,
)

pytestmark = pytest.mark.anyio


def step(version: int, *, token: int = 7) -> TrainStep:
    trajectories = [
        Trajectory(i, i // 2, i % 2, [2, 3], [token + i % 2, 1], [-1.0, -1.0], [VersionSpan(0, 2, version)], "stop", 0)
        for i in range(4)
    ]
    return TrainStep(version, trajectories, [0.0, 1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    ("world", "advantage", "mode"), [(1, "gae", SyncMode.FULLY_SYNC), (2, "group", SyncMode.FULLY_ASYNC)]
)
async def test_versions_reach_the_bridge_as_they_are_trained(start_ranks, tiny_model, tmp_path, world, advantage, mode):
    async with start_ranks(world, AlgorithmConfig(advantage=advantage), SyncConfig(mode=mode)) as ranks:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.received, 0)
            started = await ranks.ask(WarmUp([Example([2, 3], [7, 1])] * 8, until=0.999))
        before = {name: tensor.clone() for name, tensor in ranks.weights.items()}
        for answer in started:
            assert isinstance(answer, Started)
            assert answer.warmup_steps == 30
            assert answer.metrics["train/warmup_accuracy"] == answer.warmup_accuracy > 0.001
        for version in (0, 1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ranks.received, version + 1)
                done = await ranks.ask(step(version))
            assert {type(answer) for answer in done} == {StepDone}
            assert {answer.version for answer in done} == {version + 1}
            assert len({tuple(answer.metrics.items()) for answer in done}) == 1
            spans = {(span.name, span.version) for span in done[0].spans}
            assert spans >= {("work/trainer/step", version), ("idle/trainer/wait_for_data", version)}
            assert ("stall/trainer", version + 1) in spans
        saved = await ranks.ask(SaveCheckpoint(str(tmp_path / "checkpoint")))
        assert saved == [Saved(str(tmp_path / "checkpoint"))] * world
        for channel in ranks.channels:
            await channel.send(StopTrainer())
        assert await ranks.exit_status() == [0] * world
    written = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert written.keys() == ranks.weights.keys()
    for tensor_name, tensor in written.items():
        assert torch.equal(tensor, ranks.weights[tensor_name]), "the bridge must deliver what the checkpoint holds"
    assert any(not torch.equal(before[tensor_name], tensor) for tensor_name, tensor in written.items())
    assert (tmp_path / "checkpoint" / "tokenizer.json").read_bytes() == (
        Path(tiny_model) / "tokenizer.json"
    ).read_bytes()
    assert not list(tmp_path.glob(".trainers-*")), "the ranks' rendezvous is gone with them"


@pytest.mark.parametrize(
    ("message", "error"),
    [
        (step(3), "ProtocolError: asked to train version 3, but the policy is at 0"),
        (step(0, token=99), "IndexError"),
    ],
    ids=["a version is missing", "a token is unknown"],
)
async def test_a_failing_rank_says_why_and_exits(start_ranks, message, error):
    async with start_ranks(1, AlgorithmConfig()) as ranks:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ranks.received, 0)
            await ranks.ask(WarmUp([], 0.0))
        (answer,) = await ranks.ask(message)
        assert isinstance(answer, TrainerFailed)
        assert error in answer.error
        assert await ranks.exit_status() == [1]
