"""Reports that a task is alive while a call keeps the interpreter from all of its Python threads.

Run as a script by an isolated interpreter, `liveness_probe.py PID PERIOD`, as a child of the task, whose standard error
it shares. Standard input is a pipe from the task: a byte for each sign of life that the task's own thread gives; the
pipe ends with the task. If none comes for `HELD_PERIODS` periods in a row, and the kernel says that the task is not
stopped, this process writes the record in the thread's place.

Periods are counted instead of seconds: after a pause of the machine, or of all processes, one period is over, and the
task's thread has the others to come back. The process only looks at what the kernel tells of the task.
"""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

HELD_PERIODS = 5
"""Periods without a sign of the task's own thread after which the interpreter is taken to be held."""
_NOT_RUNNING = "TtZX"
"""The kernel's states of a process that is stopped, traced, or has ended; see proc(5)."""
_TICKS = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Watches the task until it has ended."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the task may go on after them, to save; its end closes the pipe
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
        if missed >= HELD_PERIODS:
            report(computed)


def look(pid: int, proc: Path = Path("/proc")) -> tuple[str, float | None]:
    """What the kernel says of a process.

    Args:
        pid: the process.
        proc: where Linux shows its processes.

    Returns:
        The letter of its state, and the seconds of processor time that it has used; None where only `ps` tells.
    """
    try:
        fields = (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except ProcessLookupError:
        return "X", None
    except FileNotFoundError:
        if (proc / "self").exists():
            return "X", None
        command = ["ps", "-o", "state=", "-p", str(pid)]  # POSIX has it, wherever it is
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        return shown.stdout[:1] or "X", None
    return fields[0], (int(fields[11]) + int(fields[12])) / _TICKS


def report(computed: float | None) -> None:
    """Writes the record, unless nobody takes what the task writes: this process must not wait for that."""
    _, writable, _ = select.select([], [2], [], 0)
    if writable:
        used = "" if computed is None else f',"computed":{computed:.2f}'
        try:
            os.write(2, f'\x1e{{"kind":"beat","held":true{used}}}\n'.encode())
        except OSError:
            sys.exit()  # the reader is gone


if __name__ == "__main__":
    main()
