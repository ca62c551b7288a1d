"""One process in a session of its own, with everything it starts."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Protocol

import psutil

from tfdist_cli.launch.supervisor.events import StopSignal

SIGNALS = {StopSignal.TERMINATE: signal.SIGTERM, StopSignal.KILL: signal.SIGKILL}
_CLOCK_TICK = 0.05
"""Seconds by which the kernel's times of two processes may be off."""
_LEFTOVER_SECONDS = 2.0
"""How long what a process leaves behind has after SIGTERM, when the process ended by itself."""


class _Groups:
    """The processes of each group, looked up once for all the tasks that ask within a moment: many may end at once."""

    _FRESH = 0.1

    def __init__(self) -> None:
        self._seen_at = float("-inf")
        self._members: dict[int, list[int]] = {}

    def members(self, group: int) -> list[int]:
        """The ids of a group's processes, zombies included, a moment ago; none only if there are none now."""
        if time.monotonic() - self._seen_at > self._FRESH or not self._members.get(group):
            self._look()
        return self._members.get(group, [])

    def _look(self) -> None:
        self._members = {}
        for pid in psutil.pids():
            with suppress(OSError):  # it is gone by now, or another user's on a system that hides those
                self._members.setdefault(os.getpgid(pid), []).append(pid)
        self._seen_at = time.monotonic()


_GROUPS = _Groups()


class Program(Protocol):
    """A started program, in a session and a process group of its own."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read stdout and stderr from."""

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Has the running loop call `callback` once the program has ended; it can be reaped then."""

    def reap(self) -> int:
        """Lets go of a program that has ended.

        Returns:
            Its exit code, or -n for signal n.
        """


class Spawned:
    """A program with an interpreter, or whatever runs it, of its own.

    Args:
        argv: the program and its arguments.
        env: its whole environment.
        files: open files that it keeps.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], files: Sequence[int] = ()) -> None:
        self._popen = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            pass_fds=files,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""
        return self._popen.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read stdout and stderr from."""
        if self._popen.stdout is None or self._popen.stderr is None:
            raise RuntimeError("both were asked for as pipes")
        return self._popen.stdout, self._popen.stderr

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Has the running loop call `callback` once the program has ended."""
        try:
            watch_exit(self.pid, callback)
        except (AttributeError, OSError):  # not Linux, or one older than 5.3
            self._wait_in_thread(asyncio.get_running_loop(), callback)

    def reap(self) -> int:
        """Waits for its end."""
        return self._popen.wait()

    def _wait_in_thread(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        def wait() -> None:
            self._popen.wait()
            loop.call_soon_threadsafe(callback)

        threading.Thread(target=wait, daemon=True).start()


def watch_exit(pid: int, callback: Callable[[], None]) -> Callable[[], None]:
    """Has the running loop call `callback` once a process has ended.

    Returns:
        Ends the watch, if it is not over.

    Raises:
        AttributeError: this system has no handles on processes.
        OSError: there is no such process, or the system gives no handle on it.
    """
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(pid)

    def leave() -> None:
        if loop.remove_reader(handle):
            os.close(handle)

    def ended() -> None:
        leave()
        callback()

    loop.add_reader(handle, ended)
    return leave


class Process:
    """A program and its process group.

    It is in a session of its own: Ctrl-C in the terminal reaches the launcher only, and one signal reaches the program
    with all its children, unless they have made sessions of their own.

    Args:
        program: just started.
    """

    def __init__(self, program: Program) -> None:
        self._begun = time.monotonic()
        self._program = program
        self._created = psutil.Process(self.pid).create_time()
        self._told_after: float | None = None
        """Seconds from its beginning to when it was first told to end."""
        self._gone = False

    @property
    def pid(self) -> int:
        """The program's process id, which is also its group's."""
        return self._program.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read stdout and stderr from."""
        return self._program.outputs

    def end(self, how: StopSignal) -> None:
        """Signals the whole group, if any of it is left."""
        if self._told_after is None:
            self._told_after = time.monotonic() - self._begun
        if not self._gone:
            self._send(SIGNALS[how])

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Has the running loop call `callback` once the program has ended; it can be left then."""
        self._program.on_exit(callback)

    async def leave(self) -> int:
        """Waits until the group is gone too, once the program has ended.

        What the program leaves behind is told to end. If it was told before, with the program, it has the time that the
        launcher gave them: a shell ends at once where the training it started is still saving.

        Returns:
            The exit code, or -n for signal n.
        """
        code = self._program.reap()
        deadline = time.monotonic() + _LEFTOVER_SECONDS if self._told_after is None else float("inf")
        told: set[int] = set()
        pause = 0.01
        while self._send(0) and (members := self._members()):
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            for member in members:
                if member.pid not in told and self._is_untold(member):
                    told.add(member.pid)
                    with suppress(psutil.Error):
                        member.terminate()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
        self._gone = True
        return code

    def _send(self, signum: int) -> bool:
        """Signals the group; False when it has no processes left."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
            return False
        return True

    def _members(self) -> list[psutil.Process]:
        """The processes of the group that run: zombies answer to signals for as long as nobody reaps them."""
        members = []
        for pid in _GROUPS.members(self.pid):
            with suppress(psutil.Error):  # it is gone by now
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def _is_untold(self, member: psutil.Process) -> bool:
        """Whether a process missed the signal to the group: there was none, or it was started just after it."""
        with suppress(psutil.Error):
            age_then = member.create_time() - self._created
            return self._told_after is None or age_then > self._told_after - _CLOCK_TICK
        return False
