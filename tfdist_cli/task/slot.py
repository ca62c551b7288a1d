"""One task in the place that a scheduler has given it: a process of its own, and one that sees how it ends.

A scheduler tells a launcher next to nothing of how a single task of a job has ended, and takes the worst exit code of
all for the job's. So each place is held by a process that only waits: it tells the launcher when the task began and how
it ended, and answers to the scheduler with the task's code where that decides what came of the training.

A node whose daemon does not answer any more is lost for the scheduler, which runs the job again on others, while the
tasks there may go on. Two trainings would then write to one run: the process that waits kills its task when a later
attempt of the run has begun.
"""

from __future__ import annotations

import json
import os
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
from tfdist_cli.protocol.records import ENABLED, LAUNCHER_PID, OUTLASTS, TASK_DIR, TASK_FILE, emit
from tfdist_cli.spec.task_id import TaskId

ATTEMPT = "TFDIST_ATTEMPT"
"""Set for a job whose launcher reads what the tasks write: the number of the run's attempt."""
_LOOK = 2.0
"""Seconds between two looks at whether a later attempt has begun."""
RAW = {"stdout": 1, "stderr": 2}
"""The streams that are then written to files, `stdout.raw` and `stderr.raw`, by their file descriptors."""


def occupy(task: TaskId, run_dir: Path, planned: Mapping[str, Any], *, decides: bool) -> None:
    """Goes on in a new process, which is the task; the process that was there waits for it, and ends as it does.

    A signal from the scheduler reaches both: the one that waits leaves it to the task. It also removes the temporary
    folder that it gives to the task.

    Args:
        task: which task it is.
        run_dir: the run's directory.
        planned: what the task is given, in plain JSON types; a launcher that follows finds it in `TASK_FILE`, since
            much of it is known only here.
        decides: whether the task's exit code is to be the scheduler's as well. That of another task is none of its
            business: a worker may be lost while the training goes on to its end.

    Raises:
        UsageError: the run's directory cannot be written.
    """
    attempt = os.environ.get(ATTEMPT)
    if attempt:
        _write_to(run_dir / f"attempt_{attempt}" / task.slug, planned)
    os.environ |= {LAUNCHER_PID: str(os.getpid()), OUTLASTS: "1"}
    with suppress(OSError):  # a full disk, perhaps: a task that needs a temporary file says so itself
        os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="tfdist-")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    pid = os.fork()
    if not pid:
        signal.signal(signal.SIGTERM, before)
        emit("started", pid=os.getpid(), host=socket.gethostname())
        return
    if attempt:
        threading.Thread(target=_kill_when_replaced, args=(pid, task, run_dir, int(attempt)), daemon=True).start()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if tempfile.tempdir:
        shutil.rmtree(tempfile.tempdir, ignore_errors=True)
    emit("exited", code=code)
    if code and not decides:
        sys.stderr.write(f"tfdist: {task} has ended with {code}; the training's end is for others to decide\n")
        sys.stderr.flush()
    os._exit(0 if not decides else 128 - code if code < 0 else code)


def _kill_when_replaced(pid: int, task: TaskId, run_dir: Path, attempt: int) -> None:
    """Kills a task once a later attempt than its own has begun."""
    before, never = set(_attempts(run_dir)), threading.Event()
    while not any(number > attempt for number in set(_attempts(run_dir)) - before):
        never.wait(_LOOK)  # nothing announces what another machine writes
    sys.stderr.write(f"tfdist: {task} of attempt {attempt} is killed, since a later attempt has begun\n")
    sys.stderr.flush()
    os.kill(pid, signal.SIGKILL)


def _attempts(run_dir: Path) -> Iterator[int]:
    """The numbers of a run's attempts whose tasks have begun; none while its folder cannot be read.

    The folder of an attempt alone says nothing: a launch that is refused, or still waits in the queue, makes one, too.
    """
    with suppress(OSError):
        for path in run_dir.glob(f"attempt_*/*/{TASK_FILE}"):
            with suppress(ValueError):
                yield int(path.parents[1].name.removeprefix("attempt_"))


def _write_to(folder: Path, planned: Mapping[str, Any]) -> None:
    """Turns standard output and error into files that a launcher follows, and writes what the task is given."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for stream, number in RAW.items():
            file = os.open(folder / f"{stream}.raw", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(file, number)
            os.close(file)
        new = folder / f".{TASK_FILE}.new"
        new.write_text(json.dumps(planned, indent=2) + "\n", encoding="utf-8")
        new.replace(folder / TASK_FILE)
    except OSError as error:
        raise UsageError(
            f"{error.filename or folder} cannot be written on {socket.gethostname()}: {error.strerror}",
            hint="the run's directory has to be on a file system that all nodes share: name one with --run-dir",
        ) from error
    os.environ |= {ENABLED: "1", TASK_DIR: str(folder)}
