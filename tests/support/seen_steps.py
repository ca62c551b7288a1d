"""Sees from outside where a worker is in a step of workers that update parameters in the memory of a ps."""

import os
import signal
import time
from pathlib import Path

import psutil

from tfdist_cli.train.cluster.shared_memory.lockstep import memory as lockstep
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED, _opened

_RUN = 1 << 40
_LEAST_BYTES = 1 << 22
"""Other memory of a ps is smaller."""


class SeenSteps:
    """The memory of a ps.

    Args:
        process: the ps.
    """

    def __init__(self, process):
        self._memory = next(
            found for found in map(_steps_of, Path(f"/proc/{process}/fd").iterdir()) if found is not None
        )

    @classmethod
    def exists(cls, process):
        """Whether a ps has such memory, and a run has begun."""
        return any(_steps_of(each) is not None for each in Path(f"/proc/{process}/fd").iterdir())

    def steps(self, worker):
        """How many steps of this run a worker has committed, begun to update, and updated."""
        begin = (2 + worker) * ALIGNED
        words = self._memory[begin : begin + ALIGNED].view("int64")
        return [int(words[each]) % _RUN for each in (lockstep.COMMITTED, lockstep.UPDATING, lockstep.UPDATED)]

    def stop_within_update(self, worker, process, seconds=60):
        """Stops a worker's process while it updates its part of the parameters."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            _, updating, updated = self.steps(worker)
            if updating > updated:
                os.kill(process, signal.SIGSTOP)
                while psutil.Process(process).status() != psutil.STATUS_STOPPED:
                    assert time.monotonic() < deadline
                _, updating, updated = self.steps(worker)
                if updating > updated:
                    return
                os.kill(process, signal.SIGCONT)  # its update has ended
        raise AssertionError("the worker was not seen within an update")


def _steps_of(path):
    if not (str(path.readlink()).startswith("/memfd:tfdist") and path.stat().st_size >= _LEAST_BYTES):
        return None
    found = _opened(int(path.parts[2]), int(path.name))
    words = found[ALIGNED : 2 * ALIGNED].view("int64")
    first, allowed = (int(words[each]) for each in (lockstep.FIRST, lockstep.ALLOWED))
    return found if 0 < first // _RUN < 1000 and first <= allowed < first + _RUN else None
