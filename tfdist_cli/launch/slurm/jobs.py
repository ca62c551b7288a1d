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
"""The file in the run directory with the id of the run's job."""
_JOB_ID = re.compile(r"[0-9][\w;.+-]*", re.ASCII)
_END_SECONDS = 60.0
"""Seconds in which a cancelled job has to end: Slurm gives its tasks 30 to save."""


def job_of(run_dir: Path) -> str:
    """Returns the id of a run's last job; empty if it had none."""
    with suppress(OSError, ValueError):
        job_id = read_bytes(run_dir / JOB_FILE).decode("ascii").strip()
        return job_id if _JOB_ID.fullmatch(job_id) else ""
    return ""


class SlurmJobs:
    """Implements `SchedulerJobs`."""

    def refuse_active(self, run_dir: Path) -> None:
        """Refuses a run directory whose job is active. Where Slurm is not installed, nothing is checked.

        Raises:
            UsageError: the job is pending or running.
            TfdistError: Slurm does not answer.
        """
        job_id = job_of(run_dir)
        if not job_id or shutil.which("squeue") is None:
            return
        job = asyncio.run(await_answer(job_id))
        if job.is_running or job.is_pending:
            raise UsageError(
                f"job {job_id} of this run is still {job.state.lower()}, although its launcher has exited",
                code="job-still-active",
                hint=f"wait for it, or end it with `tfdist stop {run_dir}`",
            )

    def is_active(self, run_dir: Path) -> bool:
        """Whether the run's job is pending, running or completing.

        Raises:
            TfdistError: Slurm does not answer.
        """
        job_id = job_of(run_dir)
        return bool(job_id) and asyncio.run(await_answer(job_id)).is_active

    def end(self, run_dir: Path) -> bool:
        """Cancels the run's job, and waits for its end; returns whether it has ended.

        Raises:
            TfdistError: Slurm does not answer.
        """
        job_id = job_of(run_dir)
        return not job_id or asyncio.run(cancel_and_wait(job_id, _END_SECONDS))
