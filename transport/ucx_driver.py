"""One UCX worker driven by the event loop: progress happens when UCX's descriptor says so, and only then.

UCXX's own awaitables spin on ``asyncio.sleep(0)``: they burn most of a core while idle and add milliseconds to every
message. Here the worker's epoll descriptor is watched by the loop; each wake-up makes progress, hands finished
operations to their waiters, and arms the descriptor again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from rlbridge.transport.ucx_library import Array, ucx

_SLICE_S = 0.002
"""Longest stretch of progress before the loop's other callbacks get their turn."""

LOCAL_SETTINGS: Mapping[str, str] = {
    "TLS": "sm",
    # With endpoint error handling UCX leaves shared memory out unless all three are set, and falls back to TCP.
    "POSIX_ERROR_HANDLING": "y",
    "SYSV_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    "KEEPALIVE_INTERVAL": "1s",
    "RNDV_THRESH": "64K",
}
"""Between processes that share memory."""


def remote_settings(net_devices: str) -> dict[str, str]:
    """Settings of the context between nodes: everything but shared memory, over ``net_devices``.

    The rendezvous scheme stays UCX's own: ``put_zcopy`` is no faster over TCP once the segments are as large as here,
    and it leaves a receive without an end when its sender closes in mid-transfer, so that its buffer is never free.
    """
    return {
        "TLS": "^sm,self",
        "NET_DEVICES": net_devices,
        "KEEPALIVE_INTERVAL": "1s",
        "RNDV_THRESH": "64K",
        "TCP_TX_SEG_SIZE": "64K",
    }


class UcxOperation:
    """One request under way, together with the memory that UCX reads or writes until it is done."""

    __slots__ = ("_array", "_done", "_on_done", "_request", "error")

    def __init__(
        self, request: Any, array: npt.NDArray[np.uint8], on_done: Callable[[UcxOperation], None] | None
    ) -> None:
        self._request = request
        self._array: npt.NDArray[np.uint8] | None = array  # requests keep no reference to their buffer
        self._on_done = on_done
        self._done = anyio.Event()
        self.error: Exception | None = None
        """Why it failed; ``None`` while it is under way, and if it succeeded."""

    @property
    def done(self) -> bool:
        """Whether UCX has let go of the memory."""
        return self._done.is_set()

    async def wait(self) -> None:
        """Wait until UCX has let go of the memory, whatever came of it."""
        await self._done.wait()

    def finish_if_completed(self) -> bool:
        """Let go of everything and wake the waiter, if UCX is through with the request."""
        if not self._request.completed:
            return False
        try:
            self._request.check_error()
        except ucx.UCXError as error:
            self.error = error.with_traceback(None)
        on_done, self._on_done = self._on_done, None
        self._request = self._array = None
        self._done.set()
        if on_done is not None:
            on_done(self)
        return True


class UcxDriver:
    """A UCX context and worker on the running asyncio loop.

    Args:
        settings: UCX configuration without the ``UCX_`` prefix.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._context = ucx.UCXContext(dict(settings), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self.worker = ucx.UCXWorker(self._context)
        self.worker.init_blocking_progress_mode()
        self._pending: set[UcxOperation] = set()
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._descriptor: int = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._pump)
        self.wake()

    def submit(
        self,
        request: Any,
        array: npt.NDArray[np.uint8],
        on_done: Callable[[UcxOperation], None] | None = None,
    ) -> UcxOperation:
        """Watch a request that was just posted on this worker; ``on_done`` runs on the loop when it is complete."""
        operation = UcxOperation(request, array, on_done)
        self._pending.add(operation)
        self.wake()
        return operation

    def wake(self) -> None:
        """Make progress soon: a submission may need it, and does not always make the descriptor readable."""
        if self._scheduled is None:
            self._scheduled = self._loop.call_soon(self._pump)

    def take_unmatched(self, tag: int) -> int:
        """Throw away the (short) messages that lie here unmatched under ``tag``; returns how many."""
        self.worker.progress()
        taken = 0
        while self.worker.tag_probe(ucx.UCXXTag(tag)).matched:
            scratch = np.zeros(8, np.uint8)
            self.submit(self.worker.tag_recv(Array(scratch), ucx.UCXXTag(tag)), scratch)
            self.worker.progress()
            taken += 1
        return taken

    def close(self) -> None:
        """Free the worker and the context. Every endpoint must be closed, and every operation over."""
        if self._descriptor < 0:
            return
        self._loop.remove_reader(self._descriptor)
        self._descriptor = -1
        if self._scheduled is not None:
            self._scheduled.cancel()
        del self.worker, self._context

    def _pump(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        turn_ends = time.monotonic() + _SLICE_S
        while True:
            while self.worker.progress_once():
                if time.monotonic() > turn_ends:
                    self._finish_completed()
                    self.wake()
                    return
            self._finish_completed()
            if self.worker.arm():
                return

    def _finish_completed(self) -> None:
        self._pending.difference_update([operation for operation in self._pending if operation.finish_if_completed()])
