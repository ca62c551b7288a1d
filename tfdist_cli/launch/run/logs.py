"""The logs of tasks: their whole output without their records, in a folder for each task of an attempt."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, get_args

from tfdist_cli.launch.supervisor.events import Stream
from tfdist_cli.spec.task_id import TaskId

ERROR_FILE = "error.json"


class TaskLogs:
    """Log files, opened when there is something to write.

    A log that cannot be written, for example on a full disk, does not end the training: the first such problem is kept
    and reported at the end.

    Args:
        folder_of: returns the folder of an attempt, by its number in this launch, from 1.
    """

    def __init__(self, folder_of: Callable[[int], Path]) -> None:
        self._folder_of = folder_of
        self._folders: dict[TaskId, Path] = {}
        self._files: dict[tuple[TaskId, Stream], BinaryIO] = {}
        self.problem: str | None = None

    def folder(self, task: TaskId) -> Path:
        """The folder of the task in its latest attempt."""
        return self._folders.get(task) or self._folder_of(1) / task.slug

    def path(self, task: TaskId, stream: Stream) -> Path:
        """The log file of a stream."""
        return self.folder(task) / f"{stream}.log"

    def of(self, task: TaskId) -> Path:
        """The log file that most likely contains the cause of the task's exit."""
        found = (path for path in (self.path(task, "stderr"), self.path(task, "stdout")) if path.exists())
        return next(found, self.folder(task))

    def begin(self, task: TaskId, attempt: int) -> Path:
        """Creates the task's folder before the task starts; a task that is restarted alone appends to its logs."""
        folder = self._folder_of(attempt) / task.slug
        restarted = folder == self._folders.get(task)
        if restarted:
            self.write(task, "stderr", b"tfdist: started again\n")
        else:
            self._close(task)
            self._folders[task] = folder
        try:
            if restarted:
                _rename_old(folder / ERROR_FILE)
            else:
                folder.parent.mkdir(exist_ok=True)  # without parents: the run's directory exists unless it was removed
                folder.mkdir(exist_ok=True)
        except OSError as error:
            self.problem = self.problem or f"{folder} cannot be created: {error.strerror}"
        return folder

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Appends to a log without buffering, for readers that follow it."""
        try:
            if (task, stream) not in self._files:
                self._files[task, stream] = self.path(task, stream).open("ab", buffering=0)
            self._files[task, stream].write(data)
        except OSError as error:
            self.problem = self.problem or f"{self.path(task, stream)} is not complete: {error.strerror}"

    def close(self) -> None:
        """Closes the files."""
        for task in self._folders:
            self._close(task)

    def _close(self, task: TaskId) -> None:
        for stream in get_args(Stream):
            file = self._files.pop((task, stream), None)
            if file is not None:
                with suppress(OSError):
                    file.close()


def _rename_old(path: Path) -> None:
    """Renames error.json of an earlier start to error_1.json, or the next free number."""
    if path.exists():
        number = 1 + len(list(path.parent.glob(f"{path.stem}_*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}_{number}{path.suffix}"))
