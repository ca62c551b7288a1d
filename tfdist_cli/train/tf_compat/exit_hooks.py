"""Unblocks queue operations left waiting by an aborted run."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable

GRACE_SECONDS = 2.0
"""Seconds to wait for each thread of an aborted run."""
_waiting_threads: list[tuple[Callable[[], object], threading.Thread]] = []


def end_at_exit(end: Callable[[], object], waiting: threading.Thread) -> None:
    """Registers a thread that waits in TensorFlow to be unblocked when the process exits.

    Python cannot exit while TensorFlow is about to return to such a thread. The operation is not aborted earlier, since
    TensorFlow would then cancel the functions of the workers, too.

    Args:
        end: makes the operation fail that the thread waits for.
        waiting: the thread.
    """
    _waiting_threads.append((end, waiting))


@atexit.register
def _unblock() -> None:
    while _waiting_threads:
        end, waiting = _waiting_threads.pop(0)
        end()
        waiting.join(GRACE_SECONDS)
