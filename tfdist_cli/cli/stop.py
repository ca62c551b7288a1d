"""`tfdist stop`: stops a run."""

from __future__ import annotations

import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import psutil
import typer

from tfdist_cli.cli.console import console
from tfdist_cli.cli.options import RunArgument
from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.registry import scheduler_jobs
from tfdist_cli.launch.run.history import Outcome, RunView, leftover_processes, read_run, signal_groups

EXAMPLES = ("tfdist stop", "tfdist stop runs/digits-20260102-030405 --now")
_AGAIN = 0.5
"""Seconds between the two SIGINTs that make a launcher kill its tasks at once."""
_PERIOD = 0.1
"""Seconds between two checks of a process that is not a child."""
_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL for tasks without a launcher."""


def stop(
    run: RunArgument,
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill the tasks at once; no checkpoint is saved.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait until the run has ended.")] = 120.0,
) -> None:
    """Stop a run: the training saves a checkpoint and exits.

    The default run is runs/latest, the last run launched. If the launcher was killed, the tasks that it left are
    stopped. Exit code 124 if the run has not ended in time.
    """
    view = read_run(run)
    if view.launcher is not None:
        ended = _end_launcher(view.launcher, now=now, timeout=timeout)
    elif view.outcome is Outcome.LOST or _has_active_job(view.path):
        ended = _end_tasks(view)
    else:
        console.write(f"{view.path.name} is {view.outcome.value} already")
        return
    if not ended:
        console.write(f"{view.path.name} has not ended yet")
        raise typer.Exit(ExitCode.TIMEOUT)
    console.write(f"{view.path.name} has ended")


def _has_active_job(run: Path) -> bool:
    """Whether a scheduler's job of the run is active, although the run's last launcher has exited."""
    return any(jobs.is_active(run) for jobs in scheduler_jobs())


def _end_launcher(pid: int, *, now: bool, timeout: float) -> bool:
    """Signals a launcher and waits for its exit; returns whether it has exited."""
    deadline, again = time.monotonic() + timeout, time.monotonic() + _AGAIN
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        launcher.send_signal(signal.SIGINT if now else signal.SIGTERM)
        while launcher.status() != psutil.STATUS_ZOMBIE:  # a zombie has exited, its parent has not reaped it
            if time.monotonic() >= deadline:
                return False
            if now and time.monotonic() >= again:
                launcher.send_signal(signal.SIGINT)
                again = float("inf")
            with suppress(psutil.TimeoutExpired):
                launcher.wait(_PERIOD)
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
