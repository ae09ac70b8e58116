"""How errors leave a process: one clear message on standard error and a status. ``RLBRIDGE_DEBUG=1`` adds the trace."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rlbridge.transport.errors import ConfigError, RlbridgeError, leaves

FAILED, BAD_CONFIG, INTERRUPTED, TERMINATED = 1, 2, 130, 143


def exit_status(run: Callable[[], int]) -> int:
    """Call ``run`` and turn what it raises into an exit status and one message.

    ``ConfigError``: 2. Any other error: 1. Ctrl-C: 130. SIGTERM: 143, unwinding like Ctrl-C so that all is cleaned up.
    """
    terminated: list[int] = []
    try:
        with _sigterm_as_interrupt(terminated):
            return run()
    except KeyboardInterrupt:
        return TERMINATED if terminated else _interrupted()
    except (Exception, BaseExceptionGroup) as error:
        return _report(error)


def _interrupted() -> int:
    sys.stderr.write("\nrlbridge: interrupted\n")
    return INTERRUPTED


def _report(error: BaseException) -> int:
    if os.environ.get("RLBRIDGE_DEBUG") == "1":
        traceback.print_exception(error)
    cause = most_telling(error)
    if isinstance(cause, KeyboardInterrupt):
        return _interrupted()
    if isinstance(cause, RlbridgeError):
        text = str(cause)
    else:
        text = f"unexpected {type(cause).__name__}: {cause} (RLBRIDGE_DEBUG=1 shows where)"
    sys.stderr.write(f"rlbridge: error: {text}\n")
    return BAD_CONFIG if isinstance(cause, ConfigError) else FAILED


def most_telling(error: BaseException) -> BaseException:
    """Of a task group's errors: an interrupt, else the first that rlbridge raised on purpose, else the first."""
    parts = list(leaves(error))
    for kind in (KeyboardInterrupt, RlbridgeError):
        for part in parts:
            if isinstance(part, kind):
                return part
    return parts[0]


@contextmanager
def _sigterm_as_interrupt(terminated: list[int]) -> Iterator[None]:
    def on_sigterm(number: int, _frame: FrameType | None) -> None:
        terminated.append(number)
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, on_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
