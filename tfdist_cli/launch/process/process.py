"""A process in its own session, with its process group."""

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
"""Accuracy of the kernel's start times of processes, in seconds."""
_LEFTOVER_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL for the rest of a group whose program exited by itself."""


class _Groups:
    """The processes of each group, cached for a moment, since many tasks may exit at once."""

    _FRESH = 0.1

    def __init__(self) -> None:
        self._updated_at = float("-inf")
        self._members: dict[int, list[int]] = {}

    def members(self, group: int) -> list[int]:
        """The ids of a group's processes, zombies included, up to `_FRESH` seconds ago; an empty list is current."""
        if time.monotonic() - self._updated_at > self._FRESH or not self._members.get(group):
            self._update()
        return self._members.get(group, [])

    def _update(self) -> None:
        self._members = {}
        for pid in psutil.pids():
            with suppress(OSError):  # it has exited since, or belongs to another user on a system that hides it
                self._members.setdefault(os.getpgid(pid), []).append(pid)
        self._updated_at = time.monotonic()


_GROUPS = _Groups()


class Program(Protocol):
    """A started program, in its own session and process group."""

    @property
    def pid(self) -> int:
        """Its process id, which is also its group's."""

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read stdout and stderr from."""

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Makes the running loop call `callback` once the program has exited and can be reaped."""

    def reap(self) -> int:
        """Reaps a program that has exited.

        Returns:
            Its exit code, or -n for signal n.
        """


class Spawned:
    """A program started by fork and exec.

    Args:
        argv: the program and its arguments.
        env: its whole environment.
        files: open files that it inherits.

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
            raise RuntimeError("stdout and stderr are not pipes")
        return self._popen.stdout, self._popen.stderr

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Makes the running loop call `callback` once the program has exited."""
        try:
            watch_exit(self.pid, callback)
        except (AttributeError, OSError):  # not Linux, or one older than 5.3
            self._wait_in_thread(asyncio.get_running_loop(), callback)

    def reap(self) -> int:
        """Waits for its exit."""
        return self._popen.wait()

    def _wait_in_thread(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        def wait() -> None:
            self._popen.wait()
            loop.call_soon_threadsafe(callback)

        threading.Thread(target=wait, daemon=True).start()


def watch_exit(pid: int, callback: Callable[[], None]) -> Callable[[], None]:
    """Makes the running loop call `callback` once a process has exited.

    Returns:
        A function that cancels the call.

    Raises:
        AttributeError: this system has no pidfds.
        OSError: there is no such process, or the system gives no pidfd for it.
    """
    loop = asyncio.get_running_loop()
    handle = os.pidfd_open(pid)

    def cancel() -> None:
        if loop.remove_reader(handle):
            os.close(handle)

    def ended() -> None:
        cancel()
        callback()

    loop.add_reader(handle, ended)
    return cancel


class Process:
    """A program and its process group.

    It has its own session: Ctrl-C in the terminal reaches the launcher only, and a signal to the group reaches the
    program and its children, unless they have created sessions themselves.

    Args:
        program: the program, just started.
    """

    def __init__(self, program: Program) -> None:
        self._started = time.monotonic()
        self._program = program
        self._created = psutil.Process(self.pid).create_time()
        self._stopped_after: float | None = None
        """Seconds from its start to the first stop signal."""
        self._has_exited = False

    @property
    def pid(self) -> int:
        """The program's process id, which is also its group's."""
        return self._program.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The ends to read stdout and stderr from."""
        return self._program.outputs

    def stop(self, stop_signal: StopSignal) -> None:
        """Signals the whole group, if it has processes."""
        if self._stopped_after is None:
            self._stopped_after = time.monotonic() - self._started
        if not self._has_exited:
            self._send(SIGNALS[stop_signal])

    def on_exit(self, callback: Callable[[], None]) -> None:
        """Makes the running loop call `callback` once the program has exited."""
        self._program.on_exit(callback)

    async def wait_for_group(self) -> int:
        """Waits until the whole group has exited, after the program has.

        The rest of the group gets SIGTERM. If it got a stop signal before, together with the program, it has the time
        that the launcher gives them: a shell exits at once, while the training that it started is still saving.

        Returns:
            The exit code, or -n for signal n.
        """
        code = self._program.reap()
        deadline = time.monotonic() + _LEFTOVER_SECONDS if self._stopped_after is None else float("inf")
        signalled: set[int] = set()
        pause = 0.01
        while self._send(0) and (members := self._members()):
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            for member in members:
                if member.pid not in signalled and self._missed_signal(member):
                    signalled.add(member.pid)
                    with suppress(psutil.Error):
                        member.terminate()
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.2)
        self._has_exited = True
        return code

    def _send(self, signum: int) -> bool:
        """Signals the group; returns False if it has no processes."""
        try:
            os.killpg(self.pid, signum)
        except (ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            return False
        return True

    def _members(self) -> list[psutil.Process]:
        """The running processes of the group. Zombies accept signals until they are reaped, but do not count."""
        members = []
        for pid in _GROUPS.members(self.pid):
            with suppress(psutil.Error):  # it has exited since
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    members.append(process)
        return members

    def _missed_signal(self, member: psutil.Process) -> bool:
        """Whether a process got no stop signal: none was sent, or the process started just after it."""
        with suppress(psutil.Error):
            started_after = member.create_time() - self._created
            return self._stopped_after is None or started_after > self._stopped_after - _CLOCK_TICK
        return False
