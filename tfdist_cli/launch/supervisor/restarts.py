"""Whether a lost task is worth a restart, of itself or of the whole job, and how soon."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from tfdist_cli.errors import ExitCode
from tfdist_cli.launch.supervisor.failure_order import names, tells_of_another
from tfdist_cli.launch.supervisor.state import JobState, Loss, TaskState, shell_code
from tfdist_cli.spec.task_id import TaskId

BACK_OFF = 1.0
"""Seconds before the second restart in a row that has brought nothing; each further one waits twice as long."""
LONGEST_BACK_OFF = 60.0
LONG_LIFE = 60.0
"""Seconds of life that count as progress of a program which says nothing of its own."""
_FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that say nothing of the program: it was preempted, or its memory was wanted elsewhere."""


@dataclass(frozen=True)
class RestartDecision:
    """What is done about a lost task.

    Args:
        loss: what is to be started again; None when nothing is.
        not_restarted_because: why nothing is, where restarts are allowed.
    """

    loss: Loss | None = None
    not_restarted_because: str = ""


def judge(state: JobState, name: TaskId) -> RestartDecision:
    """Decides about a task that has just failed, by its role's policy, the limits, and what restarts have brought."""
    rule, most = state.rules.restart(name), state.rules.max_restarts
    if not most or rule.policy == "never" or state.tasks[name].final:
        return RestartDecision()
    task, alone = state.tasks[name], rule.policy == "replace"
    before = [loss for loss in state.losses if loss.alone == alone and (not alone or loss.task == name)]
    made_progress = not before or _has_worked(state, name, before[-1])
    if not_restarted_because := _in_vain(state, task):
        return RestartDecision(not_restarted_because=not_restarted_because)
    follows = _follows(state, name)
    if not made_progress and not follows and _same(name, task, before[-1]):
        return RestartDecision(
            not_restarted_because="not started again: it failed as it did before its restart, without a step in between"
        )
    if state.restarts >= most and not follows:
        return RestartDecision(
            not_restarted_because=f"not started again: there have been {most} restarts, "
            "as many as --max-restarts allows"
        )
    own = sum(loss.task == name and not loss.follows for loss in state.losses)
    if rule.max is not None and own >= rule.max and not follows:
        return RestartDecision(not_restarted_because=f"not started again: roles.{name.role}.restart.max is {rule.max}")
    loss = Loss(name, task, state.attempt, alone, state.step, made_progress, 0.0, follows)
    return RestartDecision(replace(loss, delay=_delay([*before, loss])))


def _follows(state: JobState, name: TaskId) -> TaskId | None:
    """The task of whose loss a failure came: one that was lost alone, and has been of no use since.

    A chief that builds its model has nobody to give the work of a worker to that is lost then.
    """
    error = state.tasks[name].error
    if not tells_of_another(error):
        return None
    named = names(error)
    lost = (loss.task for loss in reversed(state.losses) if loss.alone and loss.attempt == state.attempt)
    idle = (task for task in lost if task != name and task in state.tasks and not state.tasks[task].worked)
    return next((task for task in idle if not named or task in named), None)


def _in_vain(state: JobState, task: TaskState) -> str:
    """Why the task's own error rules another start out; empty when it does not."""
    if task.in_vain:
        return "not started again: its error says that this could not help"
    if state.rules.reports and task.code == ExitCode.USAGE:
        return "not started again: what it was asked to do cannot be done, now or later"
    return ""


def _has_worked(state: JobState, name: TaskId, before: Loss) -> bool:
    task = state.tasks[name]
    if not state.rules.reports and (task.ended_at or 0.0) - task.started_at >= LONG_LIFE:
        return True
    return task.worked if before.alone else state.step > before.step


def _same(name: TaskId, task: TaskState, before: Loss) -> bool:
    """Whether a task failed of what one of its role failed of before; numbers in the message may differ."""
    sign = _sign(task)
    return sign is not None and name.role == before.task.role and sign == _sign(before.ended)


def _sign(task: TaskState) -> tuple[object, ...] | None:
    if task.stalled:
        return ("stalled",)
    if task.cause:
        return None
    code = shell_code(task)
    if code - 128 in _FROM_OUTSIDE and not task.error:
        return None
    return code, re.sub(r"\d+", "#", task.error)


def _delay(losses: list[Loss]) -> float:
    """Nothing after progress; otherwise twice as long as the time before."""
    fruitless = 0
    for loss in reversed(losses):
        if loss.made_progress:
            break
        fruitless += 1
    return min(BACK_OFF * 2 ** min(fruitless - 1, 32), LONGEST_BACK_OFF) if fruitless else 0.0
