"""Lets a process exit although threads of TensorFlow still run in it."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from tfdist_cli.protocol import task_events

GRACE_SECONDS = 2.0
"""Seconds to wait for each thread of an aborted run, and for all threads of coordinators together."""
_waiting_threads: list[tuple[Callable[[], object], threading.Thread]] = []
_coordinators: list[Callable[[], Iterable[threading.Thread]]] = []
_exit_code: int | None = None
_error_code: int | None = None
"""The exit code that an uncaught error has."""


def exit_without_destructors(code: int) -> None:
    """Lets the process exit with a code as soon as the functions have run that Python calls at the exit.

    A server of TensorFlow cannot be stopped. Its threads would still answer other tasks while the destructors of its
    library run, and may then wait for each other forever.
    """
    global _exit_code  # noqa: PLW0603 a process exits once
    _exit_code = code


def exit_code_of(kind: type[BaseException], code: int, text: Callable[[Any], str]) -> None:
    """Chooses the exit code of the process for an error that the program does not catch: Python's is 1 for all errors.

    Args:
        kind: the class of the error.
        code: the exit code.
        text: returns what is printed in place of the traceback.
    """
    shown = sys.excepthook

    def show(raised: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        global _error_code  # noqa: PLW0603 a process exits once
        if isinstance(error, kind):
            sys.stderr.write(text(error))
            _error_code = code
        else:
            shown(raised, error, frames)

    sys.excepthook = show


def hint_at_errors(hint_of: Callable[[BaseException], str | None]) -> None:
    """Adds a hint to an error of TensorFlow that the program does not catch. Python prints it since version 3.11.

    Args:
        hint_of: returns the hint; None if there is none.
    """
    shown = sys.excepthook

    def show(raised: type[BaseException], error: BaseException, frames: TracebackType | None) -> None:
        hint = hint_of(error)
        if hint and sys.version_info >= (3, 11):
            error.add_note(f"hint: {hint}")
        shown(raised, error, frames)

    sys.excepthook = show


@atexit.register
def _exit() -> None:
    """Runs after functions that were registered later; those of the program are, unless it imports tfdist last."""
    code = _error_code if _error_code is not None else _exit_code
    if code is not None and (_error_code is not None or getattr(sys, "last_value", None) is None):
        task_events.exited(code)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def end_at_exit(end: Callable[[], object], waiting: threading.Thread) -> None:
    """Registers a thread that waits in TensorFlow to be unblocked when the process exits.

    Python cannot exit while TensorFlow is about to return to such a thread. The operation is not aborted earlier, since
    TensorFlow would then cancel the functions of the workers, too.

    Args:
        end: makes the operation fail that the thread waits for.
        waiting: the thread.
    """
    _waiting_threads.append((end, waiting))


def stop_at_exit(stop: Callable[[], Iterable[threading.Thread]]) -> None:
    """Registers threads that call functions of other tasks. They end when the process exits, after `end_at_exit`'s.

    Args:
        stop: tells them to return once what they call is done; returns them.
    """
    _coordinators.append(stop)


@atexit.register
def end_threads() -> None:
    """Ends the threads of `end_at_exit` and `stop_at_exit` now. Each is given some time, and then stopped."""
    while _waiting_threads:
        end, waiting = _waiting_threads.pop(0)
        end()
        _end([waiting])
    _end([thread for stop in _coordinators for thread in stop()])
    _coordinators.clear()


def _end(threads: Sequence[threading.Thread]) -> None:
    """Waits for threads, and has those that run Python code for longer raise `SystemExit`, which ends them silently.

    Such a thread traces a large model. Python would abort the process if it exited meanwhile. A thread that waits in
    TensorFlow stays.
    """
    for stops in (False, True):
        deadline = time.monotonic() + GRACE_SECONDS
        running = [thread for thread in threads if thread.is_alive()]
        for thread in running if stops else ():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))
