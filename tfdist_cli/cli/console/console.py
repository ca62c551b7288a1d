"""The only owner of the terminal: what was asked for goes to stdout, progress and errors go to stderr.

rich is imported when a console is first used: commands that print plain text start without it.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, TextIO

from tfdist_cli.cli.console.nonblocking_stream import unwaiting
from tfdist_cli.errors import TfdistError
from tfdist_cli.plan.warnings import PlanWarning

if TYPE_CHECKING:
    from rich.console import Console

    out: Console
    err: Console


def __getattr__(name: str) -> Console:
    if name not in ("out", "err"):
        raise AttributeError(name)
    return _console(name == "err")


@cache
def _console(stderr: bool) -> Console:
    return _made(stderr=stderr)


@contextmanager
def err_that_never_waits() -> Iterator[Console]:
    """Standard error while tasks run: who has stopped reading it stops neither them nor the launcher."""
    with unwaiting(sys.stderr) as stream:
        yield _made(stderr=True, file=stream)


@contextmanager
def while_somebody_is_there() -> Iterator[None]:
    """What is printed within is lost without an error once the terminal has been closed: the exit code stays true."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # a pipe whose reader has left, as `| head` does, ends a command as everywhere
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):
            os.dup2(nowhere, number)  # Python writes out the rest of what was printed when it exits
        os.close(nowhere)


@contextmanager
def telling(*, quiet: bool) -> Iterator[None]:
    """Prints on stderr what a launcher tells while it gets ready, such as how far a copy is."""
    log, handler = logging.getLogger("tfdist.launch"), _Telling()
    if quiet:
        yield
        return
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _Telling(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _console(True).print(f"[bold]{_plain('[tfdist]')}[/] {_plain(record.getMessage())}")


def _made(*, stderr: bool, file: TextIO | None = None) -> Console:
    from rich.console import Console  # noqa: PLC0415 it takes 50 ms

    class Lasting(Console):
        """Falls silent when nobody reads it any more: `launch | head` goes on training."""

        def on_broken_pipe(self) -> None:
            self.quiet = True

    return (Lasting if stderr else Console)(file=file, stderr=stderr, highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Prints plain text to stdout, as it is."""
    sys.stdout.write(f"{text}\n")


def print_error(error: TfdistError) -> None:
    """Prints an error, a line for each of its problems, and its hint."""
    for name, line in error.labelled_lines():
        _console(True).print(f"[bold red]{_plain(name)}:[/] {_plain(line)}")
    if error.hint:
        _console(True).print(f"[bold]hint:[/] {_plain(error.hint)}")


def print_warnings(found: Iterable[PlanWarning]) -> None:
    """Prints on stderr what to think about, and what to do about it."""
    for caution in found:
        _console(True).print(f"[bold yellow]warning:[/] {_plain(caution.message)}")
        _console(True).print(f"[bold]hint:[/] {_plain(caution.hint)}")


def _plain(text: str) -> str:
    """Keeps brackets, such as those of `[worker:1]`, from being read as markup."""
    from rich.markup import escape  # noqa: PLC0415

    return escape(text)
