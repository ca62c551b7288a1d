"""What a launcher hears of its tasks, and what it does to them: plain values on one queue."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.task_id import TaskId

Stream = Literal["stdout", "stderr"]
_OUTPUTS_IN_FLIGHT = 64
"""Chunks of output that may wait to be handled; past that, reading stops and the task's writes block."""


@dataclass(frozen=True)
class Queued:
    """A task waits for a place to run in; how long is not for it to say, so its time to come up has not begun."""

    task: TaskId


@dataclass(frozen=True)
class Started:
    """A task's process is there."""

    task: TaskId
    pid: int


@dataclass(frozen=True)
class Output:
    """A task has written text.

    Args:
        task: who wrote it.
        stream: where it was written.
        lines: the lines that are complete, without their line feeds.
        unfinished: what the line that goes on shows so far, such as a progress bar.
    """

    task: TaskId
    stream: Stream
    lines: tuple[str, ...]
    unfinished: str = ""


@dataclass(frozen=True)
class Recorded:
    """A task has sent a record; see `tfdist_cli.protocol.records`."""

    task: TaskId
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Exited:
    """A task's process is gone, and all it wrote has been read.

    Args:
        task: which task.
        code: its exit code, or -n when signal n ended it.
        ago: seconds since its program ended; what it left behind took this long.
        oom_killed: for one that was killed by SIGKILL, whether the kernel did it for want of memory; None if unknown.
        cause: why it counts as gone, where no program has ended of its own: its host was lost, say. The code is then
            the launcher's choice, unless the program's own is known.
        final: whether somebody else has ended its job on purpose, so that it must not be started again.
    """

    task: TaskId
    code: int
    ago: float = field(default=0.0, compare=False)
    oom_killed: bool | None = field(default=None, compare=False)
    cause: str = ""
    final: bool = False


@dataclass(frozen=True)
class Signalled:
    """The launcher itself has been sent a signal."""

    signum: int


@dataclass(frozen=True)
class Asked:
    """Somebody has left a request in the run's directory."""


@dataclass(frozen=True)
class Resized:
    """The job is to go on with other numbers of tasks.

    Args:
        request: the request's number.
        replicas: for each role that changes, how many tasks it has and how many it is to have.
        tasks: every task of the next attempt.
    """

    request: str
    replicas: Mapping[Role, tuple[int, int]]
    tasks: tuple[TaskId, ...]


@dataclass(frozen=True)
class Answered:
    """A request has been answered, and changes nothing.

    Args:
        request: the request's number.
        answer: `refused`, `unchanged` when all is as it asks for, or `possible` when it only asks whether it is.
        replicas: as in `Resized`.
        reason: why it was refused.
        hint: what to do about it.
    """

    request: str
    answer: Literal["refused", "unchanged", "possible"]
    replicas: Mapping[Role, tuple[int, int]] = field(default_factory=dict)
    reason: str = ""
    hint: str = ""


@dataclass(frozen=True)
class Tick:
    """Nothing has happened, but time has passed."""


@dataclass(frozen=True)
class Networked:
    """The tasks' network is there.

    Args:
        private: whether it is the run's own, which nobody else reaches.
        text: what a user is to know of it.
    """

    private: bool
    text: str


Event = Queued | Started | Output | Recorded | Exited | Signalled | Asked | Resized | Answered | Networked | Tick


class How(Enum):
    """How a task is told to end."""

    TERMINATE = "terminate"
    KILL = "kill"


@dataclass(frozen=True)
class Start:
    """Start the task's process.

    Args:
        task: which task.
        attempt: which start of the whole job it belongs to, from 1.
    """

    task: TaskId
    attempt: int = 1


@dataclass(frozen=True)
class End:
    """Tell a task to end, and the processes that it has started, but for those that have made sessions of their own."""

    task: TaskId
    how: How


Action = Start | End


class EventQueue:
    """The one queue between whatever hears of tasks and the loop that acts.

    Signal handlers and ended processes never wait to be heard. Output does: a task that floods is slowed down to the
    speed at which its lines are shown.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._room = asyncio.Semaphore(_OUTPUTS_IN_FLIGHT)

    def put(self, event: Queued | Started | Exited | Signalled | Asked | Networked) -> None:
        """Adds what must not wait."""
        self._events.put_nowait(event)

    async def put_output(self, event: Output | Recorded) -> None:
        """Adds what a task has written, once there is room for it."""
        await self._room.acquire()
        self._events.put_nowait(event)

    def fail(self, error: BaseException) -> None:
        """Has `get` raise an error: what feeds the queue has broken, and the loop must not wait for it."""
        self._events.put_nowait(error)

    async def get(self, timeout: float) -> Event:
        """The next event; a `Tick` when there is none for `timeout` seconds."""
        try:
            event = self._events.get_nowait()
        except asyncio.QueueEmpty:
            try:
                event = await asyncio.wait_for(self._events.get(), timeout)
            except asyncio.TimeoutError:
                return Tick()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Output | Recorded):
            self._room.release()
        return event
