"""When a job continues, restarts and ends: a pure state machine, (state, event, now) → (state, actions).

It has no clock and no processes. Its rules, on which the documentation and the exit codes rest:

* The *deciding* tasks are the chief with `parameter_server`, and every training task otherwise. The training is done
  when each of them has exited with code 0.
* These are failures: a deciding task that exits with another code; a ps or worker of `parameter_server`, or a task of
  tf.data's service, that exits before the chief has reported that it is done; a deciding task that exits, whatever its
  code, before it has joined the cluster in which another one waits for it; a stalled task that the launcher kills.
  The restart policy of the task's role follows: the task restarts alone, all tasks restart, or the job ends. See
  `restarts.py` for when a restart is useful. A failed evaluator never ends the training.
* After the training the evaluator has limited time for the last checkpoint. Then every task gets SIGTERM, and SIGKILL
  if it does not exit.
* When a failed task ends the attempt, or the launcher gets a signal, the deciding tasks get SIGTERM first, so that they
  can save; the other tasks get it afterwards. Without a ps, or without another deciding task, nothing can be saved.
* A job that restarts first ends like any other. After a delay all its tasks start again. A signal ends it for good.
* Tasks of some roles join and leave while the others continue; see `membership.py`.
* A job that is resized in another way ends as after a signal, so that it can save. All tasks of its new size start at
  once. That is not a restart: no limit counts it. If its training is done before all tasks have exited, it is done. If
  those tasks fail before their first step, and no restart follows, the tasks of the numbers before start again.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tfdist_cli.launch.supervisor.events import (
    Action,
    Event,
    Exited,
    Profile,
    ProfileAccepted,
    Queued,
    RecordReceived,
    ResizeAccepted,
    SignalReceived,
    Start,
    Started,
    Stop,
    StopSignal,
    Tick,
)
from tfdist_cli.launch.supervisor.failure_order import ReportedError
from tfdist_cli.launch.supervisor.membership import (
    exit_status_after_leaving,
    slow_to_leave,
    with_changed_tasks,
    with_due_leavers,
    with_finished_change,
    with_record,
)
from tfdist_cli.launch.supervisor.profiling import ANSWERS, with_profile, without_profile
from tfdist_cli.launch.supervisor.restarts import decide_restart
from tfdist_cli.launch.supervisor.stall import find_stalled, with_heartbeat, with_progress, with_silent_tasks
from tfdist_cli.launch.supervisor.state import (
    BEFORE_JOINING,
    EVALUATING,
    KILL_TIMEOUT,
    NOT_TRAINING_YET,
    WAITING,
    JobPolicy,
    JobState,
    LostTask,
    Phase,
    Resize,
    Status,
    TaskState,
)
from tfdist_cli.launch.supervisor.task_table import TaskTable
from tfdist_cli.protocol.run_files import number
from tfdist_cli.spec.strategies import holds_variables
from tfdist_cli.spec.task_id import TaskId

RESTART_GRACE = 1.0
"""Seconds from SIGTERM to SIGKILL for a recipe's tasks before a restart, if there is nothing that they could save."""

Step = tuple[JobState, tuple[Action, ...]]


def begin(policy: JobPolicy, tasks: Iterable[TaskId], now: float) -> Step:
    """The initial state, and the start of every task."""
    states = TaskTable.of({task: TaskState(started_at=now) for task in tasks})
    state = JobState(policy, states, attempt_started_at=now, progressed_at=now)
    return state, tuple(Start(task) for task in states)


def step(state: JobState, event: Event, now: float) -> Step:
    """The state and the actions after one event."""
    state, actions = _after(state, event, now)
    state, due = with_due_leavers(state)
    state, stops = _send(state, due, StopSignal.TERMINATE, now)
    return with_finished_change(state, now), (*actions, *stops)


