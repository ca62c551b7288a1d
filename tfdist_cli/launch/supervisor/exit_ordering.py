"""Reports the exits of remote tasks in causal order, although their notifications arrive in any order."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from tfdist_cli.launch.supervisor.events import EventQueue, Exited
from tfdist_cli.spec.task_id import TaskId

_SIGNALLED = 128
"""Exit codes from this one on come from a signal. Such an exit is never the consequence of another task's exit."""


class ExitOrdering:
    """Reports the exits of containers and pods, wherever they run.

    When the first task (the chief, or worker 0) exits, the other tasks follow. Their exits must not be reported before
    the first task's exit, or they would count as failures. When the first task itself fails, the cause may be that
    another task was killed. That exit is then reported first.

    Args:
        events: the queue to which exits are reported.
        first: the task that the others follow.
        first_exit_timeout: seconds to wait for the first task's exit before another task's exit is reported.
        cause_timeout: seconds for which a failure of the first task waits for the exit that caused it.
    """

    def __init__(self, events: EventQueue, first: TaskId, first_exit_timeout: float, cause_timeout: float) -> None:
        self._events = events
        self._first = first
        self._first_exit_timeout = first_exit_timeout
        self._cause_timeout = cause_timeout
        self._pending: dict[TaskId, Exited] = {}
        self._received_at: dict[TaskId, float] = {}
        self._killed = asyncio.Event()
        """Set while the pending exits include one that was caused by a signal."""
        self._first_reported = asyncio.Event()
        """Set once the exit of the first task has been reported."""

    def task_started(self, task: TaskId) -> None:
        """Notes that a task starts, which may be a restart."""
        if task == self._first:
            self._first_reported.clear()

    @property
    def first_exited(self) -> bool:
        """Whether the first task has exited and was not started again."""
        return self._first_reported.is_set()

    async def report(self, exited: Exited) -> None:
        """Reports a task's exit once its place in the order is known."""
        self._pending[exited.task] = exited
        self._received_at[exited.task] = time.monotonic()
        if exited.task != self._first:
            if exited.code >= _SIGNALLED:
                self._killed.set()
            await _wait(self._first_reported, self._first_exit_timeout)
            self._release(exited.task)
            return
        if 0 < exited.code < _SIGNALLED:
            await _wait(self._killed, self._cause_timeout)
        # The supervisor orders exits by time, so the pending ones get the time at which they are reported.
        now = time.monotonic()
        self._received_at = dict.fromkeys(self._pending, now)
        failures = [each for each in self._pending.values() if each.code] if exited.code else []
        for each in sorted(failures, key=lambda each: (each.code < _SIGNALLED, each is exited)):
            self._release(each.task, now)
        self._release(exited.task, now)
        self._first_reported.set()

    def _release(self, task: TaskId, now: float | None = None) -> None:
        """Reports a task's exit.

        Args:
            task: the task.
            now: the time of its report; given where several are reported together, since each later one would seem to
                have exited earlier otherwise.
        """
        now = time.monotonic() if now is None else now
        if task in self._pending:
            exited = self._pending.pop(task)
            self._events.put(replace(exited, ago=exited.ago + now - self._received_at[task]))
        if not any(each.code >= _SIGNALLED for each in self._pending.values()):
            self._killed.clear()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
