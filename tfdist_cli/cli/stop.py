"""`tfdist stop`: ends a run."""

from __future__ import annotations

import asyncio
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
from tfdist_cli.launch.run.history import Outcome, RunView, leftover_processes, read_run, signal_groups
from tfdist_cli.launch.slurm.commands import await_answer, cancel_and_wait
from tfdist_cli.launch.slurm.run import job_of

EXAMPLES = ("tfdist stop", "tfdist stop runs/digits-20260102-030405 --now")
_AGAIN = 0.5
"""Seconds from one signal to the next where a run is to end at once: the second one counts as such."""
_PERIOD = 0.1
"""Seconds between two looks at a process that is not ours."""
_JOB_GRACE = 60.0
"""Seconds that a job of Slurm's without a launcher has to end; Slurm itself gives its tasks 30 to save."""
_GRACE = 3.0
"""Seconds that tasks without a launcher have to end."""


def stop(
    run: RunArgument,
    *,
    now: Annotated[bool, typer.Option("--now", help="Kill the tasks; nothing is saved.")] = False,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for the end.")] = 120.0,
) -> None:
    """End a run: its launcher lets the training save a checkpoint and ends.

    By default it is runs/latest, the run below runs/ that was launched last. Where the launcher is gone, what it has
    left behind is ended.
    Exit code 124 when the run has not ended in time.
    """
    news = read_run(run)
    if news.launcher is not None:
        ended = _end_launcher(news.launcher, now=now, timeout=timeout)
    elif news.outcome is Outcome.LOST or _job_is_there(news.path):
        ended = _end_tasks(news)
    else:
        console.write(f"{news.path.name} is {news.outcome.value} already")
        return
    if not ended:
        console.write(f"{news.path.name} has not ended yet")
        raise typer.Exit(ExitCode.TIMEOUT)
    console.write(f"{news.path.name} has ended")


def _job_is_there(run: Path) -> bool:
    """Whether a job of Slurm's goes on: a launch that was refused for it has ended, but the job has not."""
    job = job_of(run)
    return bool(job) and asyncio.run(await_answer(job)).is_active


def _end_launcher(pid: int, *, now: bool, timeout: float) -> bool:
    """Tells a launcher to end, and waits until it has; whether it did."""
    deadline, again = time.monotonic() + timeout, time.monotonic() + _AGAIN
    with suppress(psutil.NoSuchProcess):
        launcher = psutil.Process(pid)
        launcher.send_signal(signal.SIGINT if now else signal.SIGTERM)
        while launcher.status() != psutil.STATUS_ZOMBIE:  # one that nobody reaps has ended all the same
            if time.monotonic() >= deadline:
                return False
            if now and time.monotonic() >= again:
                launcher.send_signal(signal.SIGINT)
                again = float("inf")
            with suppress(psutil.TimeoutExpired):
                launcher.wait(_PERIOD)
    return True


def _end_tasks(news: RunView) -> bool:
    """Ends what a launcher has left behind; whether all of it is gone."""
    left = leftover_processes(news)
    signal_groups(left, signal.SIGTERM)
    _, alive = psutil.wait_procs(left, timeout=_GRACE)
    signal_groups(alive, signal.SIGKILL)
    _, alive = psutil.wait_procs(alive, timeout=_GRACE)
    job = job_of(news.path)
    over = not job or asyncio.run(cancel_and_wait(job, _JOB_GRACE))
    return over and not alive