def _after(state: JobState, event: Event, now: float) -> Step:
    match event:
        case Exited():
            return _exited(state, event, now)
        case Queued() | Started() | RecordReceived():
            return _after_report(_reported(state, event, now), event, now)
        case SignalReceived():
            return _signalled(state, event.signum, now)
        case ResizeAccepted() | ProfileAccepted():
            return _requested(state, event, now)
        case Tick() if state.deadline is not None and now >= state.deadline:
            return _timed_out(state, now)
    return state, ()


def _requested(state: JobState, event: ResizeAccepted | ProfileAccepted, now: float) -> Step:
    """After a request for a profile, or for other numbers of tasks."""
    if isinstance(event, ProfileAccepted):
        return with_profile(state, event), (Profile(event.task, event.order),)
    return (state, ()) if state.not_resizable_because else _resized(state, event, now)


def _resized(state: JobState, event: ResizeAccepted, now: float) -> Step:
    """After a request for other numbers of tasks: while the others continue, or through a checkpoint."""
    if event.is_live:
        return with_changed_tasks(state, event, now), tuple(Start(name, state.attempt) for name in event.joins)
    resize = Resize(event, now, state.attempt, state.attempt_step, before=state.wanted)
    state = replace(state, resizes=(*state.resizes, resize), restarting=True, resizing=True)
    return _save_and_stop(state, now)


def _reported(state: JobState, event: Queued | Started | RecordReceived, now: float) -> JobState:
    """The state after a task was queued or started, or sent a record.

    The start timeout of a queued task begins when it leaves the queue.
    """
    if isinstance(event, RecordReceived) and event.record.get("kind") in ANSWERS:
        return without_profile(state, event.task)
    if isinstance(event, RecordReceived):
        return _recorded(state, event.task, event.record, now)
    task = state.tasks[event.task]
    if isinstance(event, Queued):
        return _with(state, event.task, replace(task, queued=True))
    if not task.queued:
        return state
    state = replace(with_progress(state, now), attempt_started_at=now)
    return _with(state, event.task, replace(task, queued=False, started_at=now))


def _exited(state: JobState, event: Exited, now: float) -> Step:
    task = state.tasks[event.task]
    if task.status.ended:
        return state, ()
    task = replace(task, code=event.code, ended_at=now - event.ago, oom_killed=event.oom_killed)
    task = replace(task, cause=event.cause, cancelled=event.cancelled)
    status = exit_status_after_leaving(state, event.task, task) or _exit_status(state, event.task, task)
    task = replace(task, status=status)
    state = _with(state, event.task, task)
    if state.resizing and not state.failing and state.policy.decides(event.task) and not task.ended_as_asked:
        state = _lost_in_resize(state, event.task)
    return _after_exit(state, event.task, now)


def _lost_in_resize(state: JobState, name: TaskId) -> JobState:
    """The state after a task has exited that was to save before a resize, and was killed or failed."""
    *before, last = state.resizes
    resize = replace(last, lost=(*last.lost, name))
    return replace(state, resizes=(*before, resize), lost_tasks=(*state.lost_tasks, _cost_of_resize(state, name)))


def _cost_of_resize(state: JobState, name: TaskId) -> LostTask:
    task = state.tasks[name]
    return LostTask(name, task, state.attempt, False, state.step, made_progress=True, delay=0.0, resizing=True)


def _revert_resize(state: JobState, name: TaskId, now: float) -> Step:
    """After a failure for which the job cannot train with the numbers of a resize: the ones from before start again."""
    *before, last = state.resizes
    lost = _cost_of_resize(state, name)
    resizes, lost_tasks = (*before, replace(last, reverted=lost)), (*state.lost_tasks, lost)
    state = replace(with_silent_tasks(state, name, now), resizes=resizes, lost_tasks=lost_tasks)
    return _stop(replace(state, failing=True, restarting=True, resizing=True), now, RESTART_GRACE)


