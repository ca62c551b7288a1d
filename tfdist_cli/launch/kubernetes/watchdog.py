"""Has Kubernetes delete the objects of a job when the launcher lets go of it, however it went.

Run as a script, by an isolated interpreter, with a command. Standard input is a pipe from the launcher, which the
kernel closes when the launcher dies, SIGKILL included; then the command is run.
"""

import signal
import subprocess
import sys


def main() -> int:
    """Waits for the end of the pipe, and runs the command; its exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    nothing = subprocess.DEVNULL
    return subprocess.run(sys.argv[1:], stdin=nothing, stdout=nothing, stderr=nothing, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
