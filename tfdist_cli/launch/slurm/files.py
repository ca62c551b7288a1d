"""Follows the output files of a task on another machine, on a shared file system."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

from tfdist_cli.launch.process.stream import forward
from tfdist_cli.launch.process.task_output import OutputParser, Parsed
from tfdist_cli.launch.supervisor.events import Exited, Started, Stream
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.protocol.masking import Mask
from tfdist_cli.spec.task_id import TaskId

_CHUNK = 64 * 1024
_CHUNKS = 64
"""Read from a file at a time, while its task may still write to it."""


class TaskFiles:
    """The two streams of one task in one attempt.

    Args:
        task: the task.
        folder: the folder of its `stdout.raw` and `stderr.raw`, which may not exist yet.
        context: takes the events and the output.
    """

    def __init__(self, task: TaskId, folder: Path, context: LaunchContext) -> None:
        self.task = task
        self.folder = folder
        self.exit_code: int | None = None
        """The task's exit code; None until the task has reported it."""
        self.exit_reported = False
        """Whether the task's exit is in the event queue."""
        self._exited_at: float | None = None
        self._context = context
        # Stderr is last: it contains the exit, and stdout must be read completely before the exit is reported.
        self._streams = [_File(folder / f"{stream}.raw", stream, context.mask) for stream in _ORDER]

    async def read(self) -> None:
        """Forwards the output since the last call, or a part of it.

        A task that writes all the time must not keep this call, and with it the launcher, from everything else.
        """
        for each in self._streams:
            for _ in range(_CHUNKS):
                if not await self._forward_next(each):
                    break
        if self.exit_code is not None:
            await self._read_all()

    def report_exit(self) -> None:
        """Reports the exit of a task whose exit code is known."""
        if self.exit_code is not None:
            self._put_exit(self.exit_code)

    async def close(self, code: int, cause: str, *, cancelled: bool = False) -> None:
        """Forwards the rest of the output, reports the exit, and removes the files.

        Args:
            code: the exit code to report if the task has reported none.
            cause: why the task has exited then.
            cancelled: whether the job was cancelled. Then this is also the cause of reported failures.
        """
        await self._read_all()
        for each in self._streams:
            await self._forward(each, each.parser.close(), "")
            each.close()
        if self.exit_code is None or (self.exit_code and cancelled):
            self._put_exit(self.exit_code or code, cause, cancelled=cancelled)
        self.report_exit()

    async def _read_all(self) -> None:
        """Forwards all output of a task that has exited."""
        for each in self._streams:
            while await self._forward_next(each):
                pass

    async def _forward_next(self, stream: _File) -> bool:
        """Forwards the next chunk; returns whether there was one."""
        data = stream.read()
        if data:
            await self._forward(stream, stream.parser.feed(data), stream.parser.unfinished)
        return bool(data)

    async def _forward(self, stream: _File, parsed: Parsed, unfinished: str) -> None:
        own = [record for record in parsed.records if isinstance(record.get(_OWN.get(record["kind"], "")), int)]
        parsed.records = [record for record in parsed.records if record not in own]
        for record in own:
            if record["kind"] == "started":
                self._context.events.put(Started(self.task, record["pid"]))
        await forward(self.task, stream.name, parsed, unfinished, self._context)
        for record in own:
            if record["kind"] == "exited":
                self.exit_code, self._exited_at = record["code"], time.monotonic()

    def _put_exit(self, code: int, cause: str = "", *, cancelled: bool = False) -> None:
        if not self.exit_reported:
            self.exit_reported = True
            ago = 0.0 if self._exited_at is None else time.monotonic() - self._exited_at
            self._context.events.put(Exited(self.task, code, ago, cause=cause, cancelled=cancelled))


_ORDER: tuple[Stream, ...] = ("stdout", "stderr")
_OWN = {"started": "pid", "exited": "code"}
"""The records of the process that waits for a task, with the integer field of each."""


class _File:
    """A file that another machine creates and appends to."""

    def __init__(self, path: Path, name: Stream, mask: Mask) -> None:
        self.name: Stream = name
        self.parser = OutputParser(mask)
        self._path = path
        self._file: BinaryIO | None = None
        self._offset = 0

    def read(self) -> bytes:
        """Returns the next bytes; empty if there are no more yet."""
        data = (self._file.read(_CHUNK) if self._file else b"") or self._reopen_and_read()
        self._offset += len(data)
        return data

    def close(self) -> None:
        """Removes the file, whose content is in the logs."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _reopen_and_read(self) -> bytes:
        """Continues in the file as it is now: NFS may show an open file as it was up to a minute ago."""
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            return b""
        if self._file is not None:
            self._file.close()
        self._file = file
        self._file.seek(self._offset)
        return self._file.read(_CHUNK)