def _after_exit(state: JobState, exited: TaskId, now: float) -> Step:
    match state.phase:
        case Phase.RUNNING | Phase.EVALUATING if state.tasks[exited].status is Status.FAILED:
            return _failed(state, exited, now)
        case Phase.RUNNING:
            return _evaluate(state, now) if state.training_done else (state, ())
        case Phase.EVALUATING if not _evaluators(state):
            return _stop(state, now)
        case Phase.SAVING if not _deciding(state):
            if state.resizing and state.training_done:
                return _evaluate(replace(state, restarting=False, resizing=False), now)
            return _stop(state, now)
    return (state, ()) if state.alive else _end(state, now)


def _exit_status(state: JobState, name: TaskId, task: TaskState) -> Status:
    """The status of a task that has just exited."""
    needed = state.phase is Phase.RUNNING or (state.phase is Phase.EVALUATING and name.traits.outlives_training)
    if task.stall_reason and (needed or state.failing):
        return Status.FAILED
    finished = state.resizing and state.policy.decides(name) and task.code == 0
    if task.stop_sent_at is not None and (task.ended_at is None or task.ended_at >= task.stop_sent_at) and not finished:
        return _exit_status_after_stop(state, name, task)
    if name.traits.outlives_training and state.phase in (Phase.RUNNING, Phase.EVALUATING):
        return Status.FAILED if task.code else Status.DONE
    if state.phase is Phase.RUNNING:
        may_exit = state.policy.decides(name) or state.deciding_tasks_done or _deciding_task_fails(state)
        awaited = _is_awaited(state, name, task)
        return Status.DONE if task.code == 0 and may_exit and not awaited else Status.FAILED
    if state.failing and task.code != 0:
        return Status.FAILED
    return Status.DONE if task.code == 0 else Status.STOPPED


def _is_awaited(state: JobState, name: TaskId, task: TaskState) -> bool:
    """Whether a deciding task has reported nothing of joining the cluster, and another one waits for that."""
    if not state.policy.decides(name) or task.reported_state not in BEFORE_JOINING:
        return False
    return any(state.tasks[each].reported_state == WAITING and state.policy.decides(each) for each in state.alive)


def _after_report(state: JobState, event: Queued | Started | RecordReceived, now: float) -> Step:
    """If a task waits for the others now, one of them that has exited with code 0, and never joined, has failed."""
    waits = isinstance(event, RecordReceived) and event.record.get("state") == WAITING
    if not waits or state.phase is not Phase.RUNNING:
        return state, ()
    done = (name for name, task in state.tasks.items() if task.status is Status.DONE)
    awaited = next((name for name in done if _is_awaited(state, name, state.tasks[name])), None)
    if awaited is None:
        return state, ()
    task = replace(state.tasks[awaited], status=Status.FAILED)
    return _failed(_with(state, awaited, task), awaited, now)


def _deciding_task_fails(state: JobState) -> bool:
    """Whether a task that decides has reported an error of its own, and has not exited yet.

    The exits of others that end because of it may be noticed before its exit.
    """
    return any(
        state.policy.decides(name) and task.error_at is not None and not task.status.ended
        for name, task in state.tasks.items()
        if not task.error.is_consequence
    )


def _exit_status_after_stop(state: JobState, name: TaskId, task: TaskState) -> Status:
    """The status of a task that exited after a stop signal. One that only served others is done if they are."""
    if (state.failing or state.start_timed_out) and _failed_before_stop(task):
        return Status.FAILED
    return Status.DONE if state.has_served(name) and task.ended_as_asked else Status.STOPPED


def _failed_before_stop(task: TaskState) -> bool:
    """Whether a task that exited after a stop signal had failed before it, or failed instead of stopping.

    The exit code alone does not show this: it is the program's own answer to the signal. SIGKILL is no answer: if the
    launcher has not sent it, the task was killed just before the launcher's signal.
    """
    if task.code == -signal.SIGKILL and not task.ended_by_launcher:
        return True
    if task.error_at is None or task.code == 0:
        return False
    return not task.ended_by_launcher or (task.stop_sent_at is not None and task.error_at < task.stop_sent_at)


