"""Jobs that are still active after their launcher has exited: a job does not end when its launcher is killed."""

from __future__ import annotations

import asyncio
import re
import shutil
from contextlib import suppress
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm.commands import await_answer, cancel_and_wait
from tfdist_cli.protocol.run_files import read_bytes

JOB_FILE = "slurm_job"
"""The file in the run directory with the ids of the run's jobs: the job of the launch, then those of added tasks."""
_JOB_ID = re.compile(r"[0-9][\w;.+-]*", re.ASCII)
_END_SECONDS = 60.0
"""Seconds in which a cancelled job has to end: Slurm gives its tasks 30 to save."""


def jobs_of(run_dir: Path) -> tuple[str, ...]:
    """Returns the ids of a run's last jobs; empty if it had none."""
    with suppress(OSError, ValueError):
        lines = read_bytes(run_dir / JOB_FILE).decode("ascii").split()
        return tuple(job_id for job_id in lines if _JOB_ID.fullmatch(job_id))
    return ()


class SlurmJobs:
    """Implements `SchedulerJobs`."""

    def refuse_active(self, run_dir: Path) -> None:
        """Refuses a run directory that has an active job. Where Slurm is not installed, nothing is checked.

        Raises:
            UsageError: a job is pending or running.
            TfdistError: Slurm does not answer.
        """
        if shutil.which("squeue") is None:
            return
        for job_id in jobs_of(run_dir):
            job = asyncio.run(await_answer(job_id))
            if job.is_running or job.is_pending:
                raise UsageError(
                    f"job {job_id} of this run is still {job.state.lower()}, although its launcher has exited",
                    code="job-still-active",
                    hint=f"wait for it, or end it with `tfdist stop {run_dir}`",
                )

    def is_active(self, run_dir: Path) -> bool:
        """Whether a job of the run is pending, running or completing.

        Raises:
            TfdistError: Slurm does not answer.
        """
        return any(asyncio.run(await_answer(job_id)).is_active for job_id in jobs_of(run_dir))

    def end(self, run_dir: Path) -> bool:
        """Cancels the run's jobs, and waits for their end; returns whether all have ended.

        Raises:
            TfdistError: Slurm does not answer.
        """
        ended = [asyncio.run(cancel_and_wait(job_id, _END_SECONDS)) for job_id in jobs_of(run_dir)]
        return all(ended)
