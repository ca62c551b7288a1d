"""Profiles this task with TensorFlow's profiler when its launcher orders it, while the task goes on.

TensorFlow's own profiler service is not used: its port would accept everybody. The profile is recorded in this process
and stored in the run's directory. A profile that cannot be taken is reported, and never ends the task.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.protocol.environment import run_dir
from tfdist_cli.protocol.profile_order import PROFILE_SUFFIX, ProfileOrder, take_order
from tfdist_cli.protocol.records import TASK_DIR, emit


def look_for_order() -> None:
    """Takes the order that the launcher may have left, and starts a thread that follows it."""
    folder = os.environ.get(TASK_DIR)
    if folder and (order := take_order(Path(folder))):
        # No daemon: a thread in TensorFlow could crash the process while Python exits.
        thread = threading.Thread(target=_follow, args=(order, run_dir()), name="tfdist-profiler")
        with suppress(RuntimeError):  # Python exits, and the launcher reports that
            thread.start()


def _follow(order: ProfileOrder, run: Path) -> None:
    try:
        seconds, took = _profile(order, run / order.path)
        emit("profiled", request=order.request, recorded=seconds, took=took, bytes=(run / order.path).stat().st_size)
    except TrainingError as error:
        _report_failure(order, error)
    except Exception as error:  # noqa: BLE001 whatever it is, the training goes on
        _report_failure(
            order,
            TrainingError(
                f"the profile could not be saved: {type(error).__name__}: {error}",
                code="profile-not-saved",
                hint="check the disk of the run directory",
            ),
        )


def _report_failure(order: ProfileOrder, error: TrainingError) -> None:
    emit("profile_failed", request=order.request, reason=error.message, code=error.code, hint=error.hint or "")


def _profile(order: ProfileOrder, path: Path) -> tuple[float, float]:
    """Records a profile, until its time is over or the process is about to exit.

    Returns:
        How many seconds were recorded, and how many it took to save them.

    Raises:
        TrainingError: the program records a profile itself.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-", ignore_cleanup_errors=True) as scratch:
        _start(scratch)
        began = time.monotonic()
        threading.main_thread().join(order.seconds)  # it counts as ended when the process is about to exit
        ended = time.monotonic()
        tf.profiler.experimental.stop()
        for written in Path(scratch).rglob(f"*{PROFILE_SUFFIX}"):
            _store(written, path)
        return round(ended - began, 3), round(time.monotonic() - ended, 3)


def _store(written: Path, path: Path) -> None:
    """Copies a file to a path, where it appears when it is complete."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    shutil.copyfile(written, new)
    new.replace(path)


def _start(folder: str) -> None:
    try:
        tf.profiler.experimental.start(folder)
    except tf.errors.AlreadyExistsError:
        raise TrainingError(
            "the program of the task is recording a profile itself",
            code="profiler-in-use",
            hint="try again later; the callback TensorBoard records one if it has profile_batch",
        ) from None
