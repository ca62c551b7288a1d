"""When a job goes on and when it ends: a pure state machine, (state, event, now) → (state, actions).

It has no clock and no processes. The rules, which docs and exit codes rest on:

* The tasks that *decide* are the chief in `parameter_server`, and every task that trains elsewhere. The training is
  done when each of them has ended with 0.
* A task that ends with another code before that is a failure, and so is a ps or worker of `parameter_server`, or a task
  of tf.data's service, that ends at all while the chief trains: the job ends with it. A failed evaluator doesn't end
  the training.
* After the training the evaluator has bounded time for the last checkpoint; then every task is told to end, and killed
  if it doesn't.
* When a task has failed, and on a signal to the launcher, the tasks that decide are told to end first, so that they can
  save; then the others.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from tfdist_cli.launch.events import Action, End, Event, Exited, How, Recorded, Signalled, Start, Tick
from tfdist_cli.spec.cluster import Strategy
from tfdist_cli.spec.task_id import DATA_ROLES, TaskId

KILL_TIMEOUT = 10.0
"""Seconds after SIGKILL in which even a process in an uninterruptible wait should be gone."""


@dataclass(frozen=True)
class Timeouts:
    """How long each thing may take, in seconds.

    Args:
        start: until every task of a recipe has come up.
        evaluator: after the training, for the evaluator to score the last checkpoint.
        shutdown: between telling a task to end and killing it.
    """

    start: float = 120.0
    evaluator: float = 300.0
    shutdown: float = 30.0


@dataclass(frozen=True)
class Rules:
    """What the machine has to know of the job.

    Args:
        strategy: says which tasks decide.
        reports: whether tasks say when they have come up: a recipe's do, a user's command need not.
        timeouts: how long each thing may take.
    """

    strategy: Strategy
    reports: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)

    def decides(self, task: TaskId) -> bool:
        """Whether the training is done only when this task has ended with 0."""
        if self.strategy == "parameter_server":
            return task.role == "chief"
        return task.role != "evaluator" and task.role not in DATA_ROLES


class Phase(Enum):
    """What the job is about, in the order that it goes through them; it can leave out any but the last."""

    RUNNING = "running"
    EVALUATING = "evaluating"
    """The training is done, the evaluator is not."""
    SAVING = "saving"
    """A signal came, or a task failed: those that decide have been told to end, and the others still serve them."""
    STOPPING = "stopping"
    """Every task has been told to end."""
    KILLING = "killing"
    """Every task has been killed."""
    ENDED = "ended"


class Status(Enum):
    """Where a task is, and once it has ended, how."""

    STARTING = "starting"
    UP = "up"
    DONE = "done"
    """It ended with 0, or after the training was done."""
    FAILED = "failed"
    STOPPED = "stopped"
    """The launcher ended it, or it ended while the job was on its way out."""

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self in (Status.DONE, Status.FAILED, Status.STOPPED)


@dataclass(frozen=True)
class TaskState:
    """One task.

    Args:
        status: where it is.
        told: how the launcher has last told it to end.
        told_at: when the launcher first told it to end.
        error_at: when it first reported an error.
        ended_at: when its process was gone.
        code: its exit code, or -n for signal n.
    """

    status: Status = Status.STARTING
    told: How | None = None
    told_at: float | None = None
    error_at: float | None = None
    ended_at: float | None = None
    code: int | None = None

    @property
    def failed_at(self) -> float:
        """When it failed: a task that reports an error may take long to end, and others fail of it meanwhile."""
        times = [time for time in (self.error_at, self.ended_at) if time is not None]
        return min(times, default=float("inf"))

    @property
    def obeyed(self) -> bool:
        """Whether the launcher's own signal accounts for the exit code."""
        accounted = {None: (), How.TERMINATE: (signal.SIGTERM,), How.KILL: (signal.SIGTERM, signal.SIGKILL)}[self.told]
        return self.code in (0, *(-number for number in accounted), *(128 + number for number in accounted))


