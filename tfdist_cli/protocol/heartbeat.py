"""Heartbeats that a task sends to its launcher from a separate thread, and what it uses of its machine.

They distinguish a stopped process or an unreachable host from a training that stalls while all its tasks run. A Python
thread cannot send one while a call into TensorFlow holds the interpreter lock, which may take minutes if that call
waits for another task. A small process beside the task sends it then, see `liveness_probe`. Nothing here reads the
stacks of other threads: that needs the interpreter lock, and without it crashes the process if the threads run
meanwhile, as they do after a pause of all processes.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from tfdist_cli.protocol import liveness_probe
from tfdist_cli.protocol.records import ENABLED, emit
from tfdist_cli.protocol.usage import UsageMeter

PERIOD = 2.0
"""Seconds between two heartbeats."""
PROBE_PERIOD = 1.0
"""Seconds between two checks by the process beside the task."""
log = logging.getLogger("tfdist")
_started = threading.Event()


def start(each_time: Callable[[], None] = lambda: None) -> None:
    """Sends heartbeats from now on, if a launcher reads them. The second call does nothing.

    Args:
        each_time: called with each heartbeat, in its thread; must neither wait nor fail.
    """
    if os.environ.get(ENABLED) != "1" or _started.is_set():
        return
    _started.set()
    threading.Thread(target=_beat, args=(_start_probe(), each_time), name="heartbeat", daemon=True).start()


def _start_probe() -> int | None:
    """Starts the process beside the task.

    Returns:
        The pipe to it, which never blocks; None if no process can be started.
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
        probe.returncode = 0  # it exits just after this process, so nothing must wait for it or warn about it
    except OSError as error:
        log.warning(
            "the liveness probe cannot be started (%s): while a call holds the interpreter lock, the task sends no "
            "heartbeats",
            error.strerror,
        )
        os.close(writing)
        return None
    finally:
        os.close(reading)
    return writing


def _beat(probe: int | None, each_time: Callable[[], None]) -> None:
    never = threading.Event()
    meter = UsageMeter()
    while True:
        try:
            usage = meter.measure()
            emit("beat", computed=round(time.process_time(), 2), **({"usage": usage} if usage else {}))
        except OSError:
            if probe is not None:
                os.close(probe)
            return  # the launcher does not read this task's output any more
        if probe is not None:
            with suppress(BlockingIOError, BrokenPipeError):  # it is stopped, or has been killed
                os.write(probe, b".")
        each_time()
        never.wait(PERIOD)
