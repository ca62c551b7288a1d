"""Lets a process exit although threads of TensorFlow still run in it."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable

from tfdist_cli.protocol import task_events

GRACE_SECONDS = 2.0
"""Seconds to wait for each thread of an aborted run."""
_waiting_threads: list[tuple[Callable[[], object], threading.Thread]] = []
_exit_code: int | None = None


def exit_without_destructors(code: int) -> None:
    """Lets the process exit with a code as soon as the functions have run that Python calls at the exit.

    A server of TensorFlow cannot be stopped. Its threads would still answer other tasks while the destructors of its
    library run, and may then wait for each other forever.
    """
    global _exit_code  # noqa: PLW0603 a process exits once
    _exit_code = code


@atexit.register
def _exit() -> None:
    """Runs after functions that were registered later; those of the program are, unless it imports tfdist last."""
    if _exit_code is not None and getattr(sys, "last_value", None) is None:
        task_events.exited(_exit_code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_exit_code)


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
