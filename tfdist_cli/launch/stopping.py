"""Stops a run from another process than its launcher."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tfdist_cli.launch.manual import stop_manual
from tfdist_cli.launch.registry import scheduler_jobs
from tfdist_cli.launch.run.history import Outcome, RunView, leftover_processes, signal_groups

_AGAIN = 0.5
"""Seconds between the two SIGINTs that make a launcher kill its tasks at once."""
_PERIOD = 0.1
"""Seconds between two checks of a process that is not a child."""
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL for tasks without a launcher."""


def is_over(view: RunView) -> bool:
    """Whether nothing of a run is left that could be stopped."""
    if view.manual:
        return view.outcome is not Outcome.RUNNING
    return view.launcher is None and view.outcome is not Outcome.LOST and not _has_active_job(view.path)


def stop_run(view: RunView, *, now: bool, timeout: float) -> bool:
    """Stops a run; a launcher that was killed has left its tasks, which are stopped then.

    Args:
        view: the run.
        now: whether to kill its tasks at once, without a checkpoint.
        timeout: seconds to wait for its end.

    Returns:
        Whether it has ended.

    Raises:
        TfdistError: no launcher runs, and the tasks are on other machines.
    """
    if view.manual:
        return stop_manual(view, now=now, timeout=timeout)
    return _end_tasks(view) if view.launcher is None else _end_launcher(view.launcher, now=now, timeout=timeout)


def _has_active_job(run: Path) -> bool:
    """Whether a scheduler's job of the run is active, although the run's last launcher has exited."""
    return any(jobs.is_active(run) for jobs in scheduler_jobs())


def has_exited_within(process: psutil.Process, timeout: float | None) -> bool:
    """Waits until a process has exited, also one that its parent does not reap.

    Args:
        process: the process, which need not be a child.
        timeout: seconds to wait; None for no limit.

    Returns:
        Whether it has exited.
    """
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    with suppress(psutil.NoSuchProcess):
        while process.status() != psutil.STATUS_ZOMBIE:  # psutil waits for another's zombie until it is reaped
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with suppress(psutil.TimeoutExpired):
                process.wait(min(_PERIOD, left))
    return True


def _end_launcher(pid: int, *, now: bool, timeout: float) -> bool:
    """Signals a launcher and waits for its exit; returns whether it has exited."""
    deadline = time.monotonic() + timeout
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        launcher.send_signal(signal.SIGINT if now else signal.SIGTERM)
        if now and not has_exited_within(launcher, min(_AGAIN, timeout)):
            launcher.send_signal(signal.SIGINT)
        return has_exited_within(launcher, deadline - time.monotonic())
    return True


def _end_tasks(view: RunView) -> bool:
    """Stops the processes and the scheduler's job that a launcher left; returns whether all have ended."""
    processes = leftover_processes(view)
    signal_groups(processes, signal.SIGTERM)
    _, alive = psutil.wait_procs(processes, timeout=_GRACE)
    signal_groups(alive, signal.SIGKILL)
    _, alive = psutil.wait_procs(alive, timeout=_GRACE)
    jobs_ended = [jobs.end(view.path) for jobs in scheduler_jobs()]
    return all(jobs_ended) and not alive