def _failed(state: JobState, name: TaskId, now: float) -> Step:
    """After a failure during the training or the evaluation."""
    decision = decide_restart(state, name)
    lost = decision.restart
    if state.tasks[name].joining and (lost is None or not lost.alone):
        task = replace(state.tasks[name], status=Status.LOST, not_restarted_because=decision.not_restarted_because)
        return _with(state, name, task), ()
    if lost is None:
        task = replace(state.tasks[name], not_restarted_because=decision.not_restarted_because)
        return _failed_for_good(_with(state, name, task), name, now)
    state = replace(state, lost_tasks=(*state.lost_tasks, lost))
    if lost.alone:
        task = replace(state.tasks[name], status=Status.LOST, start_at=now + lost.delay)
        return _with(state, name, task), ()
    state = replace(with_silent_tasks(state, name, now), failing=True, restarting=True)
    if state.policy.decides(name) or holds_variables(state.policy.strategy, name.role):
        return _stop(state, now, RESTART_GRACE if state.policy.reports else state.policy.timeouts.shutdown)
    return _save_and_stop(state, now)


def _failed_for_good(state: JobState, name: TaskId, now: float) -> Step:
    """After a failure that leads to no restart."""
    if name.traits.optional:
        over = state.phase is Phase.EVALUATING and not _evaluators(state)
        return _stop(state, now) if over else (state, ())
    if state.revertible:
        return _revert_resize(state, name, now)
    return _save_and_stop(replace(with_silent_tasks(state, name, now), failing=True), now)


def _start_due(state: JobState, now: float) -> Step:
    """Starts the lost tasks whose delay is over."""
    due, before = [name for name in state.due if (state.tasks[name].start_at or 0.0) <= now], state.tasks
    started = {
        name: TaskState(started_at=now, restarts=before[name].restarts + 1, joining=before[name].joining)
        for name in due
    }
    return replace(state, tasks=before.with_states(started)), tuple(Start(name, state.attempt) for name in due)


def _start_attempt(state: JobState, now: float) -> Step:
    """Starts every task again, or those of the new size."""
    attempt = state.attempt + 1
    names = state.wanted
    restarts = {name: task.restarts + 1 for name, task in state.tasks.items()}
    tasks = TaskTable.of({name: TaskState(started_at=now, restarts=restarts.get(name, 0)) for name in names})
    state = replace(with_progress(state, now), tasks=tasks, attempt=attempt, attempt_started_at=now, attempt_step=None)
    state = replace(state, takes_no_workers_because=NOT_TRAINING_YET)
    state = replace(state, phase=Phase.RUNNING, until=None, restarting=False, resizing=False, failing=False)
    return state, tuple(Start(name, attempt) for name in tasks)


def _recorded(state: JobState, name: TaskId, record: Mapping[str, Any], now: float) -> JobState:
    """The state after a task's record."""
    task, kind = state.tasks[name], record.get("kind")
    if task.status.ended or kind == "versions":
        return state
    if kind == "beat":
        blocked = bool(record.get("held"))
        return with_heartbeat(state, name, number(record.get("computed")), now, gil_blocked=blocked)
    if kind == "error":
        if task.error_at is not None:
            return state
        text = f"{record.get('type', '')}: {record.get('message', '')}"
        error = ReportedError(text, str(record.get("code") or ""), record.get("retry") is not False)
        return _with(state, name, replace(task, error_at=now, error=error))
    if kind == "state":
        ended_at = now if task.reported_state == EVALUATING else task.evaluated_at
        task = replace(task, reported_state=str(record.get("state", "")), evaluated_at=ended_at)
    if task.status is Status.STARTING and record.get("state") != "starting":
        task = replace(task, status=Status.UP)
    state = _with(state, name, replace(task, made_progress=task.made_progress or kind == "evaluation"))
    state = with_record(state, name, record)
    if kind in ("progress", "rates"):
        more = kind == "rates"
        return _with_rates(state, record) if more else _progressed(_trained_after_resize(state, now), record, now)
    if kind == "resumed":
        state = _resumed(state, number(record.get("step")))
    return with_progress(state, now) if state.policy.decides(name) else state