@dataclass(frozen=True)
class JobState:
    """The whole job.

    Args:
        rules: what holds for it.
        tasks: every task, in the order of the plan.
        phase: what the job is about.
        deadline: when the phase's time is over; None when it has no bound.
        failing: whether a task's failure ended it.
        signum: the signal to the launcher that ended it.
        late: the tasks that did not come up in time, which ended it.
        unscored: whether the evaluator was ended before it had scored the last checkpoint.
    """

    rules: Rules
    tasks: Mapping[TaskId, TaskState]
    phase: Phase = Phase.RUNNING
    deadline: float | None = None
    failing: bool = False
    signum: int | None = None
    late: tuple[TaskId, ...] = ()
    unscored: bool = False

    @property
    def alive(self) -> tuple[TaskId, ...]:
        """The tasks whose processes are there."""
        return tuple(task for task, state in self.tasks.items() if not state.status.ended)

    @property
    def failures(self) -> tuple[TaskId, ...]:
        """The tasks that failed, what ended the job first: those that failed before the evaluator's come first."""
        failed = [task for task, state in self.tasks.items() if state.status is Status.FAILED]
        return tuple(sorted(failed, key=lambda task: (task.role == "evaluator", self.tasks[task].failed_at)))

    @property
    def exit_code(self) -> int:
        """What `tfdist launch` returns when it ends like this."""
        if self.signum is not None:
            return 128 + self.signum
        if self.late:
            return 124
        for task in self.failures:
            return shell_code(self.tasks[task]) or 1
        return 0


Step = tuple[JobState, tuple[Action, ...]]


def begin(rules: Rules, tasks: Iterable[TaskId], now: float) -> Step:
    """The state before anything has happened, and the start of every task."""
    states = {task: TaskState() for task in tasks}
    deadline = now + rules.timeouts.start if rules.reports else None
    return JobState(rules, states, deadline=deadline), tuple(Start(task) for task in states)


def step(state: JobState, event: Event, now: float) -> Step:
    """What follows from one event."""
    match event:
        case Exited():
            return _exited(state, event, now)
        case Recorded():
            return _recorded(state, event, now), ()
        case Signalled():
            return _signalled(state, event.signum, now)
        case Tick():
            return _ticked(state, now)
    return state, ()


def shell_code(task: TaskState) -> int:
    """The task's exit code as a shell gives it; 0 for one whose end was the launcher's doing."""
    code = task.code or 0
    if task.obeyed:
        return 0
    return 128 - code if code < 0 else code


def _exited(state: JobState, event: Exited, now: float) -> Step:
    task = state.tasks[event.task]
    if task.status.ended:
        return state, ()
    task = replace(task, code=event.code, ended_at=now - event.ago)
    task = replace(task, status=_outcome(state, event.task, task))
    state = _with(state, event.task, task)
    match state.phase:
        case Phase.RUNNING:
            if task.status is Status.FAILED and event.task.role != "evaluator":
                return _wind_down(replace(state, failing=True), now)
            return _evaluate(state, now) if _trained(state) else (_watch_start(state), ())
        case Phase.EVALUATING if not _evaluators(state):
            return _stop(state, now)
        case Phase.SAVING if not _deciding(state):
            return _stop(state, now)
    return (state if state.alive else _end(state)), ()


def _trained(state: JobState) -> bool:
    return all(task.status is Status.DONE for name, task in state.tasks.items() if state.rules.decides(name))


def _outcome(state: JobState, name: TaskId, task: TaskState) -> Status:
    """How a task that has just ended did so."""
    if task.told is not None:
        return Status.FAILED if (state.failing or state.late) and _failed_all_the_same(task) else Status.STOPPED
    if name.role == "evaluator" and state.phase in (Phase.RUNNING, Phase.EVALUATING):
        return Status.FAILED if task.code else Status.DONE
    if state.phase is Phase.RUNNING:
        return Status.DONE if task.code == 0 and state.rules.decides(name) else Status.FAILED
    if state.failing and task.code != 0:
        return Status.FAILED
    return Status.DONE if task.code == 0 else Status.STOPPED


