"""The one family of errors tfdist raises for its users: a message, a hint and an exit code."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum


class ExitCode(IntEnum):
    """What `tfdist` returns to the shell; a failed task's own code is passed on otherwise."""

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
    """Whether a task that ends with it may do better when it is started again."""

    def __init__(self, message: str, *, code: str = "", hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.hint = hint

    def labelled_lines(self) -> Iterator[tuple[str, str]]:
        """Yields the printed lines of the message, each with its label: `error[unknown-key]`."""
        for line in self.message.splitlines():
            yield label(self.code), line


def label(code: str) -> str:
    """The label in front of a printed error: `error[unknown-key]`."""
    return f"error[{code}]" if code else "error"


class UsageError(TfdistError):
    """A command, a file or an environment that cannot mean anything."""

    exit_code = ExitCode.USAGE


class TimeoutExceeded(TfdistError):
    """Something that was waited for did not come."""

    exit_code = ExitCode.TIMEOUT


class TrainingError(TfdistError):
    """Training cannot go on: the data, the model or a checkpoint is at fault."""


class ResultNotSaved(TrainingError):
    """The training is done, and what it came to could not be written."""

    retry = False


class ChiefLost(TfdistError):
    """The chief has gone before its work was done; who served it can be started again with it."""

    exit_code = ExitCode.TERMINATED


class TaskLost(TfdistError):
    """Another task has ended, or does not answer, and the training cannot go on without it."""
