"""Where a worker's main thread sleeps: one condition that messages, news of a version and failures all wake."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rlbridge.rollout.messages import FromRollout, ToRollout
from rlbridge.transport.control.channel import ControlChannel

JobChannel = ControlChannel[FromRollout, ToRollout]


class Inbox:
    """Filled on the bridge thread, emptied on the main thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._messages: list[ToRollout] = []
        self._failure: Exception | None = None

    async def fill(self, channel: JobChannel) -> None:
        """Receive until cancelled; what ends the channel is raised to the main thread by ``take``."""
        try:
            while True:
                message = await channel.receive()
                with self._changed:
                    self._messages.append(message)
                    self._changed.notify()
        except Exception as error:
            with self._changed:
                self._failure = error
                self._changed.notify()

    def wake(self) -> None:
        """Have ``wait`` look at its condition again."""
        with self._changed:
            self._changed.notify()

    def take(self) -> list[ToRollout]:
        """The messages that came since the last call, in order.

        Raises:
            TransportError: there are none, and none will come: the channel has ended.
        """
        with self._changed:
            messages, self._messages = self._messages, []
        if self._failure is not None and not messages:
            raise self._failure
        return messages

    def wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        """Sleep until there is something to ``take``, ``ready()`` holds after a ``wake``, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._messages) or self._failure is not None or ready(), timeout_s)
