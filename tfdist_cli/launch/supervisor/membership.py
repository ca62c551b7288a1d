"""Tasks that join a running training, and tasks that leave it, while the others continue.

* A task that joins is `joining` from its start until the chief has reported its first step; for a role that only
  registers itself, until it has reported that it is up. If it fails before that, its role's restart policy decides
  whether it is started again alone. The training continues in any case.
* A task that leaves because the launcher asks it to has got SIGTERM; it gets SIGKILL if it does not exit. If no task of
  its role stays, it is asked when those that join have joined; if they cannot, it stays.
* A task that has left by itself, such as one of a node that is taken away, has reported that and exited with code 0.
  That is neither a failure nor a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tfdist_cli.launch.supervisor.events import ResizeAccepted
from tfdist_cli.launch.supervisor.state import JobState, Phase, Resize, Status, TaskState
from tfdist_cli.launch.supervisor.task_table import TaskTable
from tfdist_cli.spec.roles import ROLES
from tfdist_cli.spec.strategies import joins_cluster, may_leave
from tfdist_cli.spec.task_id import TaskId

LEFT = "left"
"""The state that a task reports when it has left the training, before it exits."""


def with_changed_tasks(state: JobState, event: ResizeAccepted, now: float) -> JobState:
    """Adds the tasks that join, and marks those that leave."""
    tasks = dict(state.tasks)
    for name in event.joins:
        before = tasks.get(name)
        tasks[name] = TaskState(started_at=now, joining=True, restarts=0 if before is None else before.restarts + 1)
    for name in event.leaves:
        tasks[name] = replace(tasks[name], leaving=True, start_at=None)
    order = [*ROLES]
    ordered = sorted(tasks, key=lambda name: (order.index(name.role), name.index))
    resize = Resize(event, now, state.attempt, state.attempt_step)
    table = TaskTable.of({name: tasks[name] for name in ordered})
    return replace(state, tasks=table, resizes=(*state.resizes, resize))


def with_due_leavers(state: JobState) -> tuple[JobState, tuple[TaskId, ...]]:
    """Keeps the tasks that nobody replaces.

    Returns:
        The state, and the tasks that have to get SIGTERM, because they leave from now on.
    """
    resize = state.open_change
    if resize is None or state.phase not in (Phase.RUNNING, Phase.EVALUATING):
        return state, ()
    asked = [name for name in state.leaving if state.tasks[name].stop_sent_at is None]
    if not asked:
        return state, ()
    joining = [name for name in resize.wanted.joins if name in state.tasks and state.tasks[name].joining]
    staying = {name.role for name in state.present if name not in joining}
    failed = {name.role for name in joining if failed_to_join(state, name)}
    awaited = {name.role for name in joining if not failed_to_join(state, name)} - staying
    kept = [name for name in asked if name.role in failed - awaited - staying]
    tasks = {name: replace(state.tasks[name], leaving=False) for name in kept}
    due = tuple(name for name in asked if name.role not in awaited and name not in kept)
    return replace(state, tasks=state.tasks.with_states(tasks)), due


def exit_status_after_leaving(state: JobState, name: TaskId, task: TaskState) -> Status | None:
    """The status of a task that has exited after it left the running training; None if it did not leave."""
    if state.phase not in (Phase.RUNNING, Phase.EVALUATING) or task.stall_reason:
        return None
    registered = joins_cluster(state.policy.strategy, name.role)
    if may_leave(state.policy.strategy, name.role) and task.code == 0 and task.reported_state == LEFT:
        return Status.LEFT
    if not task.leaving:
        return None
    return Status.LEFT if not registered and task.ended_as_asked else Status.STOPPED


def with_record(state: JobState, name: TaskId, record: Mapping[str, Any]) -> JobState:
    """The state after a record about joining tasks."""
    kind = record.get("kind")
    if kind == "elastic" and state.policy.decides(name):
        why = "" if record.get("joins") is True else str(record.get("reason") or "the training takes none")
        return replace(state, takes_no_workers_because=why)
    if kind == "limit" and state.policy.decides(name):
        limit = int(record["most"]), str(record["reason"])
        return replace(state, limits={**state.limits, str(record["role"]): limit})
    if kind == "joined" and state.policy.decides(name):
        worker = str(record.get("worker"))
        return _joined(state, next((each for each in state.tasks if str(each) == worker), name))
    reported = kind == "state" and record.get("state") != "starting"
    return _joined(state, name) if reported and not joins_cluster(state.policy.strategy, name.role) else state


def _joined(state: JobState, name: TaskId) -> JobState:
    task = state.tasks[name]
    if not task.joining:
        return state
    return replace(state, tasks=state.tasks.with_states({name: replace(task, joining=False)}))


def with_finished_change(state: JobState, now: float) -> JobState:
    """The state, where the last change may be finished: all tasks that join have joined or failed, the others left."""
    resize = state.open_change
    if resize is None or state.phase not in (Phase.RUNNING, Phase.EVALUATING):
        return state
    waiting = (
        state.tasks[name] for name in resize.wanted.joins if name in state.tasks and not failed_to_join(state, name)
    )
    alive = [name for name in resize.wanted.leaves if name in state.alive]
    if any(task.joining for task in waiting) or any(state.tasks[name].leaving for name in alive):
        return state
    failed = tuple(name for name in resize.wanted.joins if failed_to_join(state, name))
    gone = [name for name in resize.wanted.leaves if name not in alive]
    lost = tuple(name for name in gone if not state.tasks[name].ended_as_asked)
    done = replace(resize, trained_at=now, failed=failed, kept=tuple(alive), lost=lost)
    return replace(state, resizes=(*state.resizes[:-1], done))


def failed_to_join(state: JobState, name: TaskId) -> bool:
    """Whether a task has failed before it joined, and is not started again."""
    task = state.tasks[name]
    return task.joining and task.status.ended and task.start_at is None


def slow_to_leave(state: JobState, now: float) -> tuple[TaskId, ...]:
    """The tasks that have not left in time, and have to be killed."""
    limit = state.policy.timeouts.shutdown
    return tuple(name for name, since in state.leaving_since.items() if now >= since + limit)
