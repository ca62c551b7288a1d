"""What still waits on the cluster for a run that was broken off, and for nothing that will come."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

GRACE_SECONDS = 2.0
"""How long what was broken off is waited for."""
_abandoned: list[tuple[Callable[[], object], threading.Thread]] = []


def end_at_exit(end: Callable[[], object], waiting: threading.Thread) -> None:
    """Has what a thread waits for fail when Python ends, which it cannot while TensorFlow is about to call it back.

    It is not done before, as TensorFlow would take what fails then for a reason to cancel what the workers do.

    Args:
        end: has it fail.
        waiting: the thread.
    """
    _abandoned.append((end, waiting))


@atexit.register
def _end() -> None:
    while _abandoned:
        end, waiting = _abandoned.pop(0)
        end()
        waiting.join(GRACE_SECONDS)
