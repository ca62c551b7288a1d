"""`tfdist logs`: prints the logs of a run's tasks."""

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
from tfdist_cli.cli.options import RunLocation
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.process.task_output import GREETINGS, shown
from tfdist_cli.launch.run.history import Outcome, find_task, launcher_of, log_files, read_run
from tfdist_cli.protocol.run_files import open_file
from tfdist_cli.runs.source import RunSource, open_run
from tfdist_cli.spec.task_id import TaskId

EXAMPLES = (
    "tfdist logs",
    "tfdist logs runs/latest --task worker:1 --lines 200",
    "tfdist logs --follow",
)
_PERIOD = 0.25
"""Seconds between two reads: no portable event reports writes by another process."""
_REMOTE_PERIOD = 5.0
"""The same for a run in a storage service."""


def logs(
    run: RunLocation,
    *,
    tasks: Annotated[
        list[str] | None,
        typer.Option("--task", "-t", metavar="ROLE:INDEX", help="Only this task. Repeatable.", show_default=False),
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end of each log; 0 for all.")
    ] = 20,
    attempt: Annotated[
        int | None, typer.Option(min=1, help="The attempt; by default the last one.", show_default=False)
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines until the run ends.")] = False,
) -> None:
    """Print the logs of a run's tasks.

    The default run is runs/latest, the last run launched. The files are RUN/attempt_N/TASK/stdout.log and stderr.log.
    """
    with open_run(run, ["attempt_*/*/*.log"]) as source:
        view = read_run(source.path)
        wanted = {find_task(view, name) for name in tasks or ()}
        log_reader = _Logs(view.path, attempt, lines)
        while True:
            # Checked before reading, so that everything written before the end is read.
            over = _is_over(source)
            for task, texts in log_reader.read(last=over or not follow):
                if not wanted or task in wanted:
                    _print(task, texts)
            if over or not follow:
                break
            time.sleep(_REMOTE_PERIOD if source.url else _PERIOD)
            source.refresh()
    if not log_reader.found and view.manual:
        raise UsageError(
            f"{view.path.name} has no logs: its tasks were started by hand",
            code="no-logs",
            hint="look at the terminals in which they run; tfdist status shows the machines",
        )
    if not log_reader.found:
        raise UsageError(
            f"{view.path.name} has no logs" + (f" of attempt {attempt}" if attempt else ""),
            code="no-logs",
            hint="tfdist status shows whether its tasks were started",
        )


def _is_over(source: RunSource) -> bool:
    """Whether the run has ended."""
    view = read_run(source.path)
    if source.url or view.manual:
        return view.outcome is not Outcome.RUNNING
    return launcher_of(source.path) is None


class _Logs:
    """Reads the logs of an attempt incrementally.

    Args:
        run: the run directory.
        attempt: number of the attempt; None for the last one and those that start later.
        lines: lines to return from the end of each log on the first read; 0 for all.
    """

    def __init__(self, run: Path, attempt: int | None, lines: int) -> None:
        self._run = run
        self._attempt = attempt
        self._lines = lines
        self._first: int | None = None
        """The newest attempt at the first read."""
        self._readers: dict[tuple[int, TaskId, str], _Reader | None] = {}

    @property
    def found(self) -> bool:
        """Whether any log file exists."""
        return bool(self._readers)

    def read(self, *, last: bool) -> Iterator[tuple[TaskId, list[str]]]:
        """Yields each task's new lines since the last call. All lines of an attempt come before those of the next one.

        Args:
            last: whether this is the last call.
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
        self._lines = 0  # logs that appear later are read from their start


def _opened(path: Path, lines: int) -> _Reader | None:
    """Opens a log; reports an unreadable one on stderr and returns None."""
    try:
        return _Reader(path, lines)
    except OSError as error:
        console.err.print(Text(f"skipped: {neutral(str(path))}: {error.strerror}"), soft_wrap=True)
        return None


class _Reader:
    """Reads a file incrementally.

    Args:
        path: the file.
        lines: lines to return from the end on the first read; 0 for all.
    """

    def __init__(self, path: Path, lines: int) -> None:
        self._file = open_file(path)
        self._first: int | None = lines or None
        self._partial = b""

    def read(self, *, last: bool) -> list[str]:
        """Returns the lines since the last call, without TensorFlow's start-up messages.

        Args:
            last: whether this is the last read; then an unfinished line is returned too.
        """
        if self._file.closed:
            return []
        *whole, self._partial = (self._partial + self._file.read()).split(b"\n")
        if last:
            self._file.close()
            whole += [self._partial] if self._partial else []
        texts = (shown(line.decode(errors="replace")) for line in whole)
        found = deque((text for text in texts if not any(each in text for each in GREETINGS)), self._first)
        self._first = None
        return [*found]


def _print(task: TaskId, texts: list[str]) -> None:
    if texts:
        lines = TaskLines()
        lines.add(task, texts)
        console.out.print(lines, soft_wrap=True, end="")
