"""Runs a plan as a Slurm job: submits it, follows its tasks, requeues and ends it.

Slurm starts and ends whole jobs, so the tasks of an attempt cannot be started one by one. An attempt is one
execution of the job. Slurm requeues a job when a node fails, when it preempts the job, and before the time limit. If
the supervisor then starts all tasks again, that execution is the next attempt. If Slurm has not requeued the job, or
its tasks are others now, the script is submitted again.

A task that is added while the others run has a job of its own (`task_job`). One that leaves is signalled by the process
that waits for it. The next attempt has all of them in one job.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from tfdist_cli.launch.process.background_tasks import BackgroundTasks
from tfdist_cli.launch.run.logs import ERROR_FILE
from tfdist_cli.launch.slurm import commands
from tfdist_cli.launch.slurm.commands import NFS_SECONDS, POLL_SECONDS, QUERY_SECONDS, Job
from tfdist_cli.launch.slurm.files import TaskFiles
from tfdist_cli.launch.slurm.jobs import JOB_FILE
from tfdist_cli.launch.slurm.script import LOG_FILE, SCRIPT_FILE, render_script
from tfdist_cli.launch.slurm.task_job import TaskJob, attempt_of, write_stop
from tfdist_cli.launch.supervisor.events import Action, Exited, Output, Profile, Queued, Start, StopSignal
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.environment import START_TIMEOUT
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.protocol.profile_order import write_order
from tfdist_cli.protocol.records import TASK_DIR
from tfdist_cli.spec.strategies import may_leave
from tfdist_cli.spec.task_id import TaskId

_ENDING_SECONDS = 120.0
"""Seconds in which Slurm ends a job's tasks: it kills them after 30 by default, and gives up after another 60."""
_REQUEUE_SECONDS = 30.0
"""Seconds in which Slurm decides whether it requeues a job whose tasks have exited."""
_CLOSE_SECONDS = 2.0
"""Seconds for reading the last output of exited tasks, and for a cancelled job to be over."""
_END_SECONDS = 60.0
"""Seconds in which a job that is replaced has to end."""
_SHOWN_LINES = 10


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
        self._job_id = ""
        """The job's id; empty before the first submission."""
        self._submitted_attempt = 0
        """The attempt for which the job was submitted. Each requeue by Slurm is the next attempt."""
        self._restarts = -1
        """How often the job had been requeued when it was followed last."""
        self._job = Job("GONE")
        self._files: dict[TaskId, TaskFiles] = {}
        self._folders: dict[TaskId, Path] = {}
        self._start_timeout = ""
        self._job_env: dict[str, str] = {}
        """Variables that all tasks get through the job's environment."""
        self._pending_signal: StopSignal | None = None
        """The signal that all tasks get once the actions of this moment have been received."""
        self._stop_requested = False
        """Whether all tasks of this attempt were to be stopped. There may have been no job at that time."""
        self._script_outdated = True
        """Whether the script, or the job that runs it, has other tasks than the plan."""
        self._added: dict[TaskId, TaskJob] = {}
        """The jobs of tasks that were added in this attempt."""
        self._started: Path | None = None
        """The folder of the attempt whose tasks have been started."""
        self._leaving: dict[TaskId, StopSignal] = {}
        """The signals to single tasks that wait to be sent."""
        self._sent_signal: StopSignal | None = None
        self._background = BackgroundTasks(context.events)
        self._attempt: asyncio.Task[None] | None = None
        self._last_line = ""
        self._cancelled_here = False
        """Whether this launcher has cancelled the job."""

    def act(self, action: Action) -> None:
        """Starts all tasks when the last of them has been named, adds one, stops some, or has one profiled.

        A signal goes to all tasks if one of those that get it cannot leave alone.
        """
        if isinstance(action, Start):
            prepared = self._context.prepare(action)
            folder = Path(prepared[TASK_DIR])
            if folder.parent == self._started:
                self._background.start(self._add(action.task, prepared))
                return
            self._folders[action.task] = folder
            self._start_timeout = prepared.get(START_TIMEOUT, "")
            self._job_env = {name: prepared[name] for name in (RUN_SECRET,) if name in prepared}
            self._stop_requested = False
            if len(self._folders) == len(self._plan.cluster.tasks):  # the plan also has tasks that leave
                folders, self._folders = self._folders, {}
                self._started, self._added = folder.parent, {}
                self._attempt = self._background.start(self._run_attempt(folders, self._attempt))
            return
        if isinstance(action, Profile):
            write_order((self._added.get(action.task) or self._files[action.task]).folder, action.order)
            return
        if not (self._pending_signal or self._leaving):
            self._background.start(self._stop())
        if action.task in self._added or may_leave(self._plan.strategy, action.task.role):
            self._leaving[action.task] = action.signal
            return
        self._stop_requested = True
        if self._pending_signal is not StopSignal.KILL:
            self._pending_signal = action.signal

    def follow(self, plan: Plan) -> None:
        """Replaces the plan: the next job has its tasks."""
        self._plan = plan
        self._script_outdated = True

    async def close(self) -> None:
        """Waits for the script to exit if all tasks have exited. Otherwise, or after a timeout, cancels the job."""
        all_exited = self._all_exits_reported
        await self._background.finish(_CLOSE_SECONDS if all_exited else 0.0)
        for added in self._added.values():
            await added.close()
        if not self._job_id:
            return
        deadline = time.monotonic() + (_REQUEUE_SECONDS if all_exited else 0)
        while (
            (job := await self._query()).is_running and job.restarts <= self._restarts and time.monotonic() < deadline
        ):
            await asyncio.sleep(POLL_SECONDS)
        if job.is_active:
            await commands.cancel_and_wait(self._job_id, _CLOSE_SECONDS)

    async def _run_attempt(self, folders: dict[TaskId, Path], previous: asyncio.Task[None] | None) -> None:
        """Runs all tasks once, after the previous attempt."""
        for task in folders:
            self._context.events.put(Queued(task))
        if previous:
            await previous
        self._sent_signal = None
        await self._await_requeue()
        if self._is_cancelled_outside:
            for task in folders:
                self._context.events.put(Exited(task, -signal.SIGTERM, cause=self._exit_cause(), cancelled=True))
            return
        await self._ensure_job(folders[self._first].parent)
        if self._stop_requested:
            await self._cancel()
        attempt = self._submitted_attempt + self._restarts
        written = {task: path.parent.with_name(f"attempt_{attempt}") / path.name for task, path in folders.items()}
        self._files = {task: TaskFiles(task, written[task], self._context) for task in folders}
        await self._follow()
        cause = self._exit_cause()
        for task, files in self._files.items():
            await files.close(-signal.SIGTERM, cause, cancelled=self._is_cancelled_outside)
            error = written[task] / ERROR_FILE
            if written[task] != folders[task] and error.exists():
                error.rename(folders[task] / ERROR_FILE)

    async def _await_requeue(self) -> None:
        """Waits until Slurm has decided whether it requeues the last job."""
        deadline = time.monotonic() + _REQUEUE_SECONDS
        while self._job_id and self._is_undecided(await self._query()) and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def _ensure_job(self, attempt_folder: Path) -> None:
        """Uses the requeued job for the attempt of this folder, or submits a new job."""
        requeued = (self._job.is_pending or self._job.is_running) and self._job.restarts > self._restarts
        if self._job_id and requeued and not self._script_outdated:
            self._restarts = self._job.restarts
            await self._show(f"job {self._job_id} was requeued")
            return
        if self._job_id and requeued:
            await commands.cancel_and_wait(self._job_id, _END_SECONDS)
        elif self._job_id:
            await self._cancel()
        run_dir = self._plan.run_dir
        if self._script_outdated:
            (run_dir / SCRIPT_FILE).write_text(render_script(self._plan) + "\n", encoding="utf-8")
            self._script_outdated = False
        self._submitted_attempt, self._restarts = attempt_of(attempt_folder / "task"), 0
        arguments = [str(self._submitted_attempt), self._start_timeout]
        self._job_id = await commands.submit(run_dir / SCRIPT_FILE, run_dir / LOG_FILE, arguments, self._job_env)
        self._write_jobs()
        self._job, self._cancelled_here = Job("PENDING"), False
        await self._show(f"submitted as job {self._job_id}")

    def _write_jobs(self) -> None:
        active = [self._job_id, *(added.job_id for added in self._added.values() if added.job_id and not added.is_over)]
        (self._plan.run_dir / JOB_FILE).write_text("".join(f"{job}\n" for job in active), encoding="ascii")

    async def _add(self, task: TaskId, variables: Mapping[str, str]) -> None:
        """Starts a task in a job of its own. One that had left before has written to the same files."""
        before = self._files.pop(task, None)
        if before:
            await before.close(0, "")
        self._added[task] = TaskJob(self._plan, task, variables, self._context)
        await self._added[task].run(self._write_jobs)

    def _is_undecided(self, job: Job) -> bool:
        return job.is_completing or ((job.is_running or job.is_pending) and job.restarts <= self._restarts)

    async def _follow(self) -> None:
        """Forwards output and exits until all tasks have exited, or this execution of the job is over."""
        queried = 0.0
        deadline = time.monotonic() + _ENDING_SECONDS
        while not (self._is_over() or self._all_exits_reported) and time.monotonic() < deadline:
            if not self._job.is_pending:
                await self._read()
            if time.monotonic() - queried >= QUERY_SECONDS:
                queried = time.monotonic()
                await self._show_pending(await self._query())
            if not self._job.is_completing:
                deadline = time.monotonic() + _ENDING_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        await self._await_final_output()
        if self._sent_signal is None and not self._all_exits_reported:
            await self._show_end()

    async def _await_final_output(self) -> None:
        """Continues to read after a completed job: each task has written its exit, which may not be visible yet."""
        deadline = time.monotonic() + NFS_SECONDS
        while (
            self._job.state == "COMPLETED"
            and not (self._all_exits_reported or self._stop_requested)
            and time.monotonic() < deadline
        ):
            for files in self._files.values():
                await files.read()
                files.report_exit()
            await asyncio.sleep(POLL_SECONDS)

    async def _read(self) -> None:
        """Forwards the tasks' output and exits.

        When Slurm ends a job, its tasks may fail as a consequence. Their exits are therefore reported after the job's
        state is known.
        """
        for files in self._files.values():
            await files.read()
        failed = [files for files in self._files.values() if files.exit_code and not files.exit_reported]
        if failed and not self._stop_requested and not (await self._query()).is_running:
            return
        for files in self._files.values():
            files.report_exit()

    @property
    def _all_exits_reported(self) -> bool:
        return all(files.exit_reported for files in self._files.values())

    def _exit_cause(self) -> str:
        """Returns why tasks have exited without an exit code; empty if this launcher has stopped them."""
        if self._sent_signal is not None or self._stop_requested:
            return ""
        if self._is_cancelled_outside:
            return f"job {self._job_id} was cancelled, but not by this launcher"
        if self._job.restarts > self._restarts:
            return "Slurm has requeued its job"
        return f"Slurm reports the state of its job as {self._job.state.lower().replace('_', ' ')}"

    def _is_over(self) -> bool:
        if self._stop_requested and self._job.is_completing:
            return True
        return self._job.restarts > self._restarts or not self._job.is_active

    @property
    def _is_cancelled_outside(self) -> bool:
        """Whether the job was cancelled, but not by this launcher."""
        return self._job.state == "CANCELLED" and not self._cancelled_here

    async def _cancel(self) -> None:
        self._cancelled_here = True
        await commands.cancel(self._job_id)

    async def _query(self) -> Job:
        self._job = await commands.query(self._job_id) or self._job
        return self._job

    async def _stop(self) -> None:
        """Sends the pending signals."""
        await asyncio.sleep(0)  # the supervisor's actions of one moment arrive one by one
        stop_signal, self._pending_signal = self._pending_signal, None
        leaving, self._leaving = self._leaving, {}
        for task, own in leaving.items():
            if task in self._added:
                await self._added[task].stop(own)
            elif stop_signal is None and task in self._files:
                write_stop(self._files[task].folder, own)
        if stop_signal is None or not self._job_id or self._is_over():
            return
        if stop_signal is self._sent_signal is StopSignal.KILL:
            return
        self._sent_signal = stop_signal
        if (await self._query()).is_pending:
            await self._cancel()
        elif self._job.is_running:
            if stop_signal is StopSignal.KILL:
                await self._kill()
            else:
                await commands.terminate_tasks(self._job_id)

    async def _kill(self) -> None:
        """Kills the tasks again until all have exited: Slurm may miss a kill while it terminates parts of a job."""
        killed = -QUERY_SECONDS
        while (
            self._sent_signal is StopSignal.KILL
            and self._job.is_running
            and not (self._is_over() or self._all_exits_reported)
        ):
            if time.monotonic() - killed >= QUERY_SECONDS:
                killed = time.monotonic()
                await commands.kill_tasks(self._job_id)
            await asyncio.sleep(POLL_SECONDS)

    async def _show_pending(self, job: Job) -> None:
        if job.is_pending and job.reason not in ("", "None"):
            await self._show(f"job {self._job_id} is pending: {job.reason}")

    async def _show_end(self) -> None:
        """Shows Slurm's messages about a job that ended before all of its tasks had reported their exits."""
        await self._show(f"job {self._job_id} is {self._job.state.lower()} ({self._job.reason or 'None'})")
        log = self._plan.run_dir / LOG_FILE
        if log.exists():
            for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]:
                await self._show(line)

    async def _show(self, text: str) -> None:
        """Shows a line of the launcher with the output of the first task, unless it repeats the last one."""
        if text != self._last_line:
            self._last_line = text
            line = f"slurm: {text}"
            self._context.logs.write(self._first, "stderr", f"{line}\n".encode())
            await self._context.events.put_output(Output(self._first, "stderr", (line,)))
