"""One UCX worker driven by the event loop: progress happens when UCX's descriptor says so, and only then.

UCXX's own awaitables spin on ``asyncio.sleep(0)``: they burn most of a core while idle and add milliseconds to every
message. Here the worker's epoll descriptor is watched by the loop; each wake-up makes progress, hands over what has
arrived and what is complete, and arms the descriptor again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import numpy as np
import numpy.typing as npt

from rlbridge.transport.errors import TransportError
from rlbridge.transport.ucx_library import Array, ucx
from rlbridge.transport.ucx_notes import Note, fingerprint

_Bytes = npt.NDArray[np.uint8]

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

    The rendezvous scheme stays UCX's own: with segments as large as here ``put_zcopy`` is no faster over TCP, and it
    leaves a receive without an end when its sender fails in mid-transfer, so that its buffer is never free.
    """
    return {
        "TLS": "^sm,self",
        "NET_DEVICES": net_devices,
        "KEEPALIVE_INTERVAL": "1s",
        "RNDV_THRESH": "64K",
        "TCP_TX_SEG_SIZE": "64K",
    }


class UcxOperation:
    """One request under way, together with the memory that UCX reads or writes until it is complete."""

    __slots__ = ("_array", "_on_done", "_request")

    def __init__(self, request: Any, array: _Bytes, on_done: Callable[[Exception | None], None]) -> None:
        self._request = request
        self._array: _Bytes | None = array  # requests keep no reference to their buffer
        self._on_done = on_done

    @property
    def completed(self) -> bool:
        """Whether UCX is through with it."""
        return bool(self._request.completed)

    def finish(self) -> None:
        """Let go of the memory and report. Called once, when ``completed``."""
        error: Exception | None = None
        try:
            self._request.check_error()
        except ucx.UCXError as failure:
            error = failure.with_traceback(None)
        self._request = self._array = None
        self._on_done(error)


class UcxEndpoint:
    """The way to one other worker; shared by all links to it, one after the other. Made by ``UcxDriver.endpoint``."""

    def __init__(self, driver: UcxDriver, address: bytes) -> None:
        self._driver = driver
        self.address = address
        self.sender = fingerprint(address)
        self.on_death: Callable[[], None] | None = None
        """Called once when the other worker turns out to be gone."""
        parsed = ucx.UCXAddress.create_from_buffer(address)
        self._endpoint: Any = ucx.UCXEndpoint.create_from_worker_address(driver.worker, parsed, True)

    @property
    def alive(self) -> bool:
        """Whether the other worker can be reached as far as UCX knows."""
        return self._endpoint is not None and bool(self._endpoint.alive)

    def send(self, array: _Bytes, wire_tag: int, on_done: Callable[[Exception | None], None]) -> None:
        """Post a message; ``on_done`` runs on the loop once UCX has let go of ``array``."""
        self._driver.track(self._endpoint.tag_send(Array(array), ucx.UCXXTag(wire_tag)), array, on_done)

    def close(self) -> None:
        """Close at once. Nothing may be under way on a living endpoint: UCX leaks, or worse, if there is."""
        if self._endpoint is not None:
            self._endpoint.close_blocking()
            self._endpoint = None  # it holds the worker, and with it the descriptors


class Mailbox:
    """What one other worker has said, and who listens."""

    def __init__(self) -> None:
        self.notes: deque[Note] = deque()
        """Notes that came while nobody listened."""
        self.listener: Callable[[Note], None] | None = None
        self.ended = 0
        """Highest number of a link of that worker that is known to be over."""

    def put(self, note: Note) -> None:
        """Hand a note to the listener, or keep it."""
        if self.listener is not None:
            self.listener(note)
        else:
            self.notes.append(note)


