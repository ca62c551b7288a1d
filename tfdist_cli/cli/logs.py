"""`tfdist logs`: what a run's tasks have written."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from tfdist_cli.cli.console import console
from tfdist_cli.cli.console.lines import TaskLines, neutral
from tfdist_cli.cli.options import RunArgument
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.process.task_output import GREETINGS, shown
from tfdist_cli.launch.run.history import launcher_of, log_files, read_run
from tfdist_cli.protocol.run_files import open_file
from tfdist_cli.spec.task_id import TaskId

EXAMPLES = (
    "tfdist logs",
    "tfdist logs runs/latest --task worker:1 --lines 200",
    "tfdist logs --follow",
)
_PERIOD = 0.25
"""Seconds between two looks at files: nothing tells when another process has written to one."""


def logs(
    run: RunArgument,
    *,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="ROLE:INDEX", help="Only this task. Can be repeated.", show_default=False),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="The last lines of each log; 0 for all.")] = 20,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="The attempt; the last one by default.", show_default=False)
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as the tasks write, until the run ends.")
    ] = False,
) -> None:
    """Print what a run's tasks have written, those of runs/latest by default.

    That is the run below runs/ that was launched last. The files are RUN/attempt_N/TASK/stdout.log and stderr.log.
    """
    news = read_run(run)
    wanted = {_parsed(name, [each.task for each in news.tasks]) for name in tasks or ()}
    written = _Logs(news.path, attempt, lines)
    while True:
        over = launcher_of(news.path) is None  # asked first: what is written until then is read after it
        for task, texts in written.read(last=over or not follow):
            if not wanted or task in wanted:
                _print(task, texts)
        if over or not follow:
            break
        time.sleep(_PERIOD)
    if not written.found:
        raise UsageError(
            f"{news.path.name} has no logs" + (f" of attempt {attempt}" if attempt else ""),
            hint="tfdist status shows whether its tasks were started",
        )


class _Logs:
    """Reads on in the logs of an attempt.

    Args:
        run: the run's directory.
        attempt: which attempt; None for the last one, and those that begin while one looks.
        lines: how many of the lines that a log has at first are given; 0 for all.
    """

    def __init__(self, run: Path, attempt: int | None, lines: int) -> None:
        self._run = run
        self._attempt = attempt
        self._lines = lines
        self._first: int | None = None
        """The attempt that was the last one at first."""
        self._readers: dict[tuple[int, TaskId, str], _Reader | None] = {}

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._readers)

    def read(self, *, last: bool) -> Iterator[tuple[TaskId, list[str]]]:
        """What each task has written since the last call; of an attempt that is over, all before that of the next.

        Args:
            last: whether there will be no other call.
        """
        files = log_files(self._run)
        newest = max((number for number, _, _ in files), default=None)
        self._first = newest if self._first is None else self._first
        for key, path in files.items():
            number, task, _ = key
            if number == self._attempt or (self._attempt is None and number >= (self._first or 0)):
                if key not in self._readers:
                    self._readers[key] = _opened(path, self._lines)
                reader = self._readers[key]
                if reader:
                    yield task, reader.read(last=last or number != newest)
        self._lines = 0  # all of a log that is begun while one looks


def _opened(path: Path, lines: int) -> _Reader | None:
    """A reader; None for what cannot be read, which is named."""
    try:
        return _Reader(path, lines)
    except OSError as error:
        console.err.print(Text(f"left out: {neutral(str(path))}: {error.strerror}"), soft_wrap=True)
        return None


class _Reader:
    """Reads on in a file.

    Args:
        path: the file.
        lines: how many of the lines that are there at first are given; 0 for all.
    """

    def __init__(self, path: Path, lines: int) -> None:
        self._file = open_file(path)
        self._first: int | None = lines or None
        self._begun = b""

    def read(self, *, last: bool) -> list[str]:
        """The lines since the last call, without TensorFlow's greetings.

        Args:
            last: whether it is read no further, so that a line is one though nothing ends it.
        """
        if self._file.closed:
            return []
        *whole, self._begun = (self._begun + self._file.read()).split(b"\n")
        if last:
            self._file.close()
            whole += [self._begun] if self._begun else []
        texts = (shown(line.decode(errors="replace")) for line in whole)
        found = deque((text for text in texts if not any(each in text for each in GREETINGS)), self._first)
        self._first = None
        return [*found]


def _parsed(name: str, tasks: list[TaskId]) -> TaskId:
    try:
        task = TaskId.parse(name)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if task not in tasks:
        raise UsageError(f"the run has no task {task}", hint=f"its tasks are {', '.join(map(str, tasks))}")
    return task


def _print(task: TaskId, texts: list[str]) -> None:
    if texts:
        lines = TaskLines()
        lines.add(task, texts)
        console.out.print(lines, soft_wrap=True, end="")
