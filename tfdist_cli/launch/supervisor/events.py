"""The events of a job and the launcher's actions: immutable values, and the queue that carries the events."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from tfdist_cli.protocol.profile_order import ProfileOrder
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.task_id import TaskId

Stream = Literal["stdout", "stderr"]
_QUEUED_OUTPUTS = 64
"""Chunks of output that may wait in the queue. At that number reading stops, and the task's writes block."""


@dataclass(frozen=True)
class Queued:
    """A task waits in a scheduler's queue. Its start timeout begins when it leaves the queue."""

    task: TaskId


@dataclass(frozen=True)
class Started:
    """A task's process runs."""

    task: TaskId
    pid: int


@dataclass(frozen=True)
class Output:
    """A task has written text.

    Args:
        task: the task.
        stream: the stream.
        lines: the complete lines, without their line feeds.
        unfinished: the visible part of an incomplete last line, such as a progress bar.
    """

    task: TaskId
    stream: Stream
    lines: tuple[str, ...]
    unfinished: str = ""


@dataclass(frozen=True)
class RecordReceived:
    """A task has sent a record; see `tfdist_cli.protocol.records`."""

    task: TaskId
    record: Mapping[str, Any]


@dataclass(frozen=True)
class Exited:
    """A task's process has exited, and all of its output has been read.

    Args:
        task: the task.
        code: its exit code, or -n for signal n.
        ago: seconds since its program exited; its remaining child processes took this long.
        oom_killed: for a task killed by SIGKILL, whether the kernel did it for lack of memory; None if unknown.
        cause: why it counts as exited although its program did not exit by itself, such as a lost host. Then the
            launcher chooses the code, unless the program's own is known.
        cancelled: whether its job was cancelled from outside, so that it must not be restarted.
    """

    task: TaskId
    code: int
    ago: float = field(default=0.0, compare=False)
    oom_killed: bool | None = field(default=None, compare=False)
    cause: str = ""
    cancelled: bool = False


@dataclass(frozen=True)
class SignalReceived:
    """The launcher has received a signal."""

    signum: int


@dataclass(frozen=True)
class RequestReceived:
    """There is a request in the run's directory."""


@dataclass(frozen=True)
class ResizeAccepted:
    """The job continues with other numbers of tasks.

    Args:
        request: the request's id.
        replicas: for each role that changes, the numbers of tasks before and after.
        tasks: every task of the next attempt.
        joins: the tasks that start beside the others, which continue. Without these and `leaves`, the training saves a
            checkpoint, and all tasks start anew.
        leaves: the tasks that end while the others continue.
        because: why a checkpoint is needed, where the roles' tasks could otherwise join and leave.
    """

    request: str
    replicas: Mapping[Role, tuple[int, int]]
    tasks: tuple[TaskId, ...]
    joins: tuple[TaskId, ...] = ()
    leaves: tuple[TaskId, ...] = ()
    because: str = ""

    @property
    def is_live(self) -> bool:
        """Whether the training continues meanwhile."""
        return bool(self.joins or self.leaves)


@dataclass(frozen=True)
class RequestAnswered:
    """A request has been answered without a change of the job.

    Args:
        request: the request's id.
        answer: `refused`; `unchanged` if the numbers are already those requested; `possible` for a dry run.
        replicas: as in `ResizeAccepted`.
        live: for a dry run, whether the training would continue meanwhile.
        reason: why it was refused; for a dry run, why a checkpoint is needed.
        hint: what the user can do about it.
        code: the problem's code.
    """

    request: str
    answer: Literal["refused", "unchanged", "possible"]
    replicas: Mapping[Role, tuple[int, int]] = field(default_factory=dict)
    reason: str = ""
    hint: str = ""
    code: str = ""
    live: bool = False


@dataclass(frozen=True)
class ProfileAccepted:
    """A task is to be profiled.

    Args:
        task: the task.
        order: what it gets.
    """

    task: TaskId
    order: ProfileOrder


@dataclass(frozen=True)
class ProfileRefused:
    """A task cannot be profiled.

    Args:
        request: the request's id.
        task: the task.
        reason: why.
        hint: what the user can do about it.
        code: the problem's code.
    """

    request: str
    task: TaskId
    reason: str
    hint: str
    code: str


@dataclass(frozen=True)
class Tick:
    """Time has passed without another event."""


@dataclass(frozen=True)
class NetworkReady:
    """The tasks' network is set up.

    Args:
        private: whether it is a private network of the run, which other processes cannot reach.
        text: what the user should know about it.
    """

    private: bool
    text: str


Event = (
    Queued
    | Started
    | Output
    | RecordReceived
    | Exited
    | SignalReceived
    | RequestReceived
    | ResizeAccepted
    | RequestAnswered
    | ProfileAccepted
    | ProfileRefused
    | NetworkReady
    | Tick
)


class StopSignal(Enum):
    """The signal that stops a task."""

    TERMINATE = "terminate"
    KILL = "kill"


@dataclass(frozen=True)
class Start:
    """Start the task's process.

    Args:
        task: the task.
        attempt: the attempt of the whole job, from 1.
    """

    task: TaskId
    attempt: int = 1


@dataclass(frozen=True)
class Stop:
    """Signal a task's process and its children, except children in sessions of their own."""

    task: TaskId
    signal: StopSignal


@dataclass(frozen=True)
class Profile:
    """Hand a task the order to profile itself.

    Only the runs of launchers whose trait `profiles_tasks` is set are asked to.
    """

    task: TaskId
    order: ProfileOrder


Action = Start | Stop | Profile


class EventQueue:
    """The queue between the sources of events and the supervisor's loop.

    Signals and exits are never delayed. Output is: a task that writes too much is slowed down to the speed at which its
    lines are shown.
    """

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self._output_slots = asyncio.Semaphore(_QUEUED_OUTPUTS)

    def put(self, event: Queued | Started | Exited | SignalReceived | RequestReceived | NetworkReady) -> None:
        """Adds an event that must not wait."""
        self._events.put_nowait(event)

    async def put_output(self, event: Output | RecordReceived) -> None:
        """Adds a task's output once the queue has a free slot for it."""
        await self._output_slots.acquire()
        self._events.put_nowait(event)

    def fail(self, error: BaseException) -> None:
        """Makes `get` raise an error: a source of events has failed, and the loop must not wait for it."""
        self._events.put_nowait(error)

    async def get(self, timeout: float) -> Event:
        """The next event; a `Tick` if there is none for `timeout` seconds."""
        try:
            event = self._events.get_nowait()
        except asyncio.QueueEmpty:
            try:
                event = await asyncio.wait_for(self._events.get(), timeout)
            except asyncio.TimeoutError:
                return Tick()
        if isinstance(event, BaseException):
            raise event
        if isinstance(event, Output | RecordReceived):
            self._output_slots.release()
        return event
