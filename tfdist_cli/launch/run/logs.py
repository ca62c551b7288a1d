"""The logs of tasks: every byte they wrote but their records, a folder for each task of an attempt."""

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

    A log that cannot be written, on a full disk say, is no reason to end a training: the first such problem is kept,
    and told at the end.

    Args:
        folder_of: an attempt's number in this launch, from 1 → its folder.
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
        """The file that a stream is logged to."""
        return self.folder(task) / f"{stream}.log"

    def of(self, task: TaskId) -> Path:
        """The file that most likely says why the task ended."""
        found = (path for path in (self.path(task, "stderr"), self.path(task, "stdout")) if path.exists())
        return next(found, self.folder(task))

    def begin(self, task: TaskId, attempt: int) -> Path:
        """Makes the task's folder before the task starts; one that is started again alone goes on in its logs."""
        folder = self._folder_of(attempt) / task.slug
        again = folder == self._folders.get(task)
        if again:
            self.write(task, "stderr", b"tfdist: started again\n")
        else:
            self._close(task)
            self._folders[task] = folder
        try:
            if again:
                _put_aside(folder / ERROR_FILE)
            else:
                folder.parent.mkdir(exist_ok=True)  # the run's directory is there, or somebody has removed it
                folder.mkdir(exist_ok=True)
        except OSError as error:
            self.problem = self.problem or f"{folder} cannot be made ready: {error.strerror}"
        return folder

    def write(self, task: TaskId, stream: Stream, data: bytes) -> None:
        """Adds to a log at once, for whoever follows it."""
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


def _put_aside(path: Path) -> None:
    """Makes room for what comes of the next start: error.json becomes error_1.json, or the next number."""
    if path.exists():
        number = 1 + len(list(path.parent.glob(f"{path.stem}_*{path.suffix}")))
        path.rename(path.with_name(f"{path.stem}_{number}{path.suffix}"))
