"""Cleans up after a launcher that has exited, however it exited.

Run as a script by an isolated interpreter, which starts in milliseconds; see `orphans.Watchdog`. Standard input is a
pipe from the launcher. The launcher closes it at the end of the run, and the kernel closes it when the launcher is
killed.

* `watchdog.py groups [FOLDER]` ends process groups and removes the tasks' temporary folder. On the pipe, a line `+n`
  adds process group n, and `-n` removes it. The remaining groups get SIGTERM, and after `GRACE` seconds SIGKILL.
* `watchdog.py command COMMAND…` runs a command.
"""

import os
import signal
import sys
import time

GRACE = 3.0


def main() -> int:
    """Waits for the end of the pipe, and cleans up; returns the exit code."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    mode, *arguments = sys.argv[1:]
    if mode == "command":
        return run_after_pipe(arguments)
    end(read_groups())
    for folder in arguments:
        import shutil  # noqa: PLC0415 the import would double the time of the start, while tasks are starting

        shutil.rmtree(folder, ignore_errors=True)
    return 0


def run_after_pipe(command: list[str]) -> int:
    """Runs a command after the end of the pipe."""
    import subprocess  # noqa: PLC0415 as above

    sys.stdin.buffer.read()
    nothing = subprocess.DEVNULL
    return subprocess.run(command, stdin=nothing, stdout=nothing, stderr=nothing, check=False).returncode


def read_groups() -> set[int]:
    """The process groups that are left at the end of the pipe."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    return groups


def end(groups: set[int]) -> None:
    """Sends SIGTERM to every group, waits, and sends SIGKILL to those that are left."""
    left = {group for group in groups if send(group, signal.SIGTERM)}
    deadline = time.monotonic() + GRACE
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = {group for group in left if send(group, 0)}
    for group in left:
        send(group, signal.SIGKILL)


def send(group: int, signum: int) -> bool:
    """Signals a group; returns False if it has no processes."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
