"""When a job goes on, starts again and ends: a pure state machine, (state, event, now) → (state, actions).

It has no clock and no processes. The rules, which docs and exit codes rest on:

* The tasks that *decide* are the chief in `parameter_server`, and every task that trains elsewhere. The training is
  done when each of them has ended with 0.
* A task that ends with another code before that is a failure, and so is a ps or worker of `parameter_server`, or a task
  of tf.data's service, that ends at all before the chief has said that it is done, and a task that the launcher killed
  because it stood still. What follows is its role's restart policy: it is started again alone, or all tasks are, or the
  job ends. See `restarts.py` for when a restart is worth it. A failed evaluator never ends the training.
* After the training the evaluator has bounded time for the last checkpoint; then every task is told to end, and killed
  if it doesn't.
* When a failed task ends the attempt, and on a signal to the launcher, the tasks that decide are told to end first, so
  that they can save; then the others. Without a ps, or another task that decides, nothing can be saved.
* A job that is started again first ends as any other, and then begins anew, after a pause. A signal ends it for good.
* A job that is resized ends like one that is told to, so that it can save, and begins anew at once with its new tasks.
  That is no restart: no limit counts it. When its training is done before it has ended, it is done.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfdist_cli.launch.supervisor.events import (
    Action,
    End,
    Event,
    Exited,
    How,
    Queued,
    Recorded,
    Resized,
    Signalled,
    Start,
    Started,
    Tick,
)
from tfdist_cli.launch.supervisor.restarts import judge
from tfdist_cli.launch.supervisor.stall import beat, look, moved, silent_when_it_failed
from tfdist_cli.launch.supervisor.state import KILL_TIMEOUT, JobState, Phase, Resize, Rules, Status, TaskState
from tfdist_cli.protocol.run_files import number
from tfdist_cli.spec.task_id import TaskId

RESTART_GRACE = 1.0
"""Seconds that a recipe's tasks have to end, before a restart, when there is nothing that they could save."""

Step = tuple[JobState, tuple[Action, ...]]


def begin(rules: Rules, tasks: Iterable[TaskId], now: float) -> Step:
    """The state before anything has happened, and the start of every task."""
    states = {task: TaskState(started_at=now) for task in tasks}
    return JobState(rules, states, began=now, moved_at=now), tuple(Start(task) for task in states)


def step(state: JobState, event: Event, now: float) -> Step:
    """What follows from one event."""
    match event:
        case Exited():
            return _exited(state, event, now)
        case Queued() | Started() | Recorded():
            return _told(state, event, now), ()
        case Signalled():
            return _signalled(state, event.signum, now)
        case Resized() if not state.unready:
            resize = Resize(event, now, state.attempt, state.here)
            state = replace(state, resizes=(*state.resizes, resize), restarting=True, resizing=True)
            return _wind_down(state, now)
        case Tick():
            return _ticked(state, now)
    return state, ()


def _told(state: JobState, event: Queued | Started | Recorded, now: float) -> JobState:
    """The state after news of a task. The time of one that waits for a place to run in begins when it has got one."""
    if isinstance(event, Recorded):
        return _recorded(state, event.task, event.record, now)
    task = state.tasks[event.task]
    if isinstance(event, Queued):
        return _with(state, event.task, replace(task, queued=True))
    if not task.queued:
        return state
    return _with(replace(moved(state, now), began=now), event.task, replace(task, queued=False, started_at=now))


def _exited(state: JobState, event: Exited, now: float) -> Step:
    task = state.tasks[event.task]
    if task.status.ended:
        return state, ()
    task = replace(task, code=event.code, ended_at=now - event.ago, oom_killed=event.oom_killed)
    task = replace(task, cause=event.cause, final=event.final)
    task = replace(task, status=_outcome(state, event.task, task))
    state = _with(state, event.task, task)
    return _go_on(state, event.task, now)


