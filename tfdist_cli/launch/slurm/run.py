"""A job that is submitted, followed and ended; what becomes of its tasks is told as of any other launcher's.

The job is what starts and ends: tasks have no lives of their own there. An attempt is one time that Slurm runs the job.
Slurm itself puts a job back into the queue when a node dies, when the job is to make room for others, and before the
time limit; when the supervisor then starts all tasks again, that is the attempt it means. Where Slurm has not, the
script is submitted anew.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.run.logs import ERROR_FILE
from tfdist_cli.launch.slurm import commands
from tfdist_cli.launch.slurm.commands import POLL_SECONDS, Job
from tfdist_cli.launch.slurm.files import TaskFiles
from tfdist_cli.launch.slurm.script import SCRIPT_FILE
from tfdist_cli.launch.supervisor.events import Action, Exited, Output, Queued, Start, StopSignal
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.environment import START_TIMEOUT
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.protocol.records import TASK_DIR
from tfdist_cli.protocol.run_files import read_bytes
from tfdist_cli.spec.task_id import TaskId

JOB_FILE = "slurm_job"
"""Holds the number of the run's job."""
_JOB = re.compile(r"[0-9][\w;.+-]*", re.ASCII)
LOG_FILE = "slurm.log"
"""What the script and Slurm itself write."""
_ASK = 2.0
"""Seconds between two questions to Slurm, which has many users to answer."""
_ENDING = 120.0
"""Seconds for Slurm to end a job's tasks: it kills them after 30, as a rule, and gives up after another 60."""
_SETTLE = 30.0
"""Seconds for Slurm to say what becomes of a job whose tasks are gone."""
_LAST_WORDS = 2.0
"""Seconds to read what tasks have written that have ended, and for a job to be over that was cancelled."""
_LATE = 60.0
"""Seconds to wait for files that tell how tasks have ended: NFS may hide for so long that a folder has got new ones."""
_LAST_LINES = 10


def job_of(run: Path) -> str:
    """The number of a run's last job; empty for one that had none."""
    with suppress(OSError, ValueError):
        job = read_bytes(run / JOB_FILE).decode("ascii").strip()
        return job if _JOB.fullmatch(job) else ""
    return ""