class UcxDriver:
    """A UCX context and worker on the running asyncio loop.

    Args:
        settings: UCX configuration without the ``UCX_`` prefix.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._context = ucx.UCXContext(dict(settings), (ucx.Feature.TAG, ucx.Feature.WAKEUP))
        self.worker = ucx.UCXWorker(self._context)
        self.worker.init_blocking_progress_mode()
        self.address = bytes(self.worker.address)
        self._note_tag = fingerprint(self.address)
        self._operations: set[UcxOperation] = set()
        self._idle = anyio.Event()
        self._endpoints: dict[bytes, UcxEndpoint] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._incoming: deque[_Incoming] = deque()
        self._expected: dict[int, tuple[int, Callable[[Any], None]]] = {}
        self._loop = asyncio.get_running_loop()
        self._scheduled: asyncio.Handle | None = None
        self._descriptor: int = self.worker.epoll_file_descriptor
        self._loop.add_reader(self._descriptor, self._pump)
        self.wake()

    def endpoint(self, address: bytes) -> UcxEndpoint:
        """The way to the worker at ``address``.

        Raises:
            TransportError: UCX cannot reach it with the transports it has.
        """
        known = self._endpoints.get(address)
        if known is not None and known.alive:
            return known
        if known is not None:
            self._bury(known)
        try:
            self._endpoints[address] = UcxEndpoint(self, address)
        except ucx.UCXError as error:
            raise TransportError(f"UCX cannot reach this address: {error}") from error
        return self._endpoints[address]

    def mailbox(self, sender: int) -> Mailbox:
        """What the worker with that fingerprint has said."""
        return self._mailboxes.setdefault(sender, Mailbox())

    def expect(self, wire_tag: int, sender: int, on_arrival: Callable[[Any], None]) -> None:
        """Call ``on_arrival(probe)`` once the message under ``wire_tag`` is there; it must ``receive`` it."""
        self._expected[wire_tag] = (sender, on_arrival)
        self.wake()

    def expect_no_longer(self, wire_tag: int) -> None:
        """The message under ``wire_tag`` will not come."""
        self._expected.pop(wire_tag, None)

    def expect_unwanted(self, wire_tag: int, sender: int) -> None:
        """The message under ``wire_tag`` may still come, and nobody wants it: its sender must get its buffer back."""
        self.expect(wire_tag, sender, self._drain)

    def expect_nothing_unwanted(self, sender: int) -> None:
        """That worker has sent what it had accepted on older links: what has not come by now never will."""
        unwanted = (sender, self._drain)
        self._expected = {tag: expected for tag, expected in self._expected.items() if expected != unwanted}

    def receive(self, probe: Any, array: _Bytes, on_done: Callable[[Exception | None], None]) -> None:
        """Receive the message that a probe found into ``array``, of the same length."""
        self.track(self.worker.tag_recv_with_handle(Array(array), probe), array, on_done)

    def track(self, request: Any, array: _Bytes, on_done: Callable[[Exception | None], None]) -> None:
        """Watch a request that was just posted on this worker."""
        self._operations.add(UcxOperation(request, array, on_done))
        self.wake()

    def wake(self) -> None:
        """Make progress soon: a submission may need it, and does not always make the descriptor readable."""
        if self._scheduled is None and self._descriptor >= 0:
            self._scheduled = self._loop.call_soon(self._pump)

    async def aclose(self, deadline_s: float) -> None:
        """Wait until nothing is under way, at most ``deadline_s``, and free everything. Idempotent."""
        if self._descriptor < 0:
            return
        with anyio.move_on_after(deadline_s):
            while self._operations:
                self._idle = anyio.Event()
                await self._idle.wait()
        self._loop.remove_reader(self._descriptor)
        self._descriptor = -1
        if self._scheduled is not None:
            self._scheduled.cancel()
        for endpoint in self._endpoints.values():
            endpoint.close()
        self._endpoints.clear()
        self._expected.clear()
        self._operations.clear()
        del self.worker, self._context

    def _pump(self) -> None:
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        turn_ends = time.monotonic() + _SLICE_S
        while self._descriptor >= 0:
            while self.worker.progress_once():
                if time.monotonic() > turn_ends:
                    self._hand_over()
                    self.wake()
                    return
            self.worker.progress()  # unlike progress_once, it also ends what was under way on endpoints that failed
            self._hand_over()
            if self.worker.arm():
                return

    def _hand_over(self) -> None:
        self._take_in_expected()
        self._take_in_notes()
        self._finish_completed()
        for endpoint in [endpoint for endpoint in self._endpoints.values() if not endpoint.alive]:
            self._bury(endpoint)

    def _take_in_expected(self) -> None:
        for tag in list(self._expected):
            probe = self.worker.tag_probe(ucx.UCXXTag(tag), remove=True)
            if probe.matched:
                _, on_arrival = self._expected.pop(tag)
                on_arrival(probe)

    def _take_in_notes(self) -> None:
        while (probe := self.worker.tag_probe(ucx.UCXXTag(self._note_tag), remove=True)).matched:
            incoming = _Incoming(probe.length)
            self._incoming.append(incoming)
            self.receive(probe, incoming.array, incoming.arrived)

    def _drain(self, probe: Any) -> None:
        self.receive(probe, np.empty(probe.length, np.uint8), lambda error: None)

    def _finish_completed(self) -> None:
        completed = [operation for operation in self._operations if operation.completed]
        self._operations.difference_update(completed)
        for operation in completed:
            operation.finish()
        if not self._operations:
            self._idle.set()
        while self._incoming and self._incoming[0].done:
            incoming = self._incoming.popleft()
            if not incoming.failed:  # else its sender died half-way, which its endpoint reports
                note = Note.decode(incoming.array.tobytes())
                self.mailbox(note.sender).put(note)

    def _bury(self, endpoint: UcxEndpoint) -> None:
        del self._endpoints[endpoint.address]
        self._expected = {tag: it for tag, it in self._expected.items() if it[0] != endpoint.sender}
        endpoint.close()
        self.wake()
        if endpoint.on_death is not None:
            endpoint.on_death()


class _Incoming:
    """A note on its way in."""

    def __init__(self, nbytes: int) -> None:
        self.array = np.empty(nbytes, np.uint8)
        self.done = self.failed = False

    def arrived(self, error: Exception | None) -> None:
        self.done, self.failed = True, error is not None
