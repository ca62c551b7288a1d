"""Profiles of running tasks: when one can be taken, and when it is over."""

from __future__ import annotations

from dataclasses import replace

from tfdist_cli.errors import UsageError
from tfdist_cli.launch.supervisor.events import ProfileAccepted
from tfdist_cli.launch.supervisor.state import JobState
from tfdist_cli.spec.task_id import TaskId

ANSWERS = ("profiled", "profile_failed")
"""The kinds of records with which a task reports the end of its profile."""


def check_profile(state: JobState, name: TaskId) -> None:
    """Checks that a task can be profiled now.

    Raises:
        UsageError: it cannot.
    """
    if name not in state.tasks:
        known = ", ".join(map(str, state.tasks))
        raise UsageError(f"the run has no task {name}", code="unknown-task", hint=f"its tasks are {known}")
    task = state.tasks[name]
    if task.status.ended or task.stop_sent:
        raise UsageError(
            f"{name} {'has exited' if task.status.ended else 'is being stopped'}",
            code="task-not-running",
            hint="choose a task that runs: `tfdist status` lists them",
        )
    if task.heartbeat_at is None:
        raise UsageError(
            f"{name} has sent no heartbeat: it is starting, or runs a program that does not use tfdist",
            code="task-not-ready",
            hint="try again when it trains; a program has to call tfdist.scope() or tfdist.fit",
        )
    if task.profile:
        raise UsageError(
            f"{name} is being profiled already",
            code="profile-in-progress",
            hint="try again when that profile is complete",
        )


def with_profile(state: JobState, event: ProfileAccepted) -> JobState:
    """The state while a profile is taken."""
    task = replace(state.tasks[event.task], profile=event.order.request)
    return replace(state, tasks=state.tasks.with_states({event.task: task}))


def without_profile(state: JobState, name: TaskId) -> JobState:
    """The state after a task's profile."""
    return replace(state, tasks=state.tasks.with_states({name: replace(state.tasks[name], profile="")}))