def _go_on(state: JobState, ended: TaskId, now: float) -> Step:
    """What follows when a task has ended."""
    match state.phase:
        case Phase.RUNNING | Phase.EVALUATING if state.tasks[ended].status is Status.FAILED:
            return _failed(state, ended, now)
        case Phase.RUNNING:
            return _evaluate(state, now) if state.trained else (state, ())
        case Phase.EVALUATING if not _evaluators(state):
            return _stop(state, now)
        case Phase.SAVING if not _deciding(state):
            if state.resizing and state.trained:
                return _evaluate(replace(state, restarting=False, resizing=False), now)
            return _stop(state, now)
    return (state, ()) if state.alive else _end(state, now)


def _outcome(state: JobState, name: TaskId, task: TaskState) -> Status:
    """How a task that has just ended did so."""
    wanted = state.phase is Phase.RUNNING or (state.phase is Phase.EVALUATING and name.traits.outlives_training)
    if task.stalled and (wanted or state.failing):
        return Status.FAILED
    finished = state.resizing and state.rules.decides(name) and task.code == 0
    if task.told_at is not None and (task.ended_at is None or task.ended_at >= task.told_at) and not finished:
        return _outcome_of_told(state, name, task)
    if name.traits.outlives_training and state.phase in (Phase.RUNNING, Phase.EVALUATING):
        return Status.FAILED if task.code else Status.DONE
    if state.phase is Phase.RUNNING:
        over = state.rules.decides(name) or state.is_over
        return Status.DONE if task.code == 0 and over else Status.FAILED
    if state.failing and task.code != 0:
        return Status.FAILED
    return Status.DONE if task.code == 0 else Status.STOPPED


def _outcome_of_told(state: JobState, name: TaskId, task: TaskState) -> Status:
    """How a task ended that was told to; one that only served, until the others were done, is done itself."""
    if (state.failing or state.late) and _failed_all_the_same(task):
        return Status.FAILED
    return Status.DONE if state.served(name) and task.obeyed and not task.was_killed else Status.STOPPED


def _failed_all_the_same(task: TaskState) -> bool:
    """Whether a task that was told to end reported an error of its own, before that or instead of ending as told.

    The exit code alone says nothing: it is the program's answer to the signal, whatever it is. SIGKILL is no answer:
    where the launcher has not sent it, the task was lost just before it was told.
    """
    if task.code == -signal.SIGKILL and not task.obeyed:
        return True
    if task.error_at is None or task.code == 0:
        return False
    return not task.obeyed or (task.told_at is not None and task.error_at < task.told_at)


def _failed(state: JobState, name: TaskId, now: float) -> Step:
    """A task has failed while the training or the evaluator went on."""
    verdict = judge(state, name)
    loss = verdict.loss
    if loss is None:
        state = _with(state, name, replace(state.tasks[name], not_restarted_because=verdict.not_restarted_because))
        if not name.traits.optional:
            return _wind_down(replace(silent_when_it_failed(state, name, now), failing=True), now)
        over = state.phase is Phase.EVALUATING and not _evaluators(state)
        return _stop(state, now) if over else (state, ())
    state = replace(state, losses=(*state.losses, loss))
    if loss.alone:
        lost = replace(state.tasks[name], status=Status.LOST, start_at=now + loss.delay)
        return _with(state, name, lost), ()
    state = replace(silent_when_it_failed(state, name, now), failing=True, restarting=True)
    if state.rules.decides(name) or name.traits.holds_variables:
        return _stop(state, now, RESTART_GRACE if state.rules.reports else state.rules.timeouts.shutdown)
    return _wind_down(state, now)


def _start_due(state: JobState, now: float) -> Step:
    """Starts the lost tasks whose time has come."""
    due = [name for name, task in state.tasks.items() if task.start_at is not None and task.start_at <= now]
    again = {name: TaskState(started_at=now, restarts=state.tasks[name].restarts + 1) for name in due}
    return replace(state, tasks={**state.tasks, **again}), tuple(Start(name, state.attempt) for name in due)


def _again(state: JobState, now: float) -> Step:
    """Starts every task once more, or those that there are to be from now on."""
    attempt = state.attempt + 1
    names = state.resizes[-1].wanted.tasks if state.resizing else state.tasks
    restarts = {name: task.restarts + 1 for name, task in state.tasks.items()}
    tasks = {name: TaskState(started_at=now, restarts=restarts.get(name, 0)) for name in names}
    state = replace(moved(state, now), tasks=tasks, attempt=attempt, began=now, here=None)
    state = replace(state, phase=Phase.RUNNING, until=None, restarting=False, resizing=False, failing=False)
    return state, tuple(Start(name, attempt) for name in tasks)