def _resumed(state: JobState, step: float | None) -> JobState:
    """The state after the training has reported the checkpoint from which it resumes."""
    if not state.resizes or state.resizing or state.open_change or step is None:
        return state
    *before, last = state.resizes
    if last.resumed is not None or last.trained_at is not None:  # a later failure restarted the job
        return state
    return replace(state, resizes=(*before, replace(last, resumed=int(step))))


def _trained_after_resize(state: JobState, now: float) -> JobState:
    """The state after a training step, which may be the first one since a resize."""
    last = state.resizes[-1] if state.resizes else None
    if last is None or state.resizing or state.open_change or last.trained_at is not None:
        return state
    return replace(state, resizes=(*state.resizes[:-1], replace(last, trained_at=now)))


def _progressed(state: JobState, record: Mapping[str, Any], now: float) -> JobState:
    """The state after a progress record."""
    current = number(record.get("step"))
    if current is None or current == state.attempt_step:
        return state
    state = replace(with_progress(state, now), attempt_step=int(current), step=max(state.step, int(current)))
    return _with_rates(state, record)


def _with_rates(state: JobState, record: Mapping[str, Any]) -> JobState:
    """The state after a report of some workers' rates."""
    rates = record.get("workers")
    active = {str(name): bool(rate) for name, rate in rates.items()} if isinstance(rates, Mapping) else {}
    tasks, some = {}, any(active.values())
    for name, task in state.tasks.items() if active else ():
        own = active.get(str(name))
        if own is not None:
            tasks[name] = replace(task, made_progress=task.made_progress or own, lagging=some and not own)
    return replace(state, tasks=state.tasks.with_states(tasks))


def _signalled(state: JobState, signum: int, now: float) -> Step:
    if state.phase is Phase.RUNNING:
        return _save_and_stop(replace(state, signum=signum), now)
    if state.phase is Phase.EVALUATING:
        return _stop(replace(state, signum=signum), now)
    if state.restarting:
        state = replace(state, signum=signum, restarting=False, resizing=False)
        return _end(state, now) if state.phase is Phase.PAUSED else (state, ())
    if state.phase in (Phase.SAVING, Phase.STOPPING) and signum == signal.SIGINT:
        return _kill(state, now)
    return state, ()


def _timed_out(state: JobState, now: float) -> Step:
    """What is due at the deadline."""
    if state.phase in (Phase.RUNNING, Phase.EVALUATING) and (state.until is None or now < state.until):
        return _check_tasks(state, now)
    return _phase_timed_out(state, now)


def _phase_timed_out(state: JobState, now: float) -> Step:
    match state.phase:
        case Phase.EVALUATING:
            return _stop(replace(state, evaluator_timed_out=True), now)
        case Phase.SAVING:
            slow = _deciding(state)
            state, killed = _send(state, slow, StopSignal.KILL, now)
            state, stopped = _stop(state, now)
            return state, killed + stopped
        case Phase.STOPPING:
            return _kill(state, now)
        case Phase.PAUSED:
            return _start_attempt(state, now)
    return _end(state, now)


def _check_tasks(state: JobState, now: float) -> Step:
    """Starts tasks that are due, and kills tasks that are not up in time or stalled; their exits are events."""
    timeout = state.policy.timeouts.start
    overdue = [name for name in state.start_pending if now >= state.tasks[name].started_at + timeout]
    if any(state.tasks[name].started_at <= state.attempt_started_at for name in overdue):
        return _stop(replace(state, start_timed_out=state.starting), now)
    if any(now >= (state.tasks[name].stop_sent_at or 0.0) + KILL_TIMEOUT for name in state.being_killed):
        return _save_and_stop(replace(state, failing=True), now)
    state, started = _start_due(state, now)
    state, stalled = find_stalled(state, now)
    stalled |= dict.fromkeys(overdue, f"it was not up within {timeout:g} s")
    for name, reason in stalled.items():
        state = _with(state, name, replace(state.tasks[name], stall_reason=reason))
    state, killed = _send(state, (*stalled, *slow_to_leave(state, now)), StopSignal.KILL, now)
    return state, started + killed


