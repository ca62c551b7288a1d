"""The errors that tfdist reports to its users: each has a message, a code, a hint and an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of `tfdist`. Where a task failed, its own exit code is returned instead."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    TIMEOUT = 124
    INTERRUPTED = 130
    TERMINATED = 143


class TfdistError(Exception):
    """An error that the user can fix.

    Args:
        message: what is wrong and where, in one sentence.
        code: a stable name of the problem, such as `unknown-key`. Programs and tests compare codes, never messages.
        hint: what to do about it, in one sentence; printed on a separate line.
    """

    exit_code: int = ExitCode.FAILED
    retry: bool = True
    """Whether another start of the task may succeed."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint
        if hint and sys.version_info >= (3, 11):  # a traceback of Python 3.10 has no notes
            self.add_note(f"hint: {hint}")

    def labelled_lines(self) -> Iterator[tuple[str, str]]:
        """Yields the printed lines of the message, each with its label: `error[unknown-key]`."""
        for line in self.message.splitlines():
            yield label(self.code), line


def label(code: str) -> str:
    """The label in front of a printed error: `error[unknown-key]`."""
    return f"error[{code}]" if code else "error"


class UsageError(TfdistError):
    """A command, a file or an environment variable is invalid."""

    exit_code = ExitCode.USAGE


class TimeoutExceeded(TfdistError):
    """Something did not happen within its time limit."""

    exit_code = ExitCode.TIMEOUT


class TrainingError(TfdistError):
    """Training cannot continue: the data, the model or a checkpoint is at fault."""


class RunFailed(TfdistError):
    """A run that was launched from Python has not done its training."""


class ResultNotSaved(TrainingError):
    """The training is complete, but its result could not be written."""

    retry = False


class ChiefLost(TfdistError):
    """The chief failed before its work was done. The tasks that served it can be started again with it."""

    exit_code = ExitCode.TERMINATED


class TaskLost(TfdistError):
    """Another task exited or does not respond, and the training cannot continue without it."""


class InvalidValue(ValueError):
    """A value that cannot be used. The code that reads the value adds where it stands, and raises a `TfdistError`.

    Args:
        message: what is wrong, in one sentence.
        code: the stable name of the problem; see `TfdistError`.
    """

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


def code_of(error: ValueError) -> str:
    """The code of the problem that a `ValueError` describes."""
    return error.code if isinstance(error, InvalidValue) else "invalid-value"
