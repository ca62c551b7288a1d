"""One launch of a run: from a plan and its directory, through its attempts, to a report of what came of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from tfdist_cli.errors import ExitCode, TfdistError
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.run.event_log import EventLog
from tfdist_cli.launch.run.event_loop import Watcher, run_job
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.run.planner import Desk
from tfdist_cli.launch.run.report import Failure, Report, make_failure, make_report
from tfdist_cli.launch.run.secrets import Secrets
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.events import Event, EventQueue, Exited, Start
from tfdist_cli.launch.supervisor.launcher import Launcher, Outlets
from tfdist_cli.launch.supervisor.machine import begin
from tfdist_cli.launch.supervisor.state import JobState, Rules, Status, shell_code
from tfdist_cli.plan.plan import Plan
from tfdist_cli.plan.task_environment import start_environment


@dataclass(frozen=True)
class Launch:
    """Everything that is settled before the first task starts.

    Args:
        launcher: what starts the tasks.
        plan: the tasks.
        run_dir: where the run is kept.
        rules: when the job is over.
        secrets: what the tasks are given, and nobody else is to see.
        desk: answers requests to the launcher; without it there are none.
    """

    launcher: Launcher
    plan: Plan
    run_dir: RunDir
    rules: Rules
    secrets: Secrets = field(default_factory=Secrets)
    desk: Desk | None = None

    def carry_out(self, chronicle: RunSnapshot, watchers: Sequence[Watcher] = ()) -> Report:
        """Runs the plan to its end, keeping all that happens in the run's directory.

        Args:
            chronicle: takes what the tasks tell.
            watchers: who else is shown what happens.

        Raises:
            TfdistError: the job cannot begin, or not go on with other numbers of tasks; the run's directory says so.
        """
        began = time.monotonic()
        journal = EventLog(self.run_dir.events, self.run_dir.attempt)
        journal.begin()
        with _writing_the_end():
            with closing(TaskLogs(self.run_dir.attempt_folder)) as logs:
                errors = _Errors(self.run_dir, chronicle, logs)
                last = _Last(begin(self.rules, (planned.task for planned in self.plan.tasks), 0.0)[0])
                try:
                    state = asyncio.run(self._run(logs, (chronicle, journal, errors, last, *watchers)))
                except Exception as error:
                    broken = _broken(error, make_report(last.state, chronicle, logs, time.monotonic() - began))
                    journal.break_off(broken.headline, broken.seconds)
                    with suppress(OSError):  # the error itself is told, whatever can be written of it
                        self.run_dir.save_result(broken.as_json())
                    raise
            report = make_report(state, chronicle, logs, time.monotonic() - began)
            if journal.problem:
                report = report.warned(journal.problem)
            try:
                self.run_dir.save_result(report.as_json())
                for failure in report.failures:
                    errors.save(failure, state)
            except OSError as error:  # a full disk must not take away the exit code
                report = report.warned(
                    f"what came of the run could not be written to {self.run_dir.path}: {error.strerror}"
                )
        return report

    async def _run(self, logs: TaskLogs, watchers: Sequence[Watcher]) -> JobState:
        def prepare(start: Start) -> Mapping[str, str]:
            secrets = self.secrets.environment(start.task.role)
            return start_environment(logs.begin(start.task, start.attempt), self.rules.timeouts.start, secrets)

        outlets = Outlets(EventQueue(), logs, prepare, self.secrets.mask)
        return await run_job(self.launcher, self.plan, self.rules, outlets, watchers, self.desk)


@contextmanager
def _writing_the_end() -> Iterator[None]:
    """Ctrl-C is the job's while there is one; after that, one that comes late must not cost the report."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _broken(error: Exception, report: Report) -> Report:
    """The report of a job that an error of the launcher's own has ended."""
    if isinstance(error, TfdistError):
        return replace(report, exit_code=error.exit_code, headline=error.message)
    return replace(report, exit_code=ExitCode.FAILED, headline=f"{type(error).__name__}: {error}")


@dataclass
class _Last:
    """Keeps how the job last was; a watcher of it."""

    state: JobState

    def saw(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Takes the state."""
        self.state = state


@dataclass(frozen=True)
class _Errors:
    """Writes error.json for a task that has failed and has not done so itself; a watcher of the job."""

    run_dir: RunDir
    chronicle: RunSnapshot
    logs: TaskLogs

    def saw(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Writes it while what the task said is still known: one that is started again says other things."""
        if isinstance(event, Exited) and state.tasks[event.task].status in (Status.FAILED, Status.LOST):
            with suppress(OSError):  # a full disk must not end a training
                self.save(make_failure(event.task, state, self.chronicle, self.logs), state)

    def save(self, failure: Failure, state: JobState) -> None:
        error = {
            "type": "",
            "message": failure.message or failure.what,
            "hint": failure.hint or None,
            "traceback": failure.traceback,
            "exit_code": shell_code(state.tasks[failure.task]) or None,
            "last_lines": list(failure.lines),
        }
        self.run_dir.save_error(self.logs.folder(failure.task), error)
