"""Reads one stream of a task, no faster than its events are handled, until it ends or the task has exited."""

from __future__ import annotations

import asyncio
from typing import IO

from tfdist_cli.launch.process.task_output import OutputParser, Parsed
from tfdist_cli.launch.supervisor.events import Output, RecordReceived, Stream
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.spec.task_id import TaskId

_CHUNK = 64 * 1024
_PATIENCE = 1.0
"""Seconds without data after which a pipe is closed if the task's group has exited."""
_LAST_BYTES = 2**20
"""More than a pipe and its reader hold. Further data can only come from a process that has left the group."""


class TaskStream:
    """One stream of one task.

    Args:
        task: the task.
        stream: the stream.
        pipe: the end to read from; it is closed at its end.
        context: takes the events and the output.
    """

    def __init__(self, task: TaskId, stream: Stream, pipe: IO[bytes], context: LaunchContext) -> None:
        self._task = task
        self._stream: Stream = stream
        self._context = context
        self._left: int | None = None
        self._waiting_since: float | None = None
        self._reading = asyncio.get_running_loop().create_task(self._read(pipe))

    async def drain(self) -> None:
        """Waits for the end of the stream, after the task's process group has exited.

        A daemon that has left the group may keep the pipe open. The stream is then read no further than the task's own
        output.
        """
        self._left = _LAST_BYTES
        while not self._reading.done():
            await asyncio.wait((self._reading,), timeout=_PATIENCE)
            since = self._waiting_since
            if since is not None and asyncio.get_running_loop().time() - since >= _PATIENCE:
                self._reading.cancel()
        if not self._reading.cancelled():
            self._reading.result()

    async def _read(self, pipe: IO[bytes]) -> None:
        reader = asyncio.StreamReader(limit=_CHUNK)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        parser = OutputParser(self._context.mask)
        try:
            while data := await self._next(reader):
                await forward(self._task, self._stream, parser.feed(data), parser.unfinished, self._context)
            await forward(self._task, self._stream, parser.close(), "", self._context)
        finally:
            transport.close()

    async def _next(self, reader: asyncio.StreamReader) -> bytes:
        if self._left is not None and self._left <= 0:
            return b""
        self._waiting_since = asyncio.get_running_loop().time()
        data = await reader.read(_CHUNK)
        self._waiting_since = None
        if self._left is not None:
            self._left -= len(data)
        return data


async def forward(task: TaskId, stream: Stream, parsed: Parsed, unfinished: str, context: LaunchContext) -> None:
    """Forwards parsed output to the logs and the events."""
    if parsed.log:
        context.logs.write(task, stream, parsed.log)
    if parsed.lines or unfinished:
        await context.events.put_output(Output(task, stream, tuple(parsed.lines), unfinished))
    for record in parsed.records:
        await context.events.put_output(RecordReceived(task, record))
