"""The bridge thread: one event loop beside the main thread, and the blocking side's way onto it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from rlbridge.sync.member import Member

T = TypeVar("T")
M = TypeVar("M", bound=Member)
_END_S = 10.0
"""A member that was told to leave closes its links and socket; after this time it is cancelled."""


class Bridge:
    """Runs one member on a bridge thread: the caller's portal, or one of its own.

    Args:
        portal: an anyio portal that is open for as long as the bridge is; ``None`` starts a thread.
    """

    def __init__(self, portal: BlockingPortal | None) -> None:
        self._given = portal
        self._portal: BlockingPortal | None = None
        self._stack = ExitStack()
        self._running: Future[None] | None = None

    def start(self, make_member: Callable[[], M]) -> M:
        """Make the member on the loop, run it, and return it once it has sent its ``Join``.

        Raises:
            RlbridgeError: the coordinator cannot be reached, or the transport cannot be made.
        """
        self._portal = self._given or self._stack.enter_context(
            start_blocking_portal("asyncio", name="rlbridge-bridge")
        )
        member = self._portal.call(make_member)
        self._running, _ = self._portal.start_task(member.run, name=f"bridge of {member.settings.name}")
        return member

    def call(self, function: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        """Run a coroutine function of the member on the loop and wait for its result."""
        if self._portal is None:
            raise RuntimeError("the bridge was not started")
        result: T = self._portal.call(function, *args)
        return result

    def stop(self) -> None:
        """End the member, which has left or failed before, and the thread if it is ours. Idempotent."""
        running, self._running, self._portal = self._running, None, None
        with self._stack:
            if running is None:
                return
            try:
                running.result(_END_S)
            except (TimeoutError, CancelledError):
                running.cancel()
