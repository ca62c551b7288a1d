"""Processes that outlive the tasks that started them: this process adopts, reaps and in the end terminates them.

A task's own process group ends with it, see `process`. What has made a session of its own (`setsid`, a daemon) is in
none of these groups. On Linux the kernel gives such a process to the launcher once its parent has ended.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL."""
_ROUNDS = 3
"""How often it is looked for processes that those which end have started meanwhile."""


@contextmanager
def adopting() -> Iterator[None]:
    """Has the kernel give this process the processes below it whose parents end."""
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def reap_orphans(ours: Collection[int]) -> None:
    """Reaps the processes that tasks have left behind, and that have ended since.

    Args:
        ours: processes of this one that somebody else here reaps.
    """
    if not sys.platform.startswith("linux"):
        return  # they are the system's
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # nobody waits to be reaped: no need to look at every process
    for child in _adopted(ours):
        with suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def end_orphans(ours: Collection[int]) -> None:
    """Terminates what tasks have left behind, with all that these processes have started, when no task is left.

    Args:
        ours: processes of this one that stay, or that somebody else here ends.
    """
    if not sys.platform.startswith("linux"):
        return  # they are the system's, and nothing tells them from others
    for _ in range(_ROUNDS):
        left = []
        for orphan in _adopted(ours):
            with suppress(psutil.Error):
                left += [*orphan.children(recursive=True), orphan]
        if not left:
            return
        for process in left:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(left, _GRACE)[1]:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, _GRACE)


def _adopted(ours: Collection[int]) -> Iterator[psutil.Process]:
    """The children of this process that tasks have left to it: all but its own, which are in its session or known."""
    session = os.getsid(0)
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            if child.pid not in ours and os.getsid(child.pid) != session:
                yield child
