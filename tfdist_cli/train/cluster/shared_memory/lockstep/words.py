"""Words: numbers in shared memory for which other processes wait, by futex(2).

A process stores a larger number and wakes those that wait for it. Nobody needs a descriptor, and nothing is lost with a
process that is killed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import threading
from functools import cache
from typing import Any, cast

import numpy as np

_SYSTEM_CALLS = {"x86_64": 202, "aarch64": 98}
"""The number of futex(2), by the machine."""
_WAIT, _WAKE = 0, 1
_ALL = (1 << 31) - 1
_AGAIN = errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT
"""The word has changed, a signal has arrived, or the time is over."""
_fence = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def supported() -> bool:
    """Whether processes of this system can wait for words."""
    return sys.platform == "linux" and sys.byteorder == "little" and platform.machine() in _SYSTEM_CALLS


def fence() -> None:
    """Lets other processes see what was written before this call before they see what is written after it."""
    for _ in range(2):  # to acquire a lock is a barrier for what follows, to release it one for what was before
        with _fence:
            pass


class Words:
    """Some words.

    Args:
        numbers: where they are, int64.
    """

    def __init__(self, numbers: np.ndarray) -> None:
        self._numbers = memoryview(cast("Any", numbers))
        self._addresses = [int(numbers.ctypes.data) + 8 * index for index in range(len(numbers))]
        """Of the low halves: a futex has 32 bits."""

    def __getitem__(self, index: int) -> int:
        found: int = self._numbers[index]
        return found

    def store(self, index: int, value: int) -> None:
        """Stores a number, after all that was written before, and wakes those that wait for it."""
        fence()
        self._numbers[index] = value
        self.wake(index)

    def wake(self, index: int) -> None:
        """Wakes those that wait for a word: they look again at what they wait for."""
        _futex(self._addresses[index], _WAKE, _ALL)

    def sleep(self, index: int, seen: int, seconds: float) -> None:
        """Waits until a word is not a number any more, or is woken, for some time at most.

        Args:
            index: which word.
            seen: the number.
            seconds: how long.
        """
        until = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        _futex(self._addresses[index], _WAIT, seen & 0xFFFFFFFF, ctypes.byref(until))


def _futex(address: int, operation: int, value: int, until: Any = None) -> None:
    system_call, number = _system_call()
    if system_call(number, address, operation, value, until, None, 0) < 0:
        error = ctypes.get_errno()
        if error not in _AGAIN:
            raise OSError(error, f"futex: {os.strerror(error)}")


@cache
def _system_call() -> tuple[Any, int]:
    function: Any = ctypes.CDLL(None, use_errno=True).syscall
    function.argtypes = [
        *(ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32),
        *(ctypes.POINTER(_Timespec), ctypes.c_void_p, ctypes.c_uint32),
    ]
    function.restype = ctypes.c_long
    return function, _SYSTEM_CALLS[platform.machine()]
