"""Signs of life that a task gives its launcher, from a thread of its own, whatever else it does or waits for.

They tell a process that is stopped, or a host that is cut off, from a training that stands still while all its tasks
live.
"""

from __future__ import annotations

import os
import threading
import time

from tfdist_cli.records import ENABLED, emit

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
        try:
            emit("beat", computed=round(time.process_time(), 2))
        except OSError:
            return  # nobody reads what this task writes any more
        never.wait(PERIOD)
