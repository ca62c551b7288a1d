"""All output of tfdist: results go to stdout, progress and errors to stderr.

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

from tfdist_cli.cli.console.nonblocking_stream import nonblocking
from tfdist_cli.cli.console.standard_output import discard_output
from tfdist_cli.errors import TfdistError

if TYPE_CHECKING:
    from rich.console import Console

    from tfdist_cli.finding import Finding
    from tfdist_cli.plan.warnings import PlanWarning

    out: Console
    err: Console


def __getattr__(name: str) -> Console:
    if name not in ("out", "err"):
        raise AttributeError(name)
    return _console(name == "err")


@cache
def _console(stderr: bool) -> Console:
    return _new_console(stderr=stderr)


@contextmanager
def nonblocking_stderr() -> Iterator[Console]:
    """Standard error while tasks run. A reader that stops reading blocks neither the tasks nor the launcher."""
    with nonblocking(sys.stderr) as stream:
        yield _new_console(stderr=True, file=stream)


@contextmanager
def tolerating_closed_output() -> Iterator[None]:
    """Ignores errors of printing to a closed terminal or pipe, so that they do not change the exit code."""
    try:
        yield
        sys.stdout.flush()
    except OSError:
        discard_output(1, 2)


def open_closed_streams() -> None:
    """Opens the null device in place of standard streams that are closed, as by `>&-`.

    Otherwise a file or a socket that is opened later takes the number of the stream, and receives what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest one that is free
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 until the exit


@contextmanager
def launcher_messages(*, quiet: bool) -> Iterator[None]:
    """Prints a launcher's log messages on stderr while it prepares, such as the progress of a copy."""
    log, handler = logging.getLogger("tfdist.launch"), _LauncherMessages()
    if quiet:
        yield
        return
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)


class _LauncherMessages(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _console(True).print(f"[bold]{_plain('[tfdist]')}[/] {_plain(record.getMessage())}")


def _new_console(*, stderr: bool, file: TextIO | None = None) -> Console:
    from rich.console import Console  # noqa: PLC0415 it takes 50 ms

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            if not stderr:
                raise  # noqa: PLE0704 rich calls this where it catches the error, and would exit
            self.quiet = True  # `launch | head` continues to train

    return _Console(file=file, stderr=stderr, highlight=False, soft_wrap=True)


def write(text: str) -> None:
    """Prints plain text to stdout."""
    sys.stdout.write(f"{text}\n")


def write_message(text: str) -> None:
    """Prints plain text to stderr."""
    sys.stderr.write(f"{text}\n")


def print_error(error: TfdistError) -> None:
    """Prints an error, one line for each problem, and its hint."""
    for name, line in error.labelled_lines():
        _console(True).print(f"[bold red]{_plain(name)}:[/] {_plain(line)}")
    if error.hint:
        _console(True).print(f"[bold]hint:[/] {_plain(error.hint)}")


def print_warnings(found: Iterable[PlanWarning]) -> None:
    """Prints warnings and their hints on stderr."""
    for warning in found:
        _console(True).print(f"[bold yellow]{_plain(f'warning[{warning.code}]:')}[/] {_plain(warning.message)}")
        _console(True).print(f"[bold]hint:[/] {_plain(warning.hint)}")


def print_findings_before_start(found: Iterable[Finding]) -> None:
    """Prints findings and their fixes on stderr, where a command goes on or ends after them."""
    for finding in found:
        style = "bold red" if finding.level == "error" else "bold yellow"
        name = f"{finding.level}[{finding.code}]:"
        _console(True).print(f"[{style}]{_plain(name)}[/] {_plain(f'{finding.place}: {finding.message}')}")
        _console(True).print(f"[bold]hint:[/] {_plain(finding.fix)}")


def _plain(text: str) -> str:
    """Escapes brackets, such as those of `[worker:1]`, which rich would read as markup."""
    from rich.markup import escape  # noqa: PLC0415

    return escape(text)