def _recorded(state: JobState, name: TaskId, record: Mapping[str, Any], now: float) -> JobState:
    task, kind = state.tasks[name], record.get("kind")
    if task.status.ended:
        return state
    if kind == "beat":
        return beat(state, name, number(record.get("computed")), now, held=bool(record.get("held")))
    if kind == "error":
        error = f"{record.get('type', '')}: {record.get('message', '')}"
        told = replace(task, error_at=now, error=error, in_vain=record.get("retry") is False)
        return state if task.error_at is not None else _with(state, name, told)
    if kind == "state":
        task = replace(task, doing=str(record.get("state", "")))
    if task.status is Status.STARTING and record.get("state") != "starting":
        task = replace(task, status=Status.UP)
    state = _with(state, name, replace(task, worked=task.worked or kind == "evaluation"))
    if kind == "progress":
        return _progressed(_trained_again(state, now), record, now)
    if kind == "resumed":
        state = _resumed(state, number(record.get("step")))
    return moved(state, now) if state.rules.decides(name) else state


def _resumed(state: JobState, step: float | None) -> JobState:
    """The state after the training has said which checkpoint it goes on from."""
    if not state.resizes or state.resizing or step is None:
        return state
    *before, last = state.resizes
    last = replace(last, resumed=int(step)) if last.resumed is None else last
    return replace(state, resizes=(*before, last))


def _trained_again(state: JobState, now: float) -> JobState:
    """The state after a step of the training, which may be the first with other numbers of tasks."""
    if not state.resizes or state.resizing or state.resizes[-1].trained_at is not None:
        return state
    *before, last = state.resizes
    return replace(state, resizes=(*before, replace(last, trained_at=now)))


def _progressed(state: JobState, record: Mapping[str, Any], now: float) -> JobState:
    here, rates = number(record.get("step")), record.get("workers")
    if here is None or here == state.here:
        return state
    state = replace(moved(state, now), here=int(here), step=max(state.step, int(here)))
    took = {str(name): bool(rate) for name, rate in rates.items()} if isinstance(rates, Mapping) else {}
    tasks = {
        name: replace(task, worked=task.worked or took[str(name)], lags=not took[str(name)] and any(took.values()))
        if str(name) in took
        else task
        for name, task in state.tasks.items()
    }
    return replace(state, tasks=tasks)


def _signalled(state: JobState, signum: int, now: float) -> Step:
    if state.phase is Phase.RUNNING:
        return _wind_down(replace(state, signum=signum), now)
    if state.phase is Phase.EVALUATING:
        return _stop(replace(state, signum=signum), now)
    if state.restarting:
        state = replace(state, signum=signum, restarting=False, resizing=False)
        return _end(state, now) if state.phase is Phase.PAUSED else (state, ())
    if state.phase in (Phase.SAVING, Phase.STOPPING) and signum == signal.SIGINT:
        return _kill(state, now)
    return state, ()


def _ticked(state: JobState, now: float) -> Step:
    if state.deadline is None or now < state.deadline:
        return state, ()
    if state.phase in (Phase.RUNNING, Phase.EVALUATING) and (state.until is None or now < state.until):
        return _looked_after(state, now)
    return _timed_out(state, now)


def _timed_out(state: JobState, now: float) -> Step:
    """What follows when a phase's time is over."""
    match state.phase:
        case Phase.EVALUATING:
            return _stop(replace(state, unscored=True), now)
        case Phase.SAVING:
            slow = _deciding(state)
            state, killed = _tell(state, slow, How.KILL, now)
            state, told = _stop(state, now)
            return state, killed + told
        case Phase.STOPPING:
            return _kill(state, now)
        case Phase.PAUSED:
            return _again(state, now)
    return _end(state, now)


