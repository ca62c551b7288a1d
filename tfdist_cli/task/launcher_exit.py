"""A task exits with the launcher that started it, even if the launcher was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from tfdist_cli.protocol.records import LAUNCHER_PID

_PR_SET_PDEATHSIG = 1


def exit_with_launcher() -> None:
    """Makes the kernel kill this process when its launcher exits. Does nothing without a launcher, or off Linux."""
    launcher = os.environ.get(LAUNCHER_PID)
    if not launcher or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(launcher):  # the launcher exited before prctl was called
        os._exit(128 + signal.SIGKILL)
