"""Runs a command when the launcher exits, even if the launcher is killed.

`Cleanup` starts this file as a script in an isolated interpreter, with the command as its arguments. The script's stdin
is a pipe from the launcher. The kernel closes the pipe when the launcher exits, SIGKILL included.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence


class Cleanup:
    """A command that runs when `run` is called, or else when this process exits.

    Args:
        command: the program and its arguments. It inherits that SIGINT, SIGTERM and SIGHUP are ignored.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            bufsize=0,
            start_new_session=True,
        )

    def run(self) -> None:
        """Runs the command, and waits for its exit."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


def main() -> int:
    """Waits until the pipe is closed, runs the command, and returns its exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    nothing = subprocess.DEVNULL
    return subprocess.run(sys.argv[1:], stdin=nothing, stdout=nothing, stderr=nothing, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
