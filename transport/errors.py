"""The one error tree of rlbridge.

It lives at the bottom of the dependency arrows so that every layer can raise from it; ``rlbridge`` re-exports it.
Each class also inherits the standard exception that a caller would reach for first.
"""

from __future__ import annotations

from collections.abc import Iterator


class RlbridgeError(Exception):
    """Base of every error that rlbridge raises on purpose. The text names the thing and the mend."""


class ConfigError(RlbridgeError, ValueError):
    """A setting is unknown, malformed, or contradicts another one."""


class TransportError(RlbridgeError):
    """Moving bytes or control messages failed."""


class PeerDiedError(TransportError, ConnectionError):
    """The process at the other end is gone or closed its connection."""


class AuthenticationError(TransportError, PermissionError):
    """A peer could not prove that it knows the run's secret."""


class ProtocolError(TransportError, ValueError):
    """A peer sent something that its protocol does not allow."""


class DeadlineExceededError(RlbridgeError, TimeoutError):
    """A wait on another process ended at its deadline.

    Args:
        who: the process that was waited for.
        what: what was expected of it.
        after_s: seconds waited.
    """

    def __init__(self, who: str, what: str, after_s: float) -> None:
        super().__init__(f"{who}: no {what} after {after_s:.1f} s")
        self.who, self.what, self.after_s = who, what, after_s


class LayoutError(RlbridgeError, ValueError):
    """A layout could not be discovered, or two layouts do not fit each other; the text lists the tensors."""


class LoaderFailedError(LayoutError):
    """A backend's own loader raised while its layout was discovered; the text names the tensor that it had taken."""


class PlanError(RlbridgeError, ValueError):
    """No transfer plan exists for this input, or two workers hold different plans."""


class SyncError(RlbridgeError, RuntimeError):
    """A weight update failed."""


class DigestMismatchError(SyncError):
    """A bucket arrived with other bytes than its source packed."""


class TaskError(RlbridgeError, ValueError):
    """A task's data or a prompt is unusable."""


class RewardError(RlbridgeError, RuntimeError):
    """A reward function raised, or returned something that is not a number."""


class TrainingError(RlbridgeError, RuntimeError):
    """A batch cannot be trained on, or the optimisation left the finite numbers."""


class WorkerError(RlbridgeError, RuntimeError):
    """A worker process failed or died, and the run cannot go on without it."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """What a task group's error is made of, group by group in order; any other error is its own only leaf."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from leaves(part)
    else:
        yield error
