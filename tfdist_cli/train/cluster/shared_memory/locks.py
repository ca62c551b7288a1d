"""Locks of several processes of one host: a token in a pipe.

A process that takes the token holds the lock, and puts the token back. The task that has made the lock looks now and
then whether the holder has ended, or is stopped: then it puts in a new token with the next number. A process that has
the old one, and goes on, puts in a token that nobody takes. So no process waits long for one that does nothing, and two
tokens are never in use, but a process that was stopped may believe for a moment that it holds the lock.
"""

from __future__ import annotations

import os
import select
import struct
import threading
import time
import weakref

import numpy as np

from tfdist_cli.train.cluster.shared_memory.memory import gone_if_ended, has_ended, is_stopped
from tfdist_cli.train.cluster.shared_memory.pipes import opened_pipe

NUMBERS = 5
"""How many numbers a lock has, int64, in memory that all processes share."""
_DESCRIPTOR, _INODE, _VALID, _HOLDER, _TURN = range(NUMBERS)
"""The place of the pipe, the number of the token that is in use, the process that holds the lock, or 0, and how often
the lock was acquired."""
_TOKEN = struct.Struct("<q")
_IDLE_SECONDS = 1.0
"""How long a process may be stopped while it holds the lock, or may take to say that it has taken the token."""


class Lock:
    """A lock of this task.

    Args:
        numbers: where its numbers are.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = numbers
        self._descriptor, self._other_end = os.pipe()
        self._tokens = select.poll()
        self._tokens.register(self._descriptor, select.POLLIN)
        numbers[:] = self._descriptor, os.fstat(self._descriptor).st_ino, 0, 0, 0
        self._seen: tuple[int, int, bool] | None = None
        """The holder, the turn, and whether nothing happened, at the last look."""
        self._since = 0.0
        """When this was seen first."""
        self._looking = threading.Lock()
        self._put_token()

    def look(self) -> None:
        """Takes the lock away from a process that has ended, or does nothing for some time. Any thread may call it."""
        with self._looking:
            holder, turn = self._state()
            # Without a holder: a process may have ended after it took the token, before it said so.
            idle = is_stopped(holder) if holder else not self._tokens.poll(0)
            now = time.monotonic()
            if self._seen != (holder, turn, idle):
                self._seen, self._since = (holder, turn, idle), now
            ended = holder != 0 and has_ended(holder)
            if (ended or (idle and now - self._since >= _IDLE_SECONDS)) and self._state() == (holder, turn):
                self._put_token()

    def close(self) -> None:
        """Closes it: nobody can open it any more."""
        os.close(self._descriptor)
        os.close(self._other_end)

    def _state(self) -> tuple[int, int]:
        return int(self._numbers[_HOLDER]), int(self._numbers[_TURN])

    def _put_token(self) -> None:
        self._numbers[_VALID] += 1
        self._numbers[_HOLDER] = 0
        self._seen = None
        os.write(self._other_end, _TOKEN.pack(self._numbers[_VALID]))


class OthersLock:
    """A lock of another task, or of this one. It is acquired by one thread at a time.

    Args:
        process: the task's.
        numbers: where its numbers are.

    Raises:
        FileNotFoundError: the task has ended, or has closed it.
        OSError: it cannot be opened here.
    """

    def __init__(self, process: int, numbers: np.ndarray) -> None:
        self._numbers = numbers
        place = int(numbers[_DESCRIPTOR]), int(numbers[_INODE])
        with gone_if_ended(process):
            self._descriptor = opened_pipe(process, place, os.O_RDWR | os.O_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._waiting = select.poll()
        self._waiting.register(self._descriptor, select.POLLIN)
        self._process, self._token = os.getpid(), 0

    def acquire(self, seconds: float) -> bool:
        """Waits until this process holds the lock; returns whether it does after a time."""
        while True:
            try:
                (self._token,) = _TOKEN.unpack(os.read(self._descriptor, _TOKEN.size))
            except BlockingIOError:
                if not self._waiting.poll(1000 * seconds):
                    return False
            else:
                if self._token == self._numbers[_VALID]:
                    break
        self._numbers[_TURN] += 1
        self._numbers[_HOLDER] = self._process
        return True

    def release(self) -> None:
        """Lets others acquire it; nothing if it was taken away."""
        if self._numbers[_HOLDER] == self._process:
            self._numbers[_HOLDER] = 0
        if self._numbers[_VALID] == self._token:
            os.write(self._descriptor, _TOKEN.pack(self._token))

    def close(self) -> None:
        """Closes it here. It closes itself, too, when nothing uses it any more."""
        self._close()
