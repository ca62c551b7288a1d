"""Processes that outlive the task that started them, or the launcher.

A task's process group ends with the task, see `process`. A process that has created its own session (`setsid`, a
daemon) is in none of these groups. On Linux the kernel makes such a process a child of the launcher once its parent has
exited; the launcher reaps it, and terminates it in the end. If the launcher itself is killed, a watchdog cleans up.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tfdist_cli.launch.process import watchdog

_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL."""
_ROUNDS = 3
"""How often to search: processes that are being terminated may have started others meanwhile."""


class Watchdog:
    """A process that cleans up when the launcher closes it or is killed; see the script `watchdog`.

    Args:
        arguments: of the script.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(watchdog.__file__)), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )

    def add(self, group: int) -> None:
        """Adds a process group to those that it ends."""
        self._write(f"+{group}\n")

    def remove(self, group: int) -> None:
        """Removes a process group, which has no processes any more."""
        self._write(f"-{group}\n")

    def _write(self, line: str) -> None:
        if self._process.stdin is None:
            return
        try:
            self._process.stdin.write(line.encode())
        except BrokenPipeError:
            # Another process has killed it. The run can continue without it, as long as the launcher lives.
            self._process.stdin = None

    def close(self, timeout: float | None = None) -> None:
        """Makes it clean up, and waits for its exit; after `timeout` seconds it is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@contextmanager
def adopting() -> Iterator[None]:
    """Makes this process the parent of its descendants whose parents exit."""
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


def reap_orphans(own: Collection[int]) -> None:
    """Reaps the exited processes that tasks have left behind.

    Args:
        own: children of this process that other code reaps.
    """
    if not sys.platform.startswith("linux"):
        return  # the system's init process adopts and reaps them
    with suppress(ChildProcessError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # no child has exited, so there is no need to look at each of them
    for child in _adopted(own):
        with suppress(psutil.Error, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(child.pid, os.WNOHANG)


def end_orphans(own: Collection[int]) -> None:
    """Terminates the processes that tasks have left behind, with all of their descendants, after the last task's exit.

    Args:
        own: children of this process that stay, or that other code ends.
    """
    if not sys.platform.startswith("linux"):
        return  # the system's init process has adopted them, and nothing tells them apart from other processes
    for _ in range(_ROUNDS):
        left = []
        for orphan in _adopted(own):
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


def _adopted(own: Collection[int]) -> Iterator[psutil.Process]:
    """The adopted children of this process: those in other sessions that are not in `own`."""
    session = os.getsid(0)
    for child in psutil.Process().children():
        with suppress(ProcessLookupError):
            if child.pid not in own and os.getsid(child.pid) != session:
                yield child
