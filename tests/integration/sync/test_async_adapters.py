"""The adapters in an event loop: the same versions, and cancelling leaves no mess."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import pytest
from computing_engines import Rows, checkpoint_of, wrong_at
from one_loop_bridge import hosted, polled, receiver, sender, together

from rlbridge.sync import SyncMode
from rlbridge.transport.errors import RlbridgeError, WorkerError

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("mode", SyncMode)
async def test_both_ends_share_one_loop_and_every_version_arrives(mode: SyncMode) -> None:
    trainer, engine, wrong = Rows(), Rows(), []

    async def train(common: dict[str, Any]) -> None:
        async with sender(common, trainer) as bridge:
            await bridge.connect()
            for version in range(3):
                trainer.train(version)
                handle = await bridge.send_weights(version)
            assert await handle.wait(60.0)
            assert handle.done

    async def serve(common: dict[str, Any]) -> None:
        async with receiver(common, engine) as bridge:
            await bridge.connect()
            for version in range(3):
                assert await polled(bridge) == version == bridge.version
                wrong.extend(wrong_at(engine, Rows(dtype=engine.weights["embed"].dtype), checkpoint_of(version)))

    async with hosted(mode) as common:
        await together(lambda: train(common), lambda: serve(common))
    assert wrong == []


async def test_a_cancelled_poll_never_lets_an_engine_compute_with_torn_weights() -> None:
    trainer, engine = Rows(), Rows()

    async def train(common: dict[str, Any]) -> None:
        async with sender(common, trainer) as bridge:
            await bridge.connect()
            trainer.train(0)
            with pytest.raises(WorkerError, match="rollout-0: Cancelled"):
                await bridge.send_weights(0)
            await bridge.abort(WorkerError("nobody is left"))

    async def serve(common: dict[str, Any]) -> None:
        bridge = receiver(common, engine)
        await bridge.connect()
        while not bridge.has_news:
            await anyio.sleep(0.001)
        with anyio.CancelScope() as scope:
            scope.cancel()
            await bridge._take()
        with pytest.raises(WorkerError, match="rollout-0: Cancelled"):
            await bridge.poll_requests()
        await bridge.abort(WorkerError("cancelled"))

    async with hosted(SyncMode.FULLY_SYNC) as common:
        await together(lambda: train(common), lambda: serve(common))


async def test_a_cancelled_connect_leaves_nothing_behind() -> None:
    """The receiver never comes; the leak checks look for threads and sockets."""
    async with hosted(SyncMode.FULLY_ASYNC) as common:
        with anyio.move_on_after(1.0) as scope:
            async with sender(common, Rows()) as bridge:
                await bridge.connect()
        assert scope.cancelled_caught
        with pytest.raises(RlbridgeError):
            async with receiver(common, Rows()) as other:
                await other.connect()


async def test_the_documents_example_serves_until_the_last_version() -> None:
    document = Path(__file__).parents[3] / "docs" / "integration.md"
    (block,) = re.findall(
        r"^```python\n(# async_engine\.py.*?)^```", document.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    example: dict[str, Any] = {}
    exec(compile(block, str(document), "exec"), example)
    trainer, engine, steps = Rows(), Rows(), []

    async def train(common: dict[str, Any]) -> None:
        async with sender(common, trainer) as bridge:
            await bridge.connect()
            trainer.train(0)
            await (await bridge.send_weights(0)).wait(60.0)

    async with hosted(SyncMode.FULLY_ASYNC) as common:
        job = {name: common[name] for name in ("coordinator", "secret", "sync", "transport", "transport_factory")}
        weights = {"spec": common["spec"], "load_weights": engine.load_weights, "live_tensors": engine.live_tensors}
        await together(
            lambda: train(common),
            lambda: example["serve"](job | {"replica": 0}, weights, lambda: steps.append(1), 0),
        )
    assert steps == [1]
    assert wrong_at(engine, Rows(), checkpoint_of(0)) == []
