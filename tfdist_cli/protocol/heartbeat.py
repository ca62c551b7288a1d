"""Signs of life that a task gives its launcher, from a thread of its own, whatever else it does or waits for.

They tell a process that is stopped, or a host that is cut off, from a training that stands still while all its tasks
live. A thread of Python cannot give one while a call into TensorFlow keeps the interpreter to itself, which may be for
minutes where that call waits for another task. A small process beside the task gives it then, see `liveness_probe`.
Nothing here reads the stacks of other threads: that takes the interpreter, and without it crashes the process when the
threads run on meanwhile, as they do after a pause of all processes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress

from tfdist_cli.protocol import liveness_probe
from tfdist_cli.protocol.records import ENABLED, emit

PERIOD = 2.0
"""Seconds from one sign to the next."""
PROBE_PERIOD = 1.0
"""Seconds from one look of the process beside the task to the next."""
log = logging.getLogger("tfdist")
_started = threading.Event()


def start() -> None:
    """Gives a sign of life every few seconds from now on, if a launcher listens; the second call does nothing."""
    if os.environ.get(ENABLED) != "1" or _started.is_set():
        return
    _started.set()
    threading.Thread(target=_beat, args=(_start_probe(),), name="heartbeat", daemon=True).start()


def _start_probe() -> int | None:
    """Starts the process beside the task.

    Returns:
        The pipe to it, which never blocks; None when there can be no further process.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        probe = subprocess.Popen(
            [sys.executable, "-I", "-S", liveness_probe.__file__, str(os.getpid()), str(PROBE_PERIOD)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            cwd="/",
        )
        probe.returncode = 0  # it outlives this process by a moment: there is nothing to wait for, and to warn of
    except OSError as error:
        log.warning(
            "no process can be started beside this task (%s): while a call holds the interpreter, the task gives no "
            "sign of life",
            error.strerror,
        )
        os.close(writing)
        return None
    finally:
        os.close(reading)
    return writing


def _beat(probe: int | None) -> None:
    never = threading.Event()
    while True:
        try:
            emit("beat", computed=round(time.process_time(), 2))
        except OSError:
            if probe is not None:
                os.close(probe)
            return  # nobody reads what this task writes any more
        if probe is not None:
            with suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or somebody has killed it
                os.write(probe, b".")
        never.wait(PERIOD)
