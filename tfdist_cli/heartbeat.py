"""Signs of life that a task gives its launcher, from a thread of its own, whatever else it does or waits for.

They tell a process that is stopped, or a host that is cut off, from a training that stands still while all its tasks
live. A thread of Python cannot give one while a call into TensorFlow keeps the interpreter to itself, which may be for
minutes where that call waits for another task. The interpreter's own watchdog, which needs no interpreter, then writes
where each thread stands; the launcher takes that for a sign, too.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time

from tfdist_cli.records import ENABLED, HELD_SECONDS, emit

PERIOD = 2.0
"""Seconds from one sign to the next."""
_begun = threading.Event()


def begin() -> None:
    """Gives a sign of life every few seconds from now on, if a launcher listens; the second call does nothing."""
    if os.environ.get(ENABLED) != "1" or _begun.is_set():
        return
    _begun.set()
    threading.Thread(target=_beat, name="heartbeat", daemon=True).start()


def _beat() -> None:
    never = threading.Event()
    while True:
        faulthandler.dump_traceback_later(HELD_SECONDS, repeat=True, file=2)
        try:
            emit("beat", computed=round(time.process_time(), 2))
        except OSError:
            faulthandler.cancel_dump_traceback_later()
            return  # nobody reads what this task writes any more
        never.wait(PERIOD)
