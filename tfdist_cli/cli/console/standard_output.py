"""Standard output whose errors can be told from all others: a full disk, a file that was opened for reading."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tfdist_cli.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputError(OSError):
    """Standard output cannot be written. Its reader has not gone away: that is a `BrokenPipeError`."""


class _Descriptor(io.FileIO):
    """A descriptor that raises `OutputError` where a write fails."""

    def write(self, data: ReadableBuffer, /) -> int | None:  # type: ignore[override]  # None if it would block
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputError(error.errno, error.strerror) from error


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within the context, what is printed is written or an error is raised. It is flushed at the end.

    Raises:
        UsageError: standard output cannot be written.
        SystemExit: its reader has gone away.
    """
    _replace_stdout()
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
    except BrokenPipeError:
        discard_output(1)
        sys.exit(1)  # as Click does
    except OutputError as error:
        discard_output(1)
        raise UsageError(
            f"cannot write to standard output: {error.strerror}",
            code="output-not-writable",
            hint="free space on its disk, or redirect the output to another file",
        ) from error


def discard_output(*descriptors: int) -> None:
    """Connects descriptors to the null device: Python flushes its buffers when it exits."""
    null = os.open(os.devnull, os.O_WRONLY)
    for number in descriptors:
        os.dup2(null, number)
    os.close(null)


def _replace_stdout() -> None:
    """Replaces Python's standard output, with the same properties; a test's stays."""
    before = sys.stdout
    if before is not sys.__stdout__ or not isinstance(before, io.TextIOWrapper):
        return
    raw = _Descriptor(before.fileno(), "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        raw if isinstance(before.buffer, io.FileIO) else io.BufferedWriter(raw),
        encoding=before.encoding,
        errors=before.errors,
        line_buffering=before.line_buffering,
        write_through=before.write_through,
    )
