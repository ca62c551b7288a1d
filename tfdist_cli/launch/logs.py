"""The logs of tasks: every byte they wrote but their records, a folder for each task."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from tfdist_cli.launch.events import Stream
from tfdist_cli.spec.task_id import TaskId


class TaskLogs:
    """Log files, opened when there is something to write.

    A log that cannot be written, on a full disk say, is no reason to end a training: the first such problem is kept,
    and told at the end.

    Args:
        folder: the attempt's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[tuple[TaskId, Stream], BinaryIO] = {}
        self.problem: str | None = None

    def folder(self, task: TaskId) -> Path:
        """The task's folder."""
        return self._folder / task.slug

    def path(self, task: TaskId, stream: Stream) -> Path:
        """The file that a stream is logged to."""
        return self.folder(task) / f"{stream}.log"

    def of(self, task: TaskId) -> Path:
        """The file that most likely says why the task ended."""
        found = (path for path in (self.path(task, "stderr"), self.path(task, "stdout")) if path.exists())
        return next(found, self.folder(task))

    def make_folder(self, task: TaskId) -> Path:
        """Makes the task's folder before the task starts."""
        self.folder(task).mkdir(parents=True, exist_ok=True)
        return self.folder(task)

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
        for file in self._files.values():
            with suppress(OSError):
                file.close()
