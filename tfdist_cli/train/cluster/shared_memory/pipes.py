"""Short messages between tasks of one host, in pipes.

A task opens the pipe of another one by the path of its descriptor, as it opens its memory. A message is one write of a
few bytes, which the kernel does not mix with those of other tasks. What a task has written to its memory before it
sends a message is there when the message is received.
"""

from __future__ import annotations

import os
import select
import stat
import struct
from collections.abc import Sequence

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
        OSError: there is no such pipe.
    """

    def __init__(self, process: int, place: tuple[int, int]) -> None:
        descriptor, inode = place
        path = f"/proc/{process}/fd/{descriptor}"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        found = os.fstat(self._descriptor)
        if not stat.S_ISFIFO(found.st_mode) or found.st_ino != inode:  # the descriptor is another file's by now
            os.close(self._descriptor)
            raise FileNotFoundError(f"{path} is no pipe of a task")

    def send(self, *numbers: int) -> bool:
        """Sends a message of at most `NUMBERS` numbers; returns whether the task still has its pipe."""
        try:
            _write(self._descriptor, numbers)
        except BrokenPipeError:
            return False
        return True

    def close(self) -> None:
        """Closes it here."""
        os.close(self._descriptor)


def _write(descriptor: int, numbers: Sequence[int]) -> None:
    os.write(descriptor, _MESSAGE.pack(*numbers, *[0] * (NUMBERS - len(numbers))))
