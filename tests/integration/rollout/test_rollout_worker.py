"""The rollout process: versions from a real bridge, requests from a real job plane."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlbridge.rollout.messages import Finished, Generate, RolloutFailed, RolloutReport, StopRollout
from rlbridge.rollout.trajectory import GenerationRequest, SamplingParams, VersionSpan
from rlbridge.sync.config import KvCachePolicy, SyncConfig, SyncMode

pytestmark = [pytest.mark.integration, pytest.mark.anyio]

StartReplica = Callable[..., AbstractAsyncContextManager[Any]]


def requests(count: int, max_new_tokens: int) -> list[GenerationRequest]:
    params = SamplingParams(max_new_tokens)
    return [GenerationRequest(i, i // 4, i % 4, [2 + i // 4, 5, 14], 100 + i, params) for i in range(count)]


@pytest.mark.parametrize("mode", [SyncMode.FULLY_SYNC, SyncMode.RECEIVER_STAGED])
async def test_it_generates_with_the_version_that_the_bridge_brought(
    mode: SyncMode, start_replica: StartReplica, tiny_model: Path
) -> None:
    async with start_replica(SyncConfig(mode=mode)) as replica:
        await replica.channel.send(Generate(requests(12, 6)))
        with anyio.move_on_after(0.5) as nothing:
            await replica.inbox.receive()
        assert nothing.cancelled_caught, "it must not generate before it holds a version"
        await replica.publish(0)
        done = await replica.trajectories(12)
        await replica.channel.send(StopRollout())
        assert await replica.exit_status() == 0
    assert isinstance(replica.heard[-1], RolloutReport)
    assert sorted(trajectory.request_id for trajectory in done) == list(range(12))
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    for trajectory in done:
        assert trajectory.versions == [VersionSpan(0, 6, 0)]
        assert (trajectory.replica, trajectory.finish_reason) == (0, "length")
        with torch.no_grad():
            logits = model(torch.tensor([trajectory.prompt_ids + trajectory.response_ids])).logits[0, 2:-1]
        expected = logits.log_softmax(-1)[range(6), trajectory.response_ids]
        torch.testing.assert_close(torch.tensor(trajectory.logprobs), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        (SyncMode.FULLY_SYNC, KvCachePolicy.KEEP),
        (SyncMode.FULLY_ASYNC, KvCachePolicy.RECOMPUTE),
        (SyncMode.SENDER_STAGED, KvCachePolicy.ABORT),
    ],
)
async def test_a_version_lands_in_mid_sequence(
    mode: SyncMode, policy: KvCachePolicy, start_replica: StartReplica
) -> None:
    async with start_replica(SyncConfig(mode=mode, kv_cache=policy)) as replica:
        await replica.publish(0)
        await replica.version_reported(0)
        await replica.channel.send(Generate(requests(8, 400)))
        await replica.until(lambda message: isinstance(message, RolloutReport) and message.tokens > 0)
        await replica.publish(1, factor=1.5)
        done = await replica.trajectories(8)
        await replica.channel.send(StopRollout())
        assert await replica.exit_status() == 0
    for trajectory in done:
        first = trajectory.versions[0]
        assert (first.start, first.version) == (0, 0)
        assert 0 < first.stop < 400
        if policy is KvCachePolicy.ABORT:
            assert trajectory.finish_reason == "abort"
            assert len(trajectory.response_ids) == first.stop
        else:
            assert trajectory.versions[1:] == [VersionSpan(first.stop, 400, 1)]
    assert len({trajectory.versions[0].stop for trajectory in done}) == 1


async def test_time_is_accounted_for_and_sleeping_costs_nothing(start_replica: StartReplica) -> None:
    async with start_replica(SyncConfig(mode=SyncMode.FULLY_ASYNC)) as replica:
        await replica.publish(0)
        await replica.version_reported(0)
        before = main_thread_s(replica.process.pid)
        await anyio.sleep(1.0)
        assert main_thread_s(replica.process.pid) - before < 0.05
        await replica.channel.send(Generate(requests(8, 300)))
        await replica.trajectories(8)
        await replica.channel.send(StopRollout())
        assert await replica.exit_status() == 0
    spans = [span for report in replica.reports for span in report.spans]
    names = {span.name for span in spans}
    assert {"idle/rollout/wait_for_prompts", "work/rollout/decode"} <= names
    assert max(span.duration_s for span in spans if span.name.startswith("idle")) >= 0.9
    assert len(spans) < 30, "one span per busy stretch, not one per forward"


async def test_tokens_and_stalls_are_reported_once(start_replica: StartReplica) -> None:
    async with start_replica() as replica:
        await replica.channel.send(Generate(requests(8, 20)))
        await replica.publish(0)
        await replica.publish(1)
        await replica.version_reported(1)
        await replica.channel.send(StopRollout())
        assert await replica.exit_status() == 0
    finished = [trajectory for m in replica.heard if isinstance(m, Finished) for trajectory in m.trajectories]
    assert sum(report.tokens for report in replica.reports) >= sum(len(t.response_ids) for t in finished)
    stalls = [span.version for report in replica.reports for span in report.spans if span.name == "stall/rollout"]
    assert stalls == [0, 1]


async def test_an_impossible_request_ends_it_with_its_reason(start_replica: StartReplica) -> None:
    async with start_replica() as replica:
        await replica.channel.send(Generate(requests(1, 600)))
        assert await replica.exit_status() == 1
    (last_words,) = (message for message in replica.heard if isinstance(message, RolloutFailed))
    assert "TaskError: request 0: a prompt of 3 tokens and max_new_tokens=600" in last_words.error


async def test_it_ends_when_the_controller_is_gone(start_replica: StartReplica) -> None:
    async with start_replica() as replica:
        await replica.publish(0)
        await replica.version_reported(0)
        await replica.channel.aclose()
        with anyio.fail_after(15):
            assert await replica.process.wait() == 1


def main_thread_s(pid: int) -> float:
    """CPU seconds of a process's main thread."""
    return next(thread.user_time + thread.system_time for thread in psutil.Process(pid).threads() if thread.id == pid)
