"""Calls Slurm's programs: submits, queries, signals and cancels a job."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfdist_cli.errors import TfdistError, UsageError

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
POLL_SECONDS = 0.5
"""Seconds between two polls of what sends no notification: another machine's files, or the end of a job."""
QUERY_SECONDS = 2.0
"""Seconds between two queries of Slurm, which has many users to answer."""
NFS_SECONDS = 60.0
"""Seconds to wait for files that contain the tasks' exits: NFS may show a folder's new files this late."""
ANSWER_SECONDS = 20.0
"""Timeout in seconds for an answer from Slurm. A controller that is busy or restarts answers late."""
_PENDING = ("PENDING",)
_RUNNING = ("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")


@dataclass(frozen=True)
class Job:
    """The last status of a job that Slurm reported.

    Args:
        state: Slurm's job state, such as `RUNNING`; `GONE` for a job that Slurm no longer knows.
        restarts: how often Slurm has requeued the job.
        reason: why the job is pending, or why it failed.
    """

    state: str
    restarts: int = 0
    reason: str = ""

    @property
    def is_pending(self) -> bool:
        """Whether its tasks have not been started yet."""
        return self.state in _PENDING

    @property
    def is_running(self) -> bool:
        """Whether its tasks may be running."""
        return self.state in _RUNNING

    @property
    def is_active(self) -> bool:
        """Whether it is pending, running or completing."""
        return self.is_pending or self.is_running or self.is_completing

    @property
    def is_completing(self) -> bool:
        """Whether its tasks have exited, and Slurm has not decided yet whether it requeues the job."""
        return self.state in ("COMPLETING", "REQUEUED")


def check_programs() -> None:
    """Checks that Slurm's programs are on PATH.

    Raises:
        UsageError: one is missing.
    """
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise UsageError(
                f"{program!r} is not on PATH: Slurm is not installed on this machine",
                code="program-not-found",
                hint="launch from a machine that can submit jobs; `tfdist render --to slurm` prints the script on any "
                "machine",
            )


async def submit(script: Path, log: Path, arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """Submits a script.

    Args:
        script: the file.
        log: the file for the script's own output, which is appended.
        arguments: the script's arguments.
        env: variables that the job gets, unless `SBATCH_EXPORT` excludes this environment.

    Returns:
        The job's id.

    Raises:
        UsageError: Slurm rejects the job.
    """
    code, out, err = await _run("sbatch", "--parsable", f"--output={_literal(log)}", str(script), *arguments, env=env)
    if code:
        raise UsageError(
            f"sbatch rejects the job: {_reason(err) or f'exit code {code}'}",
            code="slurm-job-rejected",
            hint="check the slurm section of the cluster file; `sinfo` lists the partitions",
        )
    return out.strip().partition(";")[0]


async def query(job: str) -> Job | None:
    """Returns the job's status; None when Slurm does not answer at the moment."""
    code, out, err = await _run(
        "squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=RestartCnt:12,State:24,Reason:48"
    )
    if code:
        return Job("GONE") if "Invalid job id" in err else None
    for line in out.splitlines():
        restarts, state, *reason = line.split(maxsplit=2)
        return Job(state, int(restarts), reason[0].strip() if reason else "")
    return Job("GONE")


async def terminate_tasks(job: str) -> None:
    """Sends SIGTERM to the tasks. The job is not requeued after that."""
    await _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    await _run("scancel", "--signal=TERM", job)


async def kill_tasks(job: str) -> None:
    """Sends SIGKILL to the tasks. The script notices that, and exits.

    srun is stopped meanwhile. Otherwise it would see one task killed before the others and would have Slurm terminate
    these: Slurm then sends SIGTERM, and srun handles nothing else until `KillWait`, by default 30 s, has passed.
    """
    # Each component of a heterogeneous job has its own id, and its part of the step can be named only by that.
    _, parts, _ = await _run("squeue", "--noheader", f"--jobs={job}", "--format=%A")
    await _run("scancel", "--full", "--signal=STOP", job)
    try:
        await _run("scancel", "--signal=KILL", *(f"{part}.0" for part in parts.split() or [job]))
    finally:
        await _run("scancel", "--full", "--signal=CONT", job)


async def cancel(job: str) -> bool:
    """Cancels the job, whether it is pending or running: Slurm sends SIGTERM to its tasks, and SIGKILL later.

    Returns:
        Whether Slurm has accepted the request.
    """
    code, _, _ = await _run("scancel", job)
    return not code


async def cancel_and_wait(job: str, timeout: float) -> bool:
    """Cancels the job, and waits until it is over.

    Args:
        job: the job's id.
        timeout: the most seconds to wait.

    Returns:
        Whether the job is over.

    Raises:
        TfdistError: Slurm does not answer.
    """
    cancelled, deadline = await cancel(job), time.monotonic() + timeout
    while (await await_answer(job)).is_active:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(POLL_SECONDS)
        cancelled = cancelled or await cancel(job)
    return True


async def await_answer(job: str, timeout: float = ANSWER_SECONDS) -> Job:
    """Returns the job's status; queries again until Slurm answers.

    Args:
        job: the job's id.
        timeout: the most seconds to wait for an answer.

    Raises:
        TfdistError: Slurm does not answer within the timeout.
    """
    deadline = time.monotonic() + timeout
    while (status := await query(job)) is None:
        if time.monotonic() >= deadline:
            raise TfdistError(
                f"Slurm does not answer whether job {job} is still running",
                code="slurm-unreachable",
                hint=f"run `squeue --jobs={job}`, and try again when it answers",
            )
        await asyncio.sleep(POLL_SECONDS)
    return status


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a program in its own session, so that Ctrl-C in the terminal does not reach it.

    Args:
        argv: the program and its arguments.
        env: variables that are added to those of this process.

    Returns:
        The exit code, stdout and stderr.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    except OSError as error:
        raise TfdistError(
            f"{argv[0]} cannot be run: {error.strerror}",
            code="program-not-runnable",
            hint=f"check the installation of {argv[0]}",
        ) from error
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


def _reason(errors: str) -> str:
    """Returns the last error line of a program; some programs print a pointer to their help after it."""
    lines = [line for line in errors.strip().splitlines() if not line.startswith("Try ")]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else ""


def _literal(path: Path) -> str:
    """Escapes sbatch's filename patterns in a path; sbatch expands none in a path with a backslash."""
    return str(path) if "\\" in str(path) else str(path).replace("%", "%%")
