"""One attempt at a run: from a plan and its directory to a report of what came of it."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

from tfdist_cli.launch.base import Launcher, Outlets
from tfdist_cli.launch.chronicle import Chronicle
from tfdist_cli.launch.events import EventQueue
from tfdist_cli.launch.job import Watcher, run_job
from tfdist_cli.launch.journal import Journal
from tfdist_cli.launch.logs import TaskLogs
from tfdist_cli.launch.report import Report, make_report
from tfdist_cli.launch.run_dir import RunDir
from tfdist_cli.launch.supervisor import JobState, Rules, shell_code
from tfdist_cli.plan import Plan
from tfdist_cli.records import ENABLED
from tfdist_cli.spec.task_id import TaskId


@dataclass(frozen=True)
class Attempt:
    """Everything that is settled before the first task starts.

    Args:
        launcher: what starts the tasks.
        plan: the tasks.
        run_dir: where the run is kept.
        rules: when the job is over.
    """

    launcher: Launcher
    plan: Plan
    run_dir: RunDir
    rules: Rules

    def carry_out(self, chronicle: Chronicle, watchers: Sequence[Watcher] = ()) -> Report:
        """Runs the plan to its end, keeping all that happens in the run's directory.

        Args:
            chronicle: takes what the tasks tell.
            watchers: who else is shown what happens.
        """
        began = time.monotonic()
        journal = Journal(self.run_dir.events, self.run_dir.attempt)
        with closing(TaskLogs(self.run_dir.attempt_folder)) as logs:
            state = asyncio.run(self._run(logs, (chronicle, journal, *watchers)))
        report = make_report(state, chronicle, logs, time.monotonic() - began)
        with suppress(OSError):  # a full disk must not take away the exit code
            self._keep(report, state)
        return report

    async def _run(self, logs: TaskLogs, watchers: Sequence[Watcher]) -> JobState:
        outlets = Outlets(EventQueue(), logs, self._environment(), self._task_environment(logs))
        return await run_job(self.launcher, self.plan, self.rules, outlets, watchers)

    def _environment(self) -> Mapping[str, str]:
        return {
            ENABLED: "1",
            "TFDIST_LAUNCHER_PID": str(os.getpid()),
            "TFDIST_START_TIMEOUT": str(self.rules.timeouts.start),
        }

    def _task_environment(self, logs: TaskLogs) -> Mapping[TaskId, Mapping[str, str]]:
        return {planned.task: {"TFDIST_TASK_DIR": str(logs.make_folder(planned.task))} for planned in self.plan.tasks}

    def _keep(self, report: Report, state: JobState) -> None:
        self.run_dir.save_result(report.as_json())
        for failure in report.failures:
            self.run_dir.save_error(
                failure.task,
                {
                    "type": "",
                    "message": failure.message or failure.what,
                    "hint": failure.hint or None,
                    "traceback": failure.traceback,
                    "exit_code": shell_code(state.tasks[failure.task]) or None,
                    "last_lines": list(failure.lines),
                },
            )
