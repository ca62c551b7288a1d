"""The process of one tracker: reads the files of the run while it goes on, and passes new values on.

It is a process of its own so that no tracker can stop or slow a training: one that fails is tried again from where it
stopped, and one that hangs is killed after the job.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from tfdist_cli.tracking.feed import Feed
from tfdist_cli.tracking.tracker import make_tracker

_PERIOD, _PAUSE = 1.0, 15.0
"""Seconds between two looks at the files, and after a failure."""
_NICENESS = 10
_LONGEST = 500
"""Characters of a problem."""
_LAST_SECONDS = 30
"""Seconds to finish after the launcher was killed."""


def track(run: Path, name: str) -> int:
    """Tracks a run until the launcher writes its exit code to standard input, or exits.

    Args:
        run: the run's directory.
        name: the tracker. Its files are in the folder `tracking/NAME` of the directory.

    Returns:
        The exit code: 0 if the tracker has everything.
    """
    with suppress(OSError):
        os.nice(_NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = run / "tracking" / name
    to_launcher = _take_stdout()
    reported = False
    feed: Feed | None = None
    for ending in _looks():
        if ending == "":
            signal.alarm(_LAST_SECONDS)
        try:
            if feed is None:
                folder.mkdir(parents=True, exist_ok=True)
                feed = Feed(run, make_tracker(name, folder), folder)
            feed.pass_on()
            if ending is not None:
                feed.close(int(ending) if ending else None)
                return 0
        except Exception as error:  # noqa: BLE001 any failure of a library or a server is reported once
            text = f"{type(error).__name__}: {error}"
            sys.stderr.write(f"{time.strftime('%F %X')} {text}\n")
            if not reported:
                reported = True
                with suppress(OSError):  # the launcher may have been killed
                    os.write(to_launcher, text[:_LONGEST].encode())
            if ending is None:
                _ready(_PAUSE)
    return 1


def _take_stdout() -> int:
    """Returns standard output, and lets the prints of libraries go to standard error."""
    taken = os.dup(1)
    os.dup2(2, 1)
    return taken


def _looks() -> Iterator[str | None]:
    """Yields None for each look at the files, and at last what the launcher wrote: its exit code, or nothing."""
    while not _ready(_PERIOD):
        yield None
    yield sys.stdin.readline().strip()


def _ready(seconds: float) -> bool:
    """Waits for the launcher's word."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])
