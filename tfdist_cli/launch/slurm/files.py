"""Follows what a task on another machine writes to files of a shared file system."""

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


class TaskFiles:
    """The two streams of one task in one attempt.

    Args:
        task: who writes.
        folder: where its `stdout.raw` and `stderr.raw` are, or will be.
        context: takes the events and the output.
    """

    def __init__(self, task: TaskId, folder: Path, context: LaunchContext) -> None:
        self.task = task
        self.code: int | None = None
        """Its exit code, once it has said so."""
        self.exited = False
        """Whether its end has been told."""
        self._ended_at: float | None = None
        self._context = context
        # Standard error comes last: it tells that the task has ended, when standard output is there to be read.
        self._streams = [_File(folder / f"{stream}.raw", stream, context.mask) for stream in _ORDER]

    async def read(self) -> None:
        """Passes on what has been written since the last call."""
        for each in self._streams:
            while data := each.read():
                await self._pass_on(each, each.parser.feed(data), each.parser.unfinished)

    def tell_end(self) -> None:
        """Tells how the task has ended, if it has said so."""
        if self.code is not None:
            self._exit(self.code)

    async def close(self, code: int, cause: str, *, cancelled: bool = False) -> None:
        """Passes on the rest, and tells what the task came to; then the files are of no more use.

        Args:
            code: the exit code of one that has not said so.
            cause: why that one is gone.
            cancelled: whether that is why any other is gone, too, and for good.
        """
        await self.read()
        for each in self._streams:
            await self._pass_on(each, each.parser.close(), "")
            each.close()
        if self.code is None or (self.code and cancelled):
            self._exit(self.code or code, cause, cancelled=cancelled)
        self.tell_end()

    async def _pass_on(self, stream: _File, parsed: Parsed, unfinished: str) -> None:
        own = [record for record in parsed.records if isinstance(record.get(_OWN.get(record["kind"], "")), int)]
        parsed.records = [record for record in parsed.records if record not in own]
        for record in own:
            if record["kind"] == "started":
                self._context.events.put(Started(self.task, record["pid"]))
        await forward(self.task, stream.name, parsed, unfinished, self._context)
        for record in own:
            if record["kind"] == "exited":
                self.code, self._ended_at = record["code"], time.monotonic()

    def _exit(self, code: int, cause: str = "", *, cancelled: bool = False) -> None:
        if not self.exited:
            self.exited = True
            ago = 0.0 if self._ended_at is None else time.monotonic() - self._ended_at
            self._context.events.put(Exited(self.task, code, ago, cause=cause, cancelled=cancelled))


_ORDER: tuple[Stream, ...] = ("stdout", "stderr")
_OWN = {"started": "pid", "exited": "code"}
"""The records of the process that waits for a task, and the number that each has."""


class _File:
    """A file that another machine makes and adds to."""

    def __init__(self, path: Path, name: Stream, mask: Mask) -> None:
        self.name: Stream = name
        self.parser = OutputParser(mask)
        self._path = path
        self._file: BinaryIO | None = None
        self._place = 0

    def read(self) -> bytes:
        """What comes next; empty when there is no more yet."""
        data = (self._file.read(_CHUNK) if self._file else b"") or self._read_anew()
        self._place += len(data)
        return data

    def close(self) -> None:
        """Removes it: all of it is in the logs."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _read_anew(self) -> bytes:
        """Reads on in the file as it is now: NFS may show who has it open what it was up to a minute ago."""
        try:
            file = self._path.open("rb", buffering=0)
        except FileNotFoundError:
            return b""
        if self._file is not None:
            self._file.close()
        self._file = file
        self._file.seek(self._place)
        return self._file.read(_CHUNK)
