"""Slurm's programs, as far as a launcher needs them."""

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
LOOK = 0.5
"""Seconds between two looks at what nothing announces: another machine's files, or the end of a job."""
ANSWER_SECONDS = 20.0
"""Seconds that Slurm has to answer; a controller that is busy, or starts again, takes some."""
_WAITING = ("PENDING",)
_ALIVE = ("CONFIGURING", "RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "STAGE_OUT")


@dataclass(frozen=True)
class Job:
    """A job as Slurm last told of it.

    Args:
        state: such as `RUNNING`, in Slurm's words; `GONE` for one that Slurm has forgotten.
        restarts: how often Slurm has put it back into the queue.
        reason: why it waits, or of what it ended.
    """

    state: str
    restarts: int = 0
    reason: str = ""

    @property
    def waits(self) -> bool:
        """Whether its tasks have not been started yet."""
        return self.state in _WAITING

    @property
    def runs(self) -> bool:
        """Whether its tasks may be there."""
        return self.state in _ALIVE

    @property
    def is_there(self) -> bool:
        """Whether it waits, runs or is being ended."""
        return self.waits or self.runs or self.ends

    @property
    def ends(self) -> bool:
        """Whether its tasks are gone, though what becomes of it is not settled."""
        return self.state in ("COMPLETING", "REQUEUED")


def check_programs() -> None:
    """Raises `UsageError` where Slurm's programs are not installed."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            raise UsageError(
                f"there is no program {program!r} here, which comes with Slurm",
                hint="launch on a machine that jobs are submitted from; `tfdist render --to slurm` makes the script "
                "anywhere",
            )


async def submit(script: Path, log: Path, arguments: Sequence[str], env: Mapping[str, str]) -> str:
    """Submits a script.

    Args:
        script: the file.
        log: where what the script itself writes goes; a log that is there is gone on with.
        arguments: what the script is given.
        env: variables that the job has, unless `SBATCH_EXPORT` keeps it from the environment here.

    Returns:
        The job's number.

    Raises:
        UsageError: Slurm does not take it.
    """
    code, out, err = await _run("sbatch", "--parsable", f"--output={_literal(log)}", str(script), *arguments, env=env)
    if code:
        raise UsageError(
            f"sbatch does not take the job: {_reason(err) or f'exit code {code}'}",
            hint="see the cluster file's slurm section; `sinfo` lists the partitions",
        )
    return out.strip().partition(";")[0]


async def look(job: str) -> Job | None:
    """How a job stands; None when Slurm does not answer at the moment."""
    code, out, err = await _run(
        "squeue", "--noheader", "--states=all", f"--jobs={job}", "--Format=RestartCnt:12,State:24,Reason:48"
    )
    if code:
        return Job("GONE") if "Invalid job id" in err else None
    for line in out.splitlines():
        restarts, state, *reason = line.split(maxsplit=2)
        return Job(state, int(restarts), reason[0].strip() if reason else "")
    return Job("GONE")


async def end_softly(job: str) -> None:
    """Tells the tasks to end, for good: the job does not go back into the queue then."""
    await _run("scontrol", "update", f"JobId={job}", "Requeue=0")
    await _run("scancel", "--signal=TERM", job)


async def kill_tasks(job: str) -> None:
    """Kills the tasks; the script sees that, and ends by itself.

    srun stands still meanwhile: where it sees one task killed before the others are, it has Slurm end these, which
    tells them to end, and hears of nothing else until `KillWait` is over, by default 30 s.
    """
    # Each part of a heterogeneous job has a number of its own, by which alone its part of the step can be named.
    _, parts, _ = await _run("squeue", "--noheader", f"--jobs={job}", "--format=%A")
    await _run("scancel", "--full", "--signal=STOP", job)
    try:
        await _run("scancel", "--signal=KILL", *(f"{part}.0" for part in parts.split() or [job]))
    finally:
        await _run("scancel", "--full", "--signal=CONT", job)


async def cancel(job: str) -> bool:
    """Ends the job, whether it has begun or not: its tasks are told to end, and killed when they don't.

    Returns:
        Whether Slurm has taken the request.
    """
    code, _, _ = await _run("scancel", job)
    return not code


async def cancel_and_wait(job: str, timeout: float) -> bool:
    """Ends the job; whether it is over within so many seconds.

    Raises:
        TfdistError: Slurm does not answer.
    """
    cancelled, deadline = await cancel(job), time.monotonic() + timeout
    while (await await_answer(job)).is_there:
        if time.monotonic() >= deadline:
            return False
        await asyncio.sleep(LOOK)
        cancelled = cancelled or await cancel(job)
    return True


async def await_answer(job: str, timeout: float = ANSWER_SECONDS) -> Job:
    """As `look`, again and again until Slurm answers.

    Raises:
        TfdistError: it has not answered within so many seconds.
    """
    deadline = time.monotonic() + timeout
    while (found := await look(job)) is None:
        if time.monotonic() >= deadline:
            raise TfdistError(
                f"Slurm does not say whether job {job} still runs",
                hint=f"see `squeue --jobs={job}`, and try again when it answers",
            )
        await asyncio.sleep(LOOK)
    return found


async def _run(*argv: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Runs a program out of reach of a Ctrl-C in the terminal: its exit code, what it printed, and its errors.

    Args:
        argv: the program and its arguments.
        env: variables on top of those of this process.
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
        raise TfdistError(f"{argv[0]} cannot be run: {error.strerror}") from error
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


def _reason(errors: str) -> str:
    """The last that a program says of what is wrong; some end with where to find help."""
    said = [line for line in errors.strip().splitlines() if not line.startswith("Try ")]
    return said[-1].removeprefix("sbatch: ").removeprefix("error: ") if said else ""


def _literal(path: Path) -> str:
    """A path without sbatch's patterns; it looks for none in one with a backslash."""
    return str(path) if "\\" in str(path) else str(path).replace("%", "%%")