class SlurmRun:
    """The job of one run.

    Args:
        plan: the tasks.
        context: takes the events and the output of the tasks.
    """

    def __init__(self, plan: Plan, context: LaunchContext) -> None:
        self._plan = plan
        self._context = context
        self._first = plan.tasks[0].task
        self._number = ""
        """The job's number; empty before the first."""
        self._submitted_as = 0
        """The attempt that the job was submitted for; its n-th restart by Slurm is the n-th after it."""
        self._restarts = -1
        """The restart of the job that was followed last."""
        self._job = Job("GONE")
        self._files: dict[TaskId, TaskFiles] = {}
        self._folders: dict[TaskId, Path] = {}
        self._timeout = ""
        self._shared: dict[str, str] = {}
        """What all tasks are given through the job's environment."""
        self._wanted: StopSignal | None = None
        """How the tasks are to be ended, once all that are to be told have been named."""
        self._told = False
        """Whether tasks of this attempt have been told to end: it may not have had a job then."""
        self._ended: StopSignal | None = None
        self._background = BackgroundTasks(context.events)
        self._current: asyncio.Task[None] | None = None
        self._said = ""
        self._cancelled = False
        """Whether the job was cancelled from here."""

    def act(self, action: Action) -> None:
        """Starts all tasks, when the last of them is named, or tells all to end that are left."""
        if isinstance(action, Start):
            prepared = self._context.prepare(action)
            self._folders[action.task] = Path(prepared[TASK_DIR])
            self._timeout = prepared.get(START_TIMEOUT, "")
            self._shared = {name: prepared[name] for name in (RUN_SECRET,) if name in prepared}
            self._told = False
            if len(self._folders) == len(self._plan.tasks):
                folders, self._folders = self._folders, {}
                self._current = self._background.start(self._attempt(folders, self._current))
            return
        self._told = True
        if self._wanted is None:
            self._wanted = action.signal
            self._background.start(self._end())
        elif action.signal is StopSignal.KILL:
            self._wanted = StopSignal.KILL

    async def close(self) -> None:
        """Waits for the script to end when all its tasks have; otherwise, or if it lasts, cancels the job."""
        over = self._all_told
        await self._background.finish(_LAST_WORDS if over else 0.0)
        if not self._number:
            return
        deadline = time.monotonic() + (_SETTLE if over else 0)
        while (job := await self._look()).is_running and job.restarts <= self._restarts and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)
        if job.is_active:
            await commands.cancel_and_wait(self._number, _LAST_WORDS)

    async def _attempt(self, folders: dict[TaskId, Path], before: asyncio.Task[None] | None) -> None:
        """One time that all tasks run, after the time before."""
        for task in folders:
            self._context.events.put(Queued(task))
        if before:
            await before
        self._ended = None
        await self._settle()
        if self._is_cancelled:
            for task in folders:
                self._context.events.put(Exited(task, -signal.SIGTERM, cause=self._fate(), cancelled=True))
            return
        await self._begin(folders[self._first].parent)
        if self._told:
            await self._cancel()
        attempt = self._submitted_as + self._restarts
        where = {task: folder.parent.with_name(f"attempt_{attempt}") / folder.name for task, folder in folders.items()}
        self._files = {task: TaskFiles(task, where[task], self._context) for task in folders}
        await self._follow()
        fate = self._fate()
        for task, files in self._files.items():
            await files.close(-signal.SIGTERM, fate, cancelled=self._is_cancelled)
            error = where[task] / ERROR_FILE
            if where[task] != folders[task] and error.exists():
                error.rename(folders[task] / ERROR_FILE)

    async def _settle(self) -> None:
        """Waits until Slurm has settled what becomes of the last job, if there was one."""
        deadline = time.monotonic() + _SETTLE
        while self._number and self._is_unsettled(await self._look()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def _begin(self, attempt: Path) -> None:
        """Has a job that waits, or runs already, for the attempt of this folder."""
        if self._number and (self._job.is_pending or self._job.is_running) and self._job.restarts > self._restarts:
            self._restarts = self._job.restarts
            await self._say(f"Slurm has put job {self._number} back into its queue")
            return
        if self._number:
            await self._cancel()
        self._submitted_as, self._restarts = int(attempt.name.rpartition("_")[2]), 0
        arguments = [str(self._submitted_as), self._timeout]
        run = self._plan.run_dir
        self._number = await commands.submit(run / SCRIPT_FILE, run / LOG_FILE, arguments, self._shared)
        (run / JOB_FILE).write_text(f"{self._number}\n", encoding="ascii")
        self._job, self._cancelled = Job("PENDING"), False
        await self._say(f"submitted as job {self._number}")

    def _is_unsettled(self, job: Job) -> bool:
        return job.is_completing or ((job.is_running or job.is_pending) and job.restarts <= self._restarts)

    async def _follow(self) -> None:
        """Passes on the tasks' news until all have ended, or this restart of the job is over."""
        asked = 0.0
        deadline = time.monotonic() + _ENDING
        while not (self._is_over() or self._all_told) and time.monotonic() < deadline:
            if not self._job.is_pending:
                await self._read()
            if time.monotonic() - asked >= _ASK:
                asked = time.monotonic()
                await self._tell_of_waiting(await self._look())
            if not self._job.is_completing:
                deadline = time.monotonic() + _ENDING
            await asyncio.sleep(POLL_SECONDS)
        await self._await_last_words()
        if self._ended is None and not self._all_told:
            await self._tell_end()

    async def _await_last_words(self) -> None:
        """Reads on where all has gone well: each task has told its end then, whether that can be seen yet or not."""
        deadline = time.monotonic() + _LATE
        while self._job.state == "COMPLETED" and not (self._all_told or self._told) and time.monotonic() < deadline:
            for files in self._files.values():
                await files.read()
                files.tell_end()
            await asyncio.sleep(POLL_SECONDS)

    async def _read(self) -> None:
        """Passes on what the tasks have written, and how they have ended.

        A task that fails while Slurm ends its job may do so of that: what the job is ended for is waited for.
        """
        for files in self._files.values():
            await files.read()
        failed = [files for files in self._files.values() if files.code and not files.exited]
        if failed and not self._told and not (await self._look()).is_running:
            return
        for files in self._files.values():
            files.tell_end()

    @property
    def _all_told(self) -> bool:
        return all(files.exited for files in self._files.values())

    def _fate(self) -> str:
        """Why tasks that have no word of their own are gone, where it was not for the launcher's sake."""
        if self._ended is not None or self._told:
            return ""
        if self._is_cancelled:
            return f"job {self._number} was cancelled, and not by this launcher"
        if self._job.restarts > self._restarts:
            return "Slurm has put its job back into the queue"
        return f"Slurm has its job for {self._job.state.lower().replace('_', ' ')}"

    def _is_over(self) -> bool:
        if self._told and self._job.is_completing:
            return True
        return self._job.restarts > self._restarts or not self._job.is_active

    @property
    def _is_cancelled(self) -> bool:
        """Whether somebody else has ended the job for good."""
        return self._job.state == "CANCELLED" and not self._cancelled

    async def _cancel(self) -> None:
        """Ends the job from here."""
        self._cancelled = True
        await commands.cancel(self._number)

    async def _look(self) -> Job:
        self._job = await commands.query(self._number) or self._job
        return self._job

    async def _end(self) -> None:
        """Ends the tasks, however many of them were named."""
        await asyncio.sleep(0)  # the actions of one moment come one by one
        how, self._wanted = self._wanted, None
        if how is None or not self._number or self._is_over() or (how is self._ended is StopSignal.KILL):
            return
        self._ended = how
        if (await self._look()).is_pending:
            await self._cancel()
        elif self._job.is_running:
            if how is StopSignal.KILL:
                await self._kill()
            else:
                await commands.terminate_tasks(self._number)

    async def _kill(self) -> None:
        """Kills the tasks, until all are gone: while Slurm tells parts of a job to end, it may miss that for one."""
        killed = -_ASK
        while self._ended is StopSignal.KILL and self._job.is_running and not (self._is_over() or self._all_told):
            if time.monotonic() - killed >= _ASK:
                killed = time.monotonic()
                await commands.kill_tasks(self._number)
            await asyncio.sleep(POLL_SECONDS)

    async def _tell_of_waiting(self, job: Job) -> None:
        if job.is_pending and job.reason not in ("", "None"):
            await self._say(f"job {self._number} waits: {job.reason}")

    async def _tell_end(self) -> None:
        """Says what Slurm says of a job whose tasks could not say all."""
        await self._say(f"job {self._number} is {self._job.state.lower()} ({self._job.reason or 'None'})")
        log = self._plan.run_dir / LOG_FILE
        if log.exists():
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:]:
                await self._say(line)

    async def _say(self, text: str) -> None:
        """Shows a line of the launcher's own, once, beside those of the first task."""
        if text != self._said:
            self._said = text
            line = f"slurm: {text}"
            self._context.logs.write(self._first, "stderr", f"{line}\n".encode())
            await self._context.events.put_output(Output(self._first, "stderr", (line,)))