def _failed_all_the_same(task: TaskState) -> bool:
    """Whether a task that was told to end reported an error of its own, before that or instead of ending as told.

    The exit code alone says nothing: it is the program's answer to the signal, whatever it is.
    """
    if task.error_at is None or task.code == 0:
        return False
    return not task.obeyed or (task.told_at is not None and task.error_at < task.told_at)


def _recorded(state: JobState, event: Recorded, now: float) -> JobState:
    task = state.tasks[event.task]
    if task.status.ended:
        return state
    if event.record.get("kind") == "error" and task.error_at is None:
        return _with(state, event.task, replace(task, error_at=now))
    if task.status is Status.STARTING and event.record.get("state") != "starting":
        return _watch_start(_with(state, event.task, replace(task, status=Status.UP)))
    return state


def _watch_start(state: JobState) -> JobState:
    """Lifts the start's deadline once no task is starting any more."""
    if state.phase is Phase.RUNNING and not _starting(state):
        return replace(state, deadline=None)
    return state


def _starting(state: JobState) -> tuple[TaskId, ...]:
    return tuple(name for name, task in state.tasks.items() if task.status is Status.STARTING)


def _signalled(state: JobState, signum: int, now: float) -> Step:
    if state.phase is Phase.RUNNING:
        return _wind_down(replace(state, signum=signum), now)
    if state.phase is Phase.EVALUATING:
        return _stop(replace(state, signum=signum), now)
    if state.phase in (Phase.SAVING, Phase.STOPPING) and signum == signal.SIGINT:
        return _kill(state, now)
    return state, ()


def _ticked(state: JobState, now: float) -> Step:
    if state.deadline is None or now < state.deadline:
        return state, ()
    match state.phase:
        case Phase.RUNNING:
            return _stop(replace(state, late=_starting(state)), now)
        case Phase.EVALUATING:
            return _stop(replace(state, unscored=True), now)
        case Phase.SAVING:
            slow = _deciding(state)
            state, killed = _tell(state, slow, How.KILL, now)
            state, told = _stop(state, now)
            return state, killed + told
        case Phase.STOPPING:
            return _kill(state, now)
    return _end(state), ()


def _evaluate(state: JobState, now: float) -> Step:
    if not _evaluators(state):
        return _stop(state, now)
    return replace(state, phase=Phase.EVALUATING, deadline=now + state.rules.timeouts.evaluator), ()


def _wind_down(state: JobState, now: float) -> Step:
    """Tells the tasks that decide to end, with the others still there: without them a chief cannot end its step."""
    if not _deciding(state):
        return _stop(state, now)
    state = replace(state, phase=Phase.SAVING, deadline=now + state.rules.timeouts.shutdown)
    return _tell(state, _deciding(state), How.TERMINATE, now)


def _stop(state: JobState, now: float) -> Step:
    """Tells every task to end that has not been told yet."""
    if not state.alive:
        return _end(state), ()
    state = replace(state, phase=Phase.STOPPING, deadline=now + state.rules.timeouts.shutdown)
    return _tell(state, tuple(task for task in state.alive if state.tasks[task].told is None), How.TERMINATE, now)


def _kill(state: JobState, now: float) -> Step:
    state = replace(state, phase=Phase.KILLING, deadline=now + KILL_TIMEOUT)
    return _tell(state, tuple(task for task in state.alive if state.tasks[task].told is not How.KILL), How.KILL, now)


def _end(state: JobState) -> JobState:
    return replace(state, phase=Phase.ENDED, deadline=None)


def _tell(state: JobState, names: tuple[TaskId, ...], how: How, now: float) -> Step:
    told = {}
    for name in names:
        task = state.tasks[name]
        told[name] = replace(task, told=how, told_at=now if task.told_at is None else task.told_at)
    return replace(state, tasks={**state.tasks, **told}), tuple(End(name, how) for name in names)


def _with(state: JobState, name: TaskId, task: TaskState) -> JobState:
    return replace(state, tasks={**state.tasks, name: task})


def _deciding(state: JobState) -> tuple[TaskId, ...]:
    return tuple(task for task in state.alive if state.rules.decides(task))


def _evaluators(state: JobState) -> tuple[TaskId, ...]:
    return tuple(task for task in state.alive if task.role == "evaluator")
