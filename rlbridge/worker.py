"""``python -m rlbridge.worker NAME PARENT_PID``: a worker process, from its first instruction to its exit status.

The specification comes down standard input; its type says whether this is a trainer rank or a rollout rank. The
process cannot outlive the controller, leaves cleanly on SIGTERM, and writes what went wrong into its log before it
exits with 1.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
from types import FrameType
from typing import NoReturn

import msgspec

from rlbridge.transport.errors import ProtocolError

_PR_SET_PDEATHSIG = 1

logger = logging.getLogger("rlbridge.worker")


class _Envelope(msgspec.Struct):
    """What every specification has: the tag that names its type."""

    type: str


def main() -> NoReturn:
    """Entry of a worker process."""
    name, parent = sys.argv[1], int(sys.argv[2])
    _die_with(parent)
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s")
    spec = sys.stdin.buffer.read()
    try:
        run_worker(spec)
    except Exception:
        logger.exception("%s failed", name)
        sys.exit(1)
    sys.exit(0)


def run_worker(spec: bytes) -> None:
    """Decode ``spec`` and do its work; returns when the worker was told to stop.

    Raises:
        ProtocolError: ``spec`` is not a specification of a trainer or rollout rank.
    """
    try:
        kind = msgspec.json.decode(spec, type=_Envelope).type
        if kind == "TrainerSpec":
            from rlbridge.trainer.worker import TrainerSpec, run_trainer

            run_trainer(msgspec.json.decode(spec, type=TrainerSpec))
        elif kind == "RolloutSpec":
            from rlbridge.rollout.worker import RolloutSpec, run_rollout

            run_rollout(msgspec.json.decode(spec, type=RolloutSpec))
        else:
            raise ProtocolError(f"unknown worker specification {kind!r}")
    except msgspec.DecodeError as error:
        raise ProtocolError(f"unreadable worker specification: {error}") from error


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when ``parent`` ends, and leave at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        sys.exit(f"parent {parent} is gone")


def _leave(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM: unwind, so that sockets and shared memory are given back, and exit like one that was told to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    main()
