"""The job of one task that is added while the others run: it is submitted, followed, and ended alone."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.slurm import commands
from tfdist_cli.launch.slurm.commands import Job
from tfdist_cli.launch.slurm.files import TaskFiles
from tfdist_cli.launch.slurm.script import LOG_FILE, render_task_script
from tfdist_cli.launch.supervisor.events import Exited, Output, Queued, StopSignal
from tfdist_cli.launch.supervisor.launcher import LaunchContext
from tfdist_cli.plan.plan import Plan
from tfdist_cli.protocol.environment import START_TIMEOUT
from tfdist_cli.protocol.masking import RUN_SECRET
from tfdist_cli.protocol.records import STOP_FILE, TASK_DIR
from tfdist_cli.spec.task_id import TaskId

REJECTED = 126
"""The exit code of a task whose job Slurm has not accepted."""
_NAMES: Mapping[StopSignal, str] = {
    StopSignal.TERMINATE: signal.SIGTERM.name,
    StopSignal.KILL: signal.SIGKILL.name,
}


def attempt_of(folder: Path) -> int:
    """Returns the attempt of a task's folder."""
    return int(folder.parent.name.rpartition("_")[2])


def write_stop(folder: Path, stop_signal: StopSignal) -> None:
    """Asks the process that waits for a task to send it a signal, see `task/slurm_step.py`."""
    new = folder / f".{STOP_FILE}.new"
    new.write_text(_NAMES[stop_signal], encoding="ascii")
    new.replace(folder / STOP_FILE)


class TaskJob:
    """The job of an added task.

    Args:
        plan: the tasks, with this one.
        task: the task.
        variables: the variables of its start.
        context: takes its events and its output.
    """

    def __init__(self, plan: Plan, task: TaskId, variables: Mapping[str, str], context: LaunchContext) -> None:
        self.job_id = ""
        """The job's id; empty before it is submitted."""
        self.is_over = False
        """Whether the exit of the task has been reported."""
        self._plan = plan
        self._task = task
        self._variables = variables
        self._context = context
        self.folder = Path(variables[TASK_DIR])
        self._files = TaskFiles(task, self.folder, context)
        self._job = Job("PENDING")
        self._stop_requested = False
        self._cancelled_here = False
        self._last_line = ""

    async def run(self, submitted: Callable[[], None]) -> None:
        """Submits the job, and reports what the task does until it has exited.

        Args:
            submitted: called when the job has an id.
        """
        self._context.events.put(Queued(self._task))
        try:
            self.job_id = await self._submit()
        except UsageError as error:
            await self._show(error.message)
            self.is_over = True
            self._context.events.put(Exited(self._task, REJECTED, cause=error.message))
            return
        submitted()
        await self._show(f"{self._task} is submitted as job {self.job_id}")
        if self._stop_requested:
            await self._cancel()
        await self._follow()
        self.is_over = True
        outside = self._job.state == "CANCELLED" and not self._cancelled_here
        state = self._job.state.lower().replace("_", " ")
        await self._files.close(-signal.SIGTERM, "" if self._stop_requested else f"its job {self.job_id} is {state}",
                                cancelled=outside)  # fmt: skip

    async def stop(self, stop_signal: StopSignal) -> None:
        """Sends the task a signal; a job that is pending, or whose task is to be killed, is cancelled."""
        self._stop_requested = True
        if not self.job_id or self.is_over:
            return
        write_stop(self.folder, stop_signal)
        job = await commands.query(self.job_id) or self._job
        if job.is_pending or stop_signal is StopSignal.KILL:
            await self._cancel()

    async def close(self) -> None:
        """Cancels the job of a task that has not exited."""
        if self.job_id and not self.is_over:
            await self._cancel()

    async def _cancel(self) -> None:
        self._cancelled_here = True
        await commands.cancel(self.job_id)

    async def _submit(self) -> str:
        run_dir = self._plan.run_dir
        script = run_dir / f"slurm_{self._task.slug}.sh"
        (self.folder / STOP_FILE).unlink(missing_ok=True)
        script.write_text(render_task_script(self._plan, self._task) + "\n", encoding="utf-8")
        arguments = [str(attempt_of(self.folder)), self._variables.get(START_TIMEOUT, "")]
        env = {name: self._variables[name] for name in (RUN_SECRET,) if name in self._variables}
        return await commands.submit(script, run_dir / LOG_FILE, arguments, env)

    async def _follow(self) -> None:
        """Forwards the output until the task has reported its exit, or its job is over."""
        queried = ended = 0.0
        while self._files.exit_code is None:
            await self._files.read()
            now = time.monotonic()
            if now - queried >= commands.QUERY_SECONDS:
                queried = now
                self._job = await commands.query(self.job_id) or self._job
                if self._job.is_pending and self._job.reason not in ("", "None"):
                    await self._show(f"job {self.job_id} is pending: {self._job.reason}")
            if not self._job.is_active:
                ended = ended or now
                if self._job.state != "COMPLETED" or self._stop_requested or now - ended >= commands.NFS_SECONDS:
                    return
            await asyncio.sleep(commands.POLL_SECONDS)

    async def _show(self, text: str) -> None:
        if text != self._last_line:
            self._last_line = text
            line = f"slurm: {text}"
            self._context.logs.write(self._task, "stderr", f"{line}\n".encode())
            await self._context.events.put_output(Output(self._task, "stderr", (line,)))
