"""A task that a launcher started ends when the launcher is gone, however it went."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tfdist_cli.protocol.records import LAUNCHER_PID

_PR_SET_PDEATHSIG = 1


def tie_to_launcher() -> None:
    """Asks the kernel to end this process when its launcher ends; without a launcher, or off Linux, does nothing."""
    launcher = os.environ.get(LAUNCHER_PID)
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # it went before the kernel was asked
        os._exit(128 + signal.SIGKILL)
