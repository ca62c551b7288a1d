"""Sees from outside which worker updates the parameters in the memory of a ps, and stops it there."""

import os
import signal
import stat
import time
from pathlib import Path

import psutil

from tfdist_cli.train.cluster.shared_memory import locks, memory, parameters


class SeenParameters:
    """The memory of a ps.

    Args:
        process: the ps.
    """

    def __init__(self, process):
        self._memory = next(found for found in map(_opened, Path(f"/proc/{process}/fd").iterdir()) if found is not None)

    @property
    def holder(self):
        """The process that holds the lock, or 0."""
        return int(_lock_of(self._memory)[locks._HOLDER])

    @property
    def updates(self):
        """How many updates there were, with one that is being made; also when the ps has ended."""
        return int(self._memory[parameters._NUMBERS].view("int64")[parameters._COUNT])

    @classmethod
    def exists(cls, process):
        """Whether a ps has such memory."""
        return any(_opened(each) is not None for each in Path(f"/proc/{process}/fd").iterdir())

    def stop_holder(self, seconds=60):
        """Stops the process that holds the lock; returns it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            holder = self.holder
            if holder:
                os.kill(holder, signal.SIGSTOP)
                while psutil.Process(holder).status() != psutil.STATUS_STOPPED:
                    assert time.monotonic() < deadline
                if self.holder == holder:
                    return holder
                os.kill(holder, signal.SIGCONT)  # its update has ended
        raise AssertionError("no worker was seen within an update")


def _opened(path):
    if not (str(path.readlink()).startswith("/memfd:tfdist") and path.stat().st_size >= parameters._HEADER):
        return None
    found = memory._opened(int(path.parts[2]), int(path.name))
    descriptor, inode = _lock_of(found)[[locks._DESCRIPTOR, locks._INODE]].tolist()
    pipe = path.with_name(str(descriptor))
    is_lock = pipe.exists() and stat.S_ISFIFO(pipe.stat().st_mode) and pipe.stat().st_ino == inode
    return found if is_lock else None


def _lock_of(memory):
    return memory[parameters._LOCK].view("int64")
