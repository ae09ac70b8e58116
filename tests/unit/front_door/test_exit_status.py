"""Which of several errors the user sees, and the status they leave with."""

from __future__ import annotations

import pytest

from rlbridge.exit_status import exit_status, most_telling
from rlbridge.transport.errors import ConfigError, SyncError, leaves


def raising(error: BaseException) -> int:
    raise error


def test_the_leaves_of_a_group_come_in_order_and_an_error_is_its_own_leaf() -> None:
    first, second, third = ValueError("1"), SyncError("2"), OSError("3")
    nested = ExceptionGroup("outer", [ExceptionGroup("inner", [first, second]), third])
    assert list(leaves(nested)) == [first, second, third]
    assert list(leaves(first)) == [first]


def test_an_interrupt_tells_more_than_what_rlbridge_says_and_that_more_than_the_rest() -> None:
    broken, said, interrupt = OSError("pipe"), SyncError("late"), KeyboardInterrupt()
    assert most_telling(ExceptionGroup("", [broken, ExceptionGroup("", [said])])) is said
    assert most_telling(BaseExceptionGroup("", [said, BaseExceptionGroup("", [interrupt])])) is interrupt
    assert most_telling(ExceptionGroup("", [broken, ValueError("later")])) is broken


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (ConfigError("seed=x: a number"), 2, "rlbridge: error: seed=x: a number\n"),
        (ExceptionGroup("", [SyncError("late")]), 1, "rlbridge: error: late\n"),
        (OSError("disk"), 1, "rlbridge: error: unexpected OSError: disk (RLBRIDGE_DEBUG=1 shows where)\n"),
        (KeyboardInterrupt(), 130, "\nrlbridge: interrupted\n"),
    ],
)
def test_an_error_leaves_one_message_and_its_status(
    error: BaseException,
    status: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RLBRIDGE_DEBUG", raising=False)
    assert exit_status(lambda: raising(error)) == status
    assert capsys.readouterr().err == text
