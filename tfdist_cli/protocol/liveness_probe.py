"""Sends heartbeats in place of a task while a call keeps all of its Python threads from running.

Run as a script by an isolated interpreter, `liveness_probe.py PID PERIOD`, as a child of the task, whose standard error
it shares. Standard input is a pipe from the task, with a byte for each heartbeat of the task's own thread; it ends with
the task. If no byte comes for `BLOCKED_PERIODS` periods in a row, and the task is not stopped according to the kernel,
this process writes the record.

Periods are counted in place of seconds: a pause of the machine, or of all processes, counts as one period, and the
task's thread has the remaining ones to continue. This process only reads what the kernel knows of the task.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

BLOCKED_PERIODS = 5
"""Periods without a heartbeat of the task's own thread after which the interpreter lock counts as held."""
_NOT_RUNNING = "TtZX"
"""The kernel's states of a process that is stopped, traced, or has exited; see proc(5)."""
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Watches the task until it has exited."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # after them the task may continue, to save; its exit closes the pipe
    task, period = int(sys.argv[1]), float(sys.argv[2])
    missed = 0
    while os.getppid() == task:  # a process that the task has forked may hold the pipe open
        readable, _, _ = select.select([0], [], [], period)
        if readable:
            if not os.read(0, 4096):
                return
            missed = 0
            continue
        state, computed = look(task)
        missed = 0 if state in _NOT_RUNNING else missed + 1
        if missed >= BLOCKED_PERIODS:
            report(computed)


def look(pid: int, proc: Path = Path("/proc")) -> tuple[str, float | None]:
    """Reads a process's state from the kernel.

    Args:
        pid: the process.
        proc: the mount point of Linux's proc file system.

    Returns:
        The letter of its state, and the seconds of processor time that it has used; None without a proc file system.
    """
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except ProcessLookupError:
        return "X", None
    except FileNotFoundError:
        if (proc / "self").exists():
            return "X", None
        command = ["ps", "-o", "state=", "-p", str(pid)]  # part of POSIX
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        return shown.stdout[:1] or "X", None
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def report(computed: float | None) -> None:
    """Writes the record, unless that would block because the task's output is not read."""
    _, writable, _ = select.select([], [2], [], 0)
    if writable:
        used = "" if computed is None else f',"computed":{computed:.2f}'
        try:
            os.write(2, f'\x1e{{"kind":"beat","held":true{used}}}\n'.encode())
        except OSError:
            sys.exit()  # the reader is gone


if __name__ == "__main__":
    main()
