"""The background tasks of a run: the lifetime of each task, and everything else that takes time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from tfdist_cli.launch.supervisor.events import EventQueue

_CANCEL_SECONDS = 10.0
"""Seconds for cancelled coroutines to clean up."""


class BackgroundTasks:
    """Coroutines that run beside the run's loop.

    Args:
        events: the loop's queue; an error in a coroutine ends the loop.
    """

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def finish(self, seconds: float) -> None:
        """Waits until all coroutines are done, and cancels those that are not.

        Args:
            seconds: how long to wait.
        """
        tasks = set(self._tasks)
        pending = (await asyncio.wait(tasks, timeout=seconds))[1] if tasks else set()
        for task in pending:
            task.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_CANCEL_SECONDS)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error:
            self._events.fail(error)