def _looked_after(state: JobState, now: float) -> Step:
    """Starts who is to be started, and kills who doesn't come up or stands still; what follows is heard as an exit."""
    overdue = [name for name in state.expected if now >= state.tasks[name].started_at + state.rules.timeouts.start]
    if any(state.tasks[name].started_at <= state.began for name in overdue):
        return _stop(replace(state, late=state.starting), now)
    if any(now >= (state.tasks[name].told_at or 0.0) + KILL_TIMEOUT for name in state.dying):
        return _wind_down(replace(state, failing=True), now)
    state, started = _start_due(state, now)
    state, standing = look(state, now)
    standing |= dict.fromkeys(overdue, f"it did not come up within {state.rules.timeouts.start:g} s")
    for name, reason in standing.items():
        state = _with(state, name, replace(state.tasks[name], stalled=reason))
    state, killed = _tell(state, tuple(standing), How.KILL, now)
    return state, started + killed


def _evaluate(state: JobState, now: float) -> Step:
    state = _starting_none(state, training_only=True)
    if not _evaluators(state):
        return _stop(state, now)
    return replace(state, phase=Phase.EVALUATING, until=now + state.rules.timeouts.evaluator), ()


def _wind_down(state: JobState, now: float) -> Step:
    """Tells the tasks that decide to end, with the others still there: without them a chief cannot end its step."""
    if not _deciding(state):
        return _stop(state, now)
    state = replace(_starting_none(state), phase=Phase.SAVING, until=now + state.rules.timeouts.shutdown)
    return _tell(state, _deciding(state), How.TERMINATE, now)


def _stop(state: JobState, now: float, grace: float | None = None) -> Step:
    """Tells every task to end that has not been told yet."""
    state = _starting_none(state)
    if not state.alive:
        return _end(state, now)
    grace = state.rules.timeouts.shutdown if grace is None else min(grace, state.rules.timeouts.shutdown)
    state = replace(state, phase=Phase.STOPPING, until=now + grace)
    return _tell(state, tuple(task for task in state.alive if state.tasks[task].told is None), How.TERMINATE, now)


def _kill(state: JobState, now: float) -> Step:
    state = replace(state, phase=Phase.KILLING, until=now + KILL_TIMEOUT)
    return _tell(state, tuple(task for task in state.alive if state.tasks[task].told is not How.KILL), How.KILL, now)


def _end(state: JobState, now: float) -> Step:
    """All tasks have ended, or those that are left cannot be ended: the last of it, or the pause before a restart."""
    if not state.restarting or state.alive:
        return replace(state, phase=Phase.ENDED, until=None, restarting=False), ()
    if state.resizing:
        return replace(state, phase=Phase.PAUSED, until=now), ()
    *before, loss = state.losses
    first = state.failures[0]  # what was seen first may be a consequence
    loss = replace(loss, task=first, ended=state.tasks[first])
    return replace(state, losses=(*before, loss), phase=Phase.PAUSED, until=now + loss.delay), ()


def _tell(state: JobState, names: tuple[TaskId, ...], how: How, now: float) -> Step:
    told = {}
    for name in names:
        task = state.tasks[name]
        told[name] = replace(task, told=how, told_at=now if task.told_at is None else task.told_at)
    return replace(state, tasks={**state.tasks, **told}), tuple(End(name, how) for name in names)


def _starting_none(state: JobState, *, training_only: bool = False) -> JobState:
    """Cancels the restarts that are due: of all tasks, or of those whose work ends with the training."""
    tasks = {
        name: task if training_only and name.traits.outlives_training else replace(task, start_at=None)
        for name, task in state.tasks.items()
    }
    return replace(state, tasks=tasks)


def _with(state: JobState, name: TaskId, task: TaskState) -> JobState:
    return replace(state, tasks={**state.tasks, name: task})


def _deciding(state: JobState) -> tuple[TaskId, ...]:
    """The tasks that can save."""
    return tuple(task for task in state.alive if state.rules.decides(task) and not state.tasks[task].stalled)


def _evaluators(state: JobState) -> tuple[TaskId, ...]:
    """The evaluators that are there, or will be."""
    there = (name for name, task in state.tasks.items() if not task.status.ended or task.start_at is not None)
    return tuple(name for name in there if name.traits.outlives_training)
