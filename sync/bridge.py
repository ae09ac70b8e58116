"""The bridge thread: one event loop beside the caller's thread, and the caller's way onto it, blocking or awaited."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from anyio.abc import TaskStatus
from anyio.from_thread import BlockingPortal, start_blocking_portal

from rlbridge.sync.member import Member

T = TypeVar("T")
M = TypeVar("M", bound=Member)
_END_S = 10.0
"""A member that was told to leave closes its links and socket; after this time it is cancelled."""


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that blocks instead of being suspended, as all do that wait by a blocking ``Bridge``."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking call was suspended")


class _Started(TaskStatus[None]):
    """Says to another thread that a task has started, or ended before."""

    def __init__(self) -> None:
        self.future: Future[None] = Future()

    def started(self, value: None = None) -> None:
        """The task has started."""
        self.future.set_result(None)

    def ended(self, running: Future[None]) -> None:
        """The task has ended."""
        if not self.future.done():
            self.future.set_exception(CancelledError() if running.cancelled() else running.exception())


class Bridge:
    """Runs one member on a bridge thread: the caller's portal, or one of its own. Its coroutines block.

    Args:
        portal: an anyio portal that is open for as long as the bridge is; ``None`` starts a thread.
    """

    def __init__(self, portal: BlockingPortal | None) -> None:
        self._given = portal
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()
        self._running: Future[None] | None = None

    async def start(self, make_member: Callable[[], M]) -> M:
        """Make the member on the loop, run it, and return it once it has sent its ``Join``.

        Raises:
            RlbridgeError: the coordinator cannot be reached, or the transport cannot be made.
        """
        portal = self._open()
        member: M = await self.wait(partial(portal.call, make_member))
        started = _Started()
        run = partial(member.run, task_status=started)
        self._running = running = portal.start_task_soon(run, name=f"bridge of {member.settings.name}")
        running.add_done_callback(started.ended)
        try:
            await self.wait(started.future.result)
        except BaseException:
            running.cancel()
            raise
        return member

    async def call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Run a coroutine function on the loop and wait for its result; cancelled, it is cancelled there too."""
        future: Future[T] = self._open().start_task_soon(function, *args)
        try:
            return await self.wait(future.result)
        except BaseException:
            future.cancel()
            raise

    async def insist(self, function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """As ``call``, also for a caller who is being cancelled."""
        return await self.call(function, *args)

    async def stop(self) -> None:
        """End the member, which has left or failed before, and the thread if it is ours. Idempotent."""
        running, self._running, self._portal = self._running, None, None
        await self.wait(partial(self._stop, running))

    async def wait(self, blocking: Callable[[], T]) -> T:
        """Call ``blocking``, which waits for the loop."""
        return blocking()

    def _open(self) -> BlockingPortal:
        if self._portal is None:
            self._portal = self._given or self._stack.enter_context(
                start_blocking_portal("asyncio", name="rlbridge-bridge")
            )
        return self._portal

    def _stop(self, running: Future[None] | None) -> None:
        with self._stack:
            if running is None:
                return
            try:
                running.result(_END_S)
            except (TimeoutError, CancelledError):
                running.cancel()


class AwaitedBridge(Bridge):
    """A bridge whose coroutines let the caller's own event loop go on while they wait."""

    async def wait(self, blocking: Callable[[], T]) -> T:
        """Call ``blocking`` beside the caller's loop."""
        return await anyio.to_thread.run_sync(blocking, abandon_on_cancel=True)

    async def insist(self, function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """As ``call``, although the caller is being cancelled."""
        with anyio.CancelScope(shield=True):
            result = await self.call(function, *args)
        return result  # noqa: RET504 (to a type checker the scope might swallow what it ends with)

    async def stop(self) -> None:
        """As the blocking form, although the caller is being cancelled."""
        with anyio.CancelScope(shield=True):
            await super().stop()
