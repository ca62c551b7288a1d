"""What a run does in the background: the life of each task, and what else takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from tfdist_cli.launch.supervisor.events import EventQueue

_LAST_SECONDS = 10.0
"""How long what is given up has to clean up behind itself."""


class BackgroundTasks:
    """Coroutines that go on beside the run's loop.

    Args:
        events: the queue of the loop, which an error of ours in one of them ends.
    """

    def __init__(self, events: EventQueue) -> None:
        self._events = events
        self._kept: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Lets work go on in the background."""
        kept = asyncio.get_running_loop().create_task(work)
        self._kept.add(kept)
        kept.add_done_callback(self._over)
        return kept

    async def finish(self, seconds: float) -> None:
        """Waits until all of it is done, and gives up what then is not.

        Args:
            seconds: how long.
        """
        works = set(self._kept)
        pending = (await asyncio.wait(works, timeout=seconds))[1] if works else set()
        for work in pending:
            work.cancel()
        if pending:
            await asyncio.wait(pending, timeout=_LAST_SECONDS)

    def _over(self, kept: asyncio.Task[None]) -> None:
        self._kept.discard(kept)
        error = None if kept.cancelled() else kept.exception()
        if error:
            self._events.fail(error)
