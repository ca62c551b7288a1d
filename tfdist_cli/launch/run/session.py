"""One launch of a run: from a plan and a run directory, through its attempts, to a report."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace

from tfdist_cli.errors import ExitCode, TfdistError
from tfdist_cli.launch.provenance import provenance
from tfdist_cli.launch.run.directory import RunDir
from tfdist_cli.launch.run.event_log import EventLog
from tfdist_cli.launch.run.event_loop import Watcher, run_job
from tfdist_cli.launch.run.logs import TaskLogs
from tfdist_cli.launch.run.planner import RequestHandler
from tfdist_cli.launch.run.report import Failure, Report, make_failure, make_report
from tfdist_cli.launch.run.secrets import Secrets
from tfdist_cli.launch.run.snapshot import RunSnapshot
from tfdist_cli.launch.supervisor.events import Event, EventQueue, Exited, Start
from tfdist_cli.launch.supervisor.launcher import LaunchContext, Launcher
from tfdist_cli.launch.supervisor.machine import begin
from tfdist_cli.launch.supervisor.state import JobPolicy, JobState, Status, shell_code
from tfdist_cli.launch.tracking import start_trackers
from tfdist_cli.launch.usage import UsageLog
from tfdist_cli.plan.plan import Plan
from tfdist_cli.plan.task_environment import start_environment


@dataclass(frozen=True)
class Launch:
    """What a launch consists of before the first task starts.

    Args:
        launcher: starts the tasks.
        plan: the tasks.
        run_dir: the run's directory.
        policy: the user's configuration of timeouts and restarts.
        secrets: values that only the tasks may see.
        request_handler: answers requests to the launcher; None to accept none.
        trackers: what tracks the run.
    """

    launcher: Launcher
    plan: Plan
    run_dir: RunDir
    policy: JobPolicy
    secrets: Secrets = field(default_factory=Secrets)
    request_handler: RequestHandler | None = None
    trackers: Sequence[str] = ()

    def run(self, snapshot: RunSnapshot, watchers: Sequence[Watcher] = ()) -> Report:
        """Runs the plan to its end, and records everything in the run's directory.

        Args:
            snapshot: collects what the tasks report.
            watchers: other observers of the events.

        Raises:
            TfdistError: the job cannot start, or cannot continue after a resize; the run's directory has the error.
        """
        started = time.monotonic()
        event_log = EventLog(self.run_dir.events, self.run_dir.attempt)
        event_log.begin(provenance(self.plan.recipe))
        usage_log = UsageLog(self.run_dir.path, self.run_dir.attempt)
        with _sigint_ignored(), start_trackers(self.run_dir.path, self.trackers) as trackers:
            with closing(TaskLogs(self.run_dir.attempt_folder)) as logs:
                errors = _ErrorFiles(self.run_dir, snapshot, logs)
                last = _LastState(begin(self.policy, (planned.task for planned in self.plan.tasks), 0.0)[0])
                try:
                    state = asyncio.run(self._run(logs, (snapshot, event_log, usage_log, errors, last, *watchers)))
                except Exception as error:
                    report = make_report(last.state, snapshot, logs, time.monotonic() - started)
                    report = _with_error(report, error)
                    event_log.job_failed(report.headline, report.seconds)
                    with suppress(OSError):  # the error itself is printed, whether or not the file can be written
                        self.run_dir.save_result(report.as_json())
                    raise
            report = make_report(state, snapshot, logs, time.monotonic() - started)
            for problem in filter(None, (event_log.problem, usage_log.problem, *trackers.finish(report.exit_code))):
                report = report.with_warning(problem)
            try:
                self.run_dir.save_result(report.as_json())
                for failure in report.failures:
                    errors.save(failure, state)
            except OSError as error:  # a full disk must not change the exit code
                report = report.with_warning(
                    f"the result of the run could not be written to {self.run_dir.path}: {error.strerror}"
                )
        return report

    async def _run(self, logs: TaskLogs, watchers: Sequence[Watcher]) -> JobState:
        def prepare(start: Start) -> Mapping[str, str]:
            secrets = self.secrets.environment(start.task.role)
            return start_environment(logs.begin(start.task, start.attempt), self.policy.timeouts.start, secrets)

        context = LaunchContext(EventQueue(), logs, prepare, self.secrets.mask)
        return await run_job(self.launcher, self.plan, self.policy, context, watchers, self.request_handler)


@contextmanager
def _sigint_ignored() -> Iterator[None]:
    """Ignores Ctrl-C outside the job, which handles it itself: a late one must not prevent the report."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _with_error(report: Report, error: Exception) -> Report:
    """The report of a job that the launcher's own error has ended."""
    if isinstance(error, TfdistError):
        return replace(report, exit_code=error.exit_code, headline=error.message, code=error.code)
    headline = f"{type(error).__name__}: {error}"
    return replace(report, exit_code=ExitCode.FAILED, headline=headline, code="internal-error")


@dataclass
class _LastState:
    """Keeps the last state of the job; a watcher."""

    state: JobState

    def on_event(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Stores the state."""
        self.state = state


@dataclass(frozen=True)
class _ErrorFiles:
    """Writes error.json for a failed task that has not written it itself; a watcher."""

    run_dir: RunDir
    snapshot: RunSnapshot
    logs: TaskLogs

    def on_event(self, event: Event, state: JobState, now: float) -> None:  # noqa: ARG002
        """Writes the file while the snapshot still has the failed process: a restart replaces it."""
        if isinstance(event, Exited) and state.tasks[event.task].status in (Status.FAILED, Status.LOST):
            with suppress(OSError):  # a full disk must not end a training
                self.save(make_failure(event.task, state, self.snapshot, self.logs), state)

    def save(self, failure: Failure, state: JobState) -> None:
        error = {
            "type": "",
            "message": failure.message or failure.reason,
            "code": failure.code,
            "hint": failure.hint or None,
            "traceback": failure.traceback,
            "exit_code": shell_code(state.tasks[failure.task]) or None,
            "last_lines": list(failure.last_lines),
        }
        self.run_dir.save_error(self.logs.folder(failure.task), error)
