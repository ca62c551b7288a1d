"""The time slices that Linux gives to the threads of a task.

A thread that wakes up waits until the one that runs on its core has used its slice of 1 to 3 ms, unless its own slice
is shorter. A chief and its ps answer requests for which workers wait, and take little of a core.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import struct
from pathlib import Path

SHORT_NANOSECONDS = 100_000
"""The shortest slice that Linux gives."""
_ATTRIBUTES = struct.Struct("<IIQiIQQQ")
"""`struct sched_attr` of Linux 3.14: its size, policy, flags, nice value, priority, runtime, deadline and period. The
runtime of a thread of the normal policy is its slice, from Linux 6.12 on; before, it has no effect. See
sched_setattr(2)."""
_RUNTIME = 5
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""The numbers of sched_setattr and sched_getattr: glibc has functions for them only from 2.41 on."""
_NORMAL_POLICIES = (0, 3)
"""`SCHED_OTHER` and `SCHED_BATCH`."""
log = logging.getLogger("tfdist")


def shorten() -> None:
    """Gives all threads of this process short slices, and those that they start later; other settings stay."""
    if platform.system() != "Linux" or platform.machine() not in _SYSTEM_CALLS:
        return
    try:
        for thread in Path("/proc/self/task").iterdir():
            _set_slice(int(thread.name), SHORT_NANOSECONDS)
    except OSError as error:  # a container may not allow it
        log.debug("the time slices of this task stay as they are: %s", error)


def slice_of(thread: int) -> int:
    """Returns the slice of a thread of this machine, in nanoseconds; 0 if it has none, or Linux does not tell."""
    return int(_attributes(thread)[_RUNTIME])


def _set_slice(thread: int, nanoseconds: int) -> None:
    values = _attributes(thread)
    if values[1] in _NORMAL_POLICIES:
        values[0], values[_RUNTIME] = _ATTRIBUTES.size, nanoseconds
        _call(0, thread, ctypes.create_string_buffer(_ATTRIBUTES.pack(*values)), 0)


def _attributes(thread: int) -> list[int]:
    buffer = ctypes.create_string_buffer(_ATTRIBUTES.size)
    _call(1, thread, buffer, _ATTRIBUTES.size, 0)
    return list(_ATTRIBUTES.unpack(buffer.raw[: _ATTRIBUTES.size]))


def _call(which: int, *args: object) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if library.syscall(_SYSTEM_CALLS[platform.machine()][which], *args):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
