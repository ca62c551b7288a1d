"""One task in a Slurm step: a child process, and a parent that reports how the child exits.

Slurm does not tell a launcher how a single task of a job has exited, and uses the largest exit code of all tasks as the
job's. So each place in a step is held by a parent process that only waits. It reports the task's start and exit to the
launcher, and exits with the task's code if that code decides the result of the training.

If a node's daemon stops responding, Slurm considers the node lost and requeues the job on other nodes, while the tasks
on the lost node may still run. Two trainings would then write to one run. So the parent kills its task when a later
attempt of the run has begun.

Slurm cannot signal a single task of a step. So the launcher writes the name of a signal to a file in the task's folder,
and the parent sends it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfdist_cli.errors import UsageError
from tfdist_cli.protocol.records import (
    ENABLED,
    LAUNCHER_PID,
    LEAVE_SIGNAL,
    OUTLASTS,
    STOP_FILE,
    TASK_DIR,
    TASK_FILE,
    emit,
)
from tfdist_cli.spec.task_id import TaskId

ATTEMPT = "TFDIST_ATTEMPT"
"""Environment variable: the number of the run's attempt. It is set if a launcher reads what the tasks write."""
_POLL_SECONDS = 1.0
"""Seconds between two checks for a later attempt, and for a signal from the launcher."""
RAW = {"stdout": 1, "stderr": 2}
"""The streams that are written to the files `stdout.raw` and `stderr.raw`, and their file descriptors."""


def fork_task(task: TaskId, run_dir: Path, plan: Mapping[str, Any], *, decides: bool, joins: bool = False) -> None:
    """Forks, and returns in the child, which is the task. The parent waits for the child, and exits with it.

    Slurm sends signals to both processes; the parent ignores SIGTERM, and the task handles it. The parent creates a
    temporary folder for the task, and removes it.

    Args:
        task: the task.
        run_dir: the run's directory.
        plan: the task's plan in JSON types, written to `TASK_FILE` for the launcher, since much of it is known only on
            this node.
        decides: whether the parent exits with the task's code; otherwise with 0. A worker, for example, may fail while
            the training continues.
        joins: whether the task has a job of its own: SIGTERM to that job makes it leave the training.

    Raises:
        UsageError: the run's directory is not writable.
    """
    attempt = os.environ.get(ATTEMPT)
    if attempt:
        _write_to(run_dir / f"attempt_{attempt}" / task.slug, plan)
    os.environ |= {LAUNCHER_PID: str(os.getpid()), OUTLASTS: "0" if joins else "1"}
    with suppress(OSError):  # the disk may be full: a task that needs a temporary file reports that itself
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tfdist-")
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, previous)
        emit("started", pid=os.getpid(), host=socket.gethostname())
        return
    if attempt:
        threading.Thread(target=_follow_launcher, args=(pid, task, run_dir, int(attempt)), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if tempfile.tempdir:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    emit("exited", code=code)
    if code and not decides:
        sys.stderr.write(f"tfdist: {task} exited with code {code}; other tasks decide the result of the training\n")
        sys.stderr.flush()
    os._exit(0 if not decides else 128 - code if code < 0 else code)


def _follow_launcher(pid: int, task: TaskId, run_dir: Path, attempt: int) -> None:
    """Sends a task the signals that the launcher writes; kills it after a later attempt than its own has begun."""
    existing, never = set(_attempts(run_dir)), threading.Event()
    stop_file, sent = run_dir / f"attempt_{attempt}" / task.slug / STOP_FILE, ""
    while not any(number > attempt for number in set(_attempts(run_dir)) - existing):
        never.wait(_POLL_SECONDS)  # a network file system does not notify of another machine's changes
        name = _content(stop_file)
        if name in signal.Signals.__members__ and name != sent:
            sent = name
            number = signal.Signals[name]
            os.kill(pid, LEAVE_SIGNAL if number == signal.SIGTERM and _ignores(pid, number) else number)
    sys.stderr.write(f"tfdist: {task} of attempt {attempt} is killed, since a later attempt has begun\n")
    sys.stderr.flush()
    os.kill(pid, signal.SIGKILL)


def _content(path: Path) -> str:
    """Returns a file's text; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        return path.read_text(encoding="ascii").strip()
    return ""


def _ignores(pid: int, number: signal.Signals) -> bool:
    """Whether a process ignores a signal; False off Linux."""
    found = re.search(r"^SigIgn:\s*([0-9a-f]+)$", _content(Path(f"/proc/{pid}/status")), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def _attempts(run_dir: Path) -> Iterator[int]:
    """Yields the numbers of a run's attempts whose tasks have started; none if its folder cannot be read.

    The folder of an attempt is not enough: a launch that was refused, or is still queued, has created one too.
    """
    with suppress(OSError):
        for path in run_dir.glob(f"attempt_*/*/{TASK_FILE}"):
            with suppress(ValueError):
                yield int(path.parents[1].name.removeprefix("attempt_"))


def _write_to(folder: Path, plan: Mapping[str, Any]) -> None:
    """Redirects stdout and stderr to files that a launcher follows, and writes the task's plan."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stream, number in RAW.items():
            file = os.open(folder / f"{stream}.raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
        new = folder / f".{TASK_FILE}.new"
        new.write_text(json.dumps(plan, indent=2) + "\n", encoding="utf-8")
        new.replace(folder / TASK_FILE)
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} is not writable on {socket.gethostname()}: {error.strerror}",
            code="run-dir-not-writable",
            hint="choose a run directory on a file system that all nodes share, with --run-dir",
        ) from error
    os.environ |= {ENABLED: "1", TASK_DIR: str(folder)}
