"""Decides whether a failed task is restarted, alone or with the whole job, and after which delay."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.supervisor.state import JobState, LostTask, TaskState, shell_code
from tfdist_cli.spec.task_id import TaskId

BACK_OFF = 1.0
"""Seconds before the second restart in a row without progress. The delay doubles with each further one."""
LONGEST_BACK_OFF = 60.0
LONG_LIFE = 60.0
"""Seconds after which a program that reports nothing counts as having made progress."""
SAME_FAILURE = "not started again: it failed as before its restart, without a step in between"
NOT_RETRYABLE = "not started again: its error says that a restart cannot help"
USAGE_ERROR = "not started again: a restart cannot correct a usage error"
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that do not point to a fault of the program: preemption, or lack of memory on the machine."""


@dataclass(frozen=True)
class RestartDecision:
    """What follows from a task's failure.

    Args:
        restart: what is restarted; None if nothing is.
        not_restarted_because: why nothing is restarted, although restarts are allowed.
    """

    restart: LostTask | None = None
    not_restarted_because: str = ""


def decide_restart(state: JobState, name: TaskId) -> RestartDecision:
    """Decides about a task that has just failed: by its role's policy, the limits, and the progress since restarts."""
    spec, most = state.policy.restart(name), state.policy.max_restarts
    if not most or spec.policy == "never" or state.tasks[name].cancelled:
        return RestartDecision()
    task, alone = state.tasks[name], spec.policy == "replace"
    failed = [lost for lost in state.lost_tasks if not lost.resizing]
    before = [lost for lost in failed if lost.alone == alone and (not alone or lost.task == name)]
    made_progress = not before or _made_progress(state, name, before[-1])
    if reason := _not_retryable(state, task):
        return RestartDecision(not_restarted_because=reason)
    cause = _cause(state, name)
    if not made_progress and not cause and _same_failure(name, task, before[-1]):
        return RestartDecision(not_restarted_because=SAME_FAILURE)
    if state.restarts >= most and not cause:
        return RestartDecision(
            not_restarted_because=f"not started again: all restarts of --max-restarts {most} are used"
        )
    own = sum(lost.task == name and not lost.caused_by for lost in failed)
    if spec.max is not None and own >= spec.max and not cause:
        return RestartDecision(not_restarted_because=f"not started again: roles.{name.role}.restart.max is {spec.max}")
    lost = LostTask(name, task, state.attempt, alone, state.step, made_progress, 0.0, cause)
    return RestartDecision(replace(lost, delay=_delay([*before, lost])))


def _cause(state: JobState, name: TaskId) -> TaskId | None:
    """The lost task that caused a failure: one that is restarted alone and has not trained since.

    For example, a chief that builds its model cannot give a lost worker's work to another worker.
    """
    error = state.tasks[name].error
    if not error.is_consequence:
        return None
    named = error.tasks
    recent = (lost.task for lost in reversed(state.lost_tasks) if lost.alone and lost.attempt == state.attempt)
    idle = (task for task in recent if task != name and task in state.tasks and not state.tasks[task].made_progress)
    return next((task for task in idle if not named or task in named), None)


def _not_retryable(state: JobState, task: TaskState) -> str:
    """Why the task's own error rules out a restart; empty if it does not."""
    if not task.error.retry:
        return NOT_RETRYABLE
    if state.policy.reports and task.code == ExitCode.USAGE:
        return USAGE_ERROR
    return ""


def _made_progress(state: JobState, name: TaskId, before: LostTask) -> bool:
    """Whether there was progress since an earlier restart."""
    task = state.tasks[name]
    if not state.policy.reports and (task.ended_at or 0.0) - task.started_at >= LONG_LIFE:
        return True
    return task.made_progress if before.alone else state.step > before.step


def _same_failure(name: TaskId, task: TaskState, before: LostTask) -> bool:
    """Whether a task failed like a task of its role failed before; numbers in the message may differ."""
    signature = _signature(task)
    return signature is not None and name.role == before.task.role and signature == _signature(before.ended)


def _signature(task: TaskState) -> object:
    """What identifies a failure; None for one from outside the program.

    It is the error that the task reported: after that, it may exit with any code, as its threads may crash meanwhile.
    """
    if task.stall_reason:
        return "stalled"
    if task.cause:
        return None
    if task.error.text:
        return re.sub(r"\d+", "#", task.error.text)
    code = shell_code(task)
    return None if code - 128 in _FROM_OUTSIDE else code


def _delay(lost: list[LostTask]) -> float:
    """No delay after progress; otherwise twice the previous one."""
    fruitless = 0
    for each in reversed(lost):
        if each.made_progress:
            break
        fruitless += 1
    return min(BACK_OFF * 2 ** min(fruitless - 1, 32), LONGEST_BACK_OFF) if fruitless else 0.0