def _evaluate(state: JobState, now: float) -> Step:
    """After the training: waits for the evaluator."""
    state = _without_due_starts(state, training_only=True)
    if not _evaluators(state):
        return _stop(state, now)
    return replace(state, phase=Phase.EVALUATING, until=now + state.policy.timeouts.evaluator), ()


def _save_and_stop(state: JobState, now: float) -> Step:
    """Sends SIGTERM to the deciding tasks only: a chief needs the other tasks to finish its step and save."""
    if not _deciding(state):
        return _stop(state, now)
    state = replace(_without_due_starts(state), phase=Phase.SAVING, until=now + state.policy.timeouts.shutdown)
    return _send(state, _deciding(state), StopSignal.TERMINATE, now)


def _stop(state: JobState, now: float, grace: float | None = None) -> Step:
    """Sends SIGTERM to every task that has not got a signal yet."""
    state = _without_due_starts(state)
    if not state.alive:
        return _end(state, now)
    grace = state.policy.timeouts.shutdown if grace is None else min(grace, state.policy.timeouts.shutdown)
    state = replace(state, phase=Phase.STOPPING, until=now + grace)
    unsignalled = tuple(task for task in state.alive if state.tasks[task].stop_sent is None)
    return _send(state, unsignalled, StopSignal.TERMINATE, now)


def _kill(state: JobState, now: float) -> Step:
    """Sends SIGKILL to every task that has not got it yet."""
    state = replace(state, phase=Phase.KILLING, until=now + KILL_TIMEOUT)
    remaining = tuple(task for task in state.alive if state.tasks[task].stop_sent is not StopSignal.KILL)
    return _send(state, remaining, StopSignal.KILL, now)


def _end(state: JobState, now: float) -> Step:
    """After all tasks have exited, or cannot be killed: the end of the job, or the delay before a restart."""
    if not state.restarting or state.alive:
        return replace(state, phase=Phase.ENDED, until=None, restarting=False), ()
    if state.resizing:
        return replace(state, phase=Phase.PAUSED, until=now), ()
    *before, lost = state.lost_tasks
    cause = state.failures[0]  # the failure that was noticed first may be a consequence
    lost = replace(lost, task=cause, ended=state.tasks[cause])
    return replace(state, lost_tasks=(*before, lost), phase=Phase.PAUSED, until=now + lost.delay), ()


def _send(state: JobState, names: tuple[TaskId, ...], stop_signal: StopSignal, now: float) -> Step:
    """Sends a stop signal to tasks."""
    sent = {}
    for name in names:
        task = state.tasks[name]
        first = now if task.stop_sent_at is None else task.stop_sent_at
        sent[name] = replace(task, stop_sent=stop_signal, stop_sent_at=first)
    return replace(state, tasks=state.tasks.with_states(sent)), tuple(Stop(name, stop_signal) for name in names)


def _without_due_starts(state: JobState, *, training_only: bool = False) -> JobState:
    """Cancels the restarts that are due: of all tasks, or of those whose work ends with the training."""
    due = (name for name in state.due if not (training_only and name.traits.outlives_training))
    tasks = {name: replace(state.tasks[name], start_at=None) for name in due}
    return replace(state, tasks=state.tasks.with_states(tasks))


def _with(state: JobState, name: TaskId, task: TaskState) -> JobState:
    return replace(state, tasks=state.tasks.with_states({name: task}))


def _deciding(state: JobState) -> tuple[TaskId, ...]:
    """The deciding tasks that run and can save."""
    return tuple(task for task in state.alive if state.policy.decides(task) and not state.tasks[task].stall_reason)


def _evaluators(state: JobState) -> tuple[TaskId, ...]:
    """The evaluators that run, or are due to be restarted."""
    present = (name for name, task in state.tasks.items() if not task.status.ended or task.start_at is not None)
    return tuple(name for name in present if name.traits.outlives_training)
