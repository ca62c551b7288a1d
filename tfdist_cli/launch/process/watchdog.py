"""Ends a launcher's tasks when the launcher itself is gone, however it went, and removes their temporary folder.

Run as a script, `guard.py [FOLDER]`, by an isolated interpreter that starts in milliseconds. Standard input is a pipe
from the launcher: `+n` is a process group that was started, `-n` one that is gone. The launcher closes the pipe at the
end of the run, and the kernel when the launcher dies, SIGKILL included; the groups that are left then get SIGTERM, and
after `GRACE` seconds SIGKILL.
"""

import os
import signal
import sys
import time

GRACE = 3.0


def main() -> None:
    """Keeps the list until the pipe ends, then ends what is on it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        group = int(line[1:])
        if line.startswith(b"+"):
            groups.add(group)
        else:
            groups.discard(group)
    end(groups)
    for folder in sys.argv[1:]:
        import shutil  # noqa: PLC0415 it takes as long to import as all the rest, while tasks are starting

        shutil.rmtree(folder, ignore_errors=True)


def end(groups: set[int]) -> None:
    """Tells every group to end, waits, and kills what is left."""
    left = {group for group in groups if send(group, signal.SIGTERM)}
    give_up = time.monotonic() + GRACE
    while left and time.monotonic() < give_up:
        time.sleep(0.05)
        left = {group for group in left if send(group, 0)}
    for group in left:
        send(group, signal.SIGKILL)


def send(group: int, signum: int) -> bool:
    """Signals a group; False when it is gone."""
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main()
