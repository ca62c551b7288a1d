"""Starts a process for each tracker of a run, and ends it after the job."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tfdist_cli.spec.trackers import TRACKERS

TRACKING = "tracking"
"""The folder in a run's directory for the files and the logs of trackers."""
_LAST_SECONDS = 30.0
"""Seconds that trackers have after the job, all together."""


@dataclass(frozen=True)
class _Process:
    name: str
    process: subprocess.Popen[bytes]
    log: Path


class TrackerProcesses:
    """The trackers of a run.

    Each one reads the run's files in a process of its own: whatever it does, the job goes on.

    Args:
        run: the run's directory.
        last_seconds: seconds that they have after the job.
    """

    def __init__(self, run: Path, last_seconds: float = _LAST_SECONDS) -> None:
        self._run = run
        self._last_seconds = last_seconds
        self._processes: list[_Process] = []
        self._problems: list[str] = []

    def start(self, name: str, module: str = "tfdist_cli.tracking") -> None:
        """Starts a tracker. One that cannot start is a problem of `finish`.

        Args:
            name: one of `TRACKERS`.
            module: the program.
        """
        folder = self._run / TRACKING
        log = folder / f"{name}.log"
        try:
            folder.mkdir(exist_ok=True)
            with log.open("ab") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", module, str(self._run), name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=file,
                    start_new_session=True,  # Ctrl-C is for the job; the tracker ends after it
                )
        except OSError as error:
            self._problems.append(f"{TRACKERS[name].title} could not be started: {error.strerror}")
        else:
            self._processes.append(_Process(name, process, log))

    def finish(self, exit_code: int) -> list[str]:
        """Waits until the trackers have everything, for a limited time.

        Args:
            exit_code: that of the launcher.

        Returns:
            What is not complete, and why.
        """
        for each in self._processes:
            with suppress(OSError):  # it has exited
                _pipe(each.process.stdin).write(f"{exit_code}\n".encode())
            with suppress(OSError):
                _pipe(each.process.stdin).close()
        end = time.monotonic() + self._last_seconds
        for each in self._processes:
            self._problems += _end(each, end)
        self._processes.clear()
        return self._problems


@contextmanager
def start_trackers(run: Path, names: Sequence[str]) -> Iterator[TrackerProcesses]:
    """Tracks a run; an exception ends the trackers, too.

    Args:
        run: the run's directory.
        names: the trackers.
    """
    processes = TrackerProcesses(run)
    with ExitStack() as stack:
        stack.callback(processes.finish, 1)
        for name in names:
            processes.start(name)
        yield processes


def _end(tracker: _Process, end: float) -> Iterator[str]:
    title = TRACKERS[tracker.name].title
    try:
        code = tracker.process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        tracker.process.kill()
        tracker.process.wait()
        code = None
    with _pipe(tracker.process.stdout) as pipe:
        problem = pipe.read().decode(errors="replace")
    if code is None:
        yield f"{title} is not complete: it did not finish in time. {problem}".rstrip()
    elif code:
        yield f"{title} is not complete: {problem or f'its process exited with {code}'}. More: {tracker.log}"
    elif problem:
        yield f"{title} failed for a while, and is complete now: {problem}"


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    if pipe is None:  # all are opened as pipes
        raise ValueError("no pipe")
    return pipe
