"""`tfdist logs`: what a run's tasks have written."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import Annotated

import typer

from tfdist_cli.cli import console
from tfdist_cli.cli.lines import TaskLines
from tfdist_cli.cli.options import RunArgument
from tfdist_cli.errors import UsageError
from tfdist_cli.launch.output import GREETINGS
from tfdist_cli.launch.runs import launcher_of, log_files, read_run
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
    """Print what a run's tasks have written, the run that was launched last by default.

    The files are RUN/attempt_N/TASK/stdout.log and stderr.log.
    """
    news = read_run(run)
    wanted = {_parsed(name, [each.task for each in news.tasks]) for name in tasks or ()}
    readers: dict[Path, _Reader] = {}
    shown = lines
    while True:
        over = launcher_of(news.path) is None  # asked first: what is written until then is read after it
        for (_, task, _), path in log_files(news.path, attempt).items():
            if path not in readers:
                readers[path] = _Reader(path, shown)
            if not wanted or task in wanted:
                _print(task, readers[path].read())
        if over or not follow:
            break
        shown = 0  # all of a log that is begun while one looks
        time.sleep(_PERIOD)
    if not readers:
        raise UsageError(
            f"{news.path.name} has no logs" + (f" of attempt {attempt}" if attempt else ""),
            hint="tfdist status shows whether its tasks were started",
        )


class _Reader:
    """Reads on in a file.

    Args:
        path: the file.
        lines: how many of the lines that are there at first are given; 0 for all.
    """

    def __init__(self, path: Path, lines: int) -> None:
        self._file = path.open("rb")
        self._first: int | None = lines or None
        self._begun = b""

    def read(self) -> list[str]:
        """The whole lines since the last call, without TensorFlow's greetings."""
        *whole, self._begun = (self._begun + self._file.read()).split(b"\n")
        texts = (line.decode(errors="replace").rstrip("\r") for line in whole)
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
        shown = TaskLines()
        shown.add(task, texts)
        console.out.print(shown, soft_wrap=True, end="")
