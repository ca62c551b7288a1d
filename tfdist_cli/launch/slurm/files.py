"""Follows what a task on another machine writes to files of a shared file system."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from tfdist_cli.launch.base import Outlets
from tfdist_cli.launch.events import Exited, Started, Stream
from tfdist_cli.launch.output import OutputParser, Parsed
from tfdist_cli.launch.pipes import pass_on
from tfdist_cli.masking import Mask
from tfdist_cli.spec.task_id import TaskId

_CHUNK = 64 * 1024


class TaskFiles:
    """The two streams of one task in one attempt.

    Args:
        task: who writes.
        folder: where its `stdout.raw` and `stderr.raw` are, or will be.
        outlets: where the news goes.
    """

    def __init__(self, task: TaskId, folder: Path, outlets: Outlets) -> None:
        self.task = task
        self.exited = False
        self._outlets = outlets
        # Standard error comes last: it tells that the task has ended, when standard output is there to be read.
        self._streams = [_File(folder / f"{stream}.raw", stream, outlets.mask) for stream in _ORDER]

    async def read(self) -> None:
        """Passes on what has been written since the last call."""
        for each in self._streams:
            while data := each.read():
                await self._pass_on(each, each.parser.feed(data), each.parser.unfinished)

    async def close(self, code: int, cause: str) -> None:
        """Passes on the rest, and what the task came to if it has not said so; then the files are of no more use."""
        await self.read()
        for each in self._streams:
            await self._pass_on(each, each.parser.close(), "")
            each.close()
        self._exit(code, cause)

    async def _pass_on(self, stream: _File, parsed: Parsed, unfinished: str) -> None:
        own = [record for record in parsed.records if isinstance(record.get(_OWN.get(record["kind"], "")), int)]
        parsed.records = [record for record in parsed.records if record not in own]
        for record in own:
            if record["kind"] == "started":
                self._outlets.events.put(Started(self.task, record["pid"]))
        await pass_on(self.task, stream.name, parsed, unfinished, self._outlets)
        for record in own:
            if record["kind"] == "exited":
                self._exit(record["code"])

    def _exit(self, code: int, cause: str = "") -> None:
        if not self.exited:
            self.exited = True
            self._outlets.events.put(Exited(self.task, code, cause=cause))


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

    def read(self) -> bytes:
        if self._file is None:
            try:
                self._file = self._path.open("rb", buffering=0)
            except FileNotFoundError:
                return b""
        return self._file.read(_CHUNK)

    def close(self) -> None:
        """Removes it: all of it is in the logs."""
        if self._file is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)
