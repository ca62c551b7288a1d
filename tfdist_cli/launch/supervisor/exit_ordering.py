"""The ends of tasks, in the order in which one came of another, where they are heard of in any order."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import replace

from tfdist_cli.launch.supervisor.events import EventQueue, Exited
from tfdist_cli.spec.task_id import TaskId

_SIGNALLED = 128
"""Codes from this one on are of a signal: nothing that came of another task's end."""


class ExitOrdering:
    """Tells of the ends of containers, wherever those run.

    The other tasks follow the first one out, the chief or worker 0, and must not pass for having left it alone; and
    when the first fails, that may have come of another's death, which is then to be told before.

    Args:
        events: where they are told.
        first: the task that the others follow.
        head_start: seconds that the first task's end is waited for before another's is told.
        afterthought: seconds that a failure of the first task waits for the word of a death that it came of.
    """

    def __init__(self, events: EventQueue, first: TaskId, head_start: float, afterthought: float) -> None:
        self._events = events
        self._first = first
        self._head_start = head_start
        self._afterthought = afterthought
        self._held: dict[TaskId, Exited] = {}
        self._heard_at: dict[TaskId, float] = {}
        self._killed = asyncio.Event()
        """Whether a signal has ended a task whose end is held."""
        self._over = asyncio.Event()
        """Whether the end of the first task has been told."""

    def starts(self, task: TaskId) -> None:
        """Hears that a task is started, perhaps not for the first time."""
        if task == self._first:
            self._over.clear()

    @property
    def first_is_over(self) -> bool:
        """Whether the first task has ended, and was not started again."""
        return self._over.is_set()

    async def tell(self, end: Exited) -> None:
        """Tells that a task has ended, as soon as it is clear before or after which."""
        self._held[end.task] = end
        self._heard_at[end.task] = time.monotonic()
        if end.task != self._first:
            if end.code >= _SIGNALLED:
                self._killed.set()
            await _wait(self._over, self._head_start)
            self._let_go(end.task)
            return
        if 0 < end.code < _SIGNALLED:
            await _wait(self._killed, self._afterthought)
        self._heard_at = dict.fromkeys(self._held, time.monotonic())  # the order of these ends is now that of telling
        failures = [each for each in self._held.values() if each.code] if end.code else []
        for each in sorted(failures, key=lambda each: (each.code < _SIGNALLED, each is end)):
            self._let_go(each.task)
        self._let_go(end.task)
        self._over.set()

    def _let_go(self, task: TaskId) -> None:
        if task in self._held:
            end = self._held.pop(task)
            self._events.put(replace(end, ago=end.ago + time.monotonic() - self._heard_at[task]))
        if not any(each.code >= _SIGNALLED for each in self._held.values()):
            self._killed.clear()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
