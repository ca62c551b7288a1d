"""Short messages between tasks of one host, in pipes.

A task opens the pipe of another one by the path of its descriptor, as it opens its memory. A message is one write of a
few bytes, which the kernel does not mix with those of other tasks. What a task has written to its memory before it
sends a message is there when the message is received.
"""

from __future__ import annotations

import errno
import os
import select
import stat
import struct
import weakref
from collections.abc import Sequence
from pathlib import Path

NUMBERS = 8
"""How many numbers a message is."""
_MESSAGE = struct.Struct(f"<{NUMBERS}q")


class Pipe:
    """Receives messages.

    Attributes:
        place: what other tasks need to open it: its descriptor and inode.
    """

    def __init__(self) -> None:
        self._descriptor, self._sending = os.pipe()  # with its own end to send to, it is never at its end
        self.place = self._descriptor, os.fstat(self._descriptor).st_ino
        self._waiting = select.poll()
        self._waiting.register(self._descriptor, select.POLLIN)

    def receive(self, seconds: float) -> Sequence[int] | None:
        """Waits for the next message; returns its numbers, or None if there is none in a time."""
        if not self._waiting.poll(1000 * seconds):
            return None
        return _MESSAGE.unpack(os.read(self._descriptor, _MESSAGE.size))

    def send(self, *numbers: int) -> None:
        """Sends a message to this task itself."""
        _write(self._sending, numbers)

    def close(self) -> None:
        """Closes the pipe."""
        os.close(self._descriptor)
        os.close(self._sending)


class PipeTo:
    """Sends messages to another task.

    Args:
        process: the task's.
        place: of its pipe in that process, `Pipe.place`.

    Raises:
        OSError: there is no such pipe, see `opened_pipe`.
    """

    def __init__(self, process: int, place: tuple[int, int]) -> None:
        self._descriptor = opened_pipe(process, place, os.O_WRONLY)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._state = select.poll()
        self._state.register(self._descriptor, 0)  # errors alone

    def send(self, *numbers: int) -> bool:
        """Sends a message of at most `NUMBERS` numbers; returns whether the task still has its pipe."""
        try:
            _write(self._descriptor, numbers)
        except BrokenPipeError:
            return False
        return True

    @property
    def is_broken(self) -> bool:
        """Whether the task has its pipe no more."""
        return bool(self._state.poll(0))

    def close(self) -> None:
        """Closes it here. It closes itself, too, when nothing uses it any more."""
        self._close()


def opened_pipe(process: int, place: tuple[int, int], flags: int) -> int:
    """Opens the pipe of a task; returns the descriptor of it here. Other files of the task are left alone.

    Args:
        process: the task's.
        place: the descriptor and the inode of the pipe in that process.
        flags: of `os.open`.

    Raises:
        FileNotFoundError: there is no such pipe: the descriptor is closed, or another file's by now.
        OSError: it cannot be opened here.
    """
    descriptor, inode = place
    path = Path(f"/proc/{process}/fd/{descriptor}")
    if str(path.readlink()) != f"pipe:[{inode}]":
        raise FileNotFoundError(errno.ENOENT, f"{path} is no pipe of a task")
    opened = os.open(path, flags | os.O_CLOEXEC)
    found = os.fstat(opened)
    if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:  # it has become another file's meanwhile
        os.close(opened)
        raise FileNotFoundError(errno.ENOENT, f"{path} is no pipe of a task")
    return opened


def _write(descriptor: int, numbers: Sequence[int]) -> None:
    os.write(descriptor, _MESSAGE.pack(*numbers, *[0] * (NUMBERS - len(numbers))))
