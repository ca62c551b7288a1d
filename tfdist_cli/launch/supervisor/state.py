"""What is known of a job: plain values that the supervisor makes anew with each event."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from tfdist_cli.launch.supervisor.events import How, Resized
from tfdist_cli.launch.supervisor.failure_order import causes_first
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.cluster import RestartSpec, default_restart
from tfdist_cli.spec.strategies import Strategy, decides, serves
from tfdist_cli.spec.task_id import TaskId

KILL_TIMEOUT = 20.0
"""Seconds after SIGKILL in which a process in an uninterruptible wait should be gone, and a scheduler tell of it."""


@dataclass(frozen=True)
class Timeouts:
    """How long each thing may take, in seconds.

    Args:
        start: until every task of a recipe has come up.
        evaluator: after the training, for the evaluator to score the last checkpoint.
        shutdown: between telling a task to end and killing it.
        stall: from one step of the training to the next, and from one sign of life of a task to the next; 0 for ever.
    """

    start: float = 120.0
    evaluator: float = 300.0
    shutdown: float = 30.0
    stall: float = 0.0


@dataclass(frozen=True)
class Rules:
    """What the machine has to know of the job.

    Args:
        strategy: says which tasks decide, and what a lost task takes with it.
        reports: whether tasks say when they have come up: a recipe's do, a user's command need not.
        timeouts: how long each thing may take.
        max_restarts: restarts in all, of single tasks and of the whole job.
        restarts: what the cluster file says of the restarts of a role.
    """

    strategy: Strategy
    reports: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_restarts: int = 0
    restarts: Mapping[Role, RestartSpec] = field(default_factory=dict)

    def decides(self, task: TaskId) -> bool:
        """Whether the training is done only when this task has ended with 0."""
        return decides(self.strategy, task.role)

    def restart(self, task: TaskId) -> RestartSpec:
        """What is done when the task is lost."""
        return self.restarts.get(task.role) or default_restart(self.strategy, task.role)


class Phase(Enum):
    """What an attempt is about, in the order that it goes through them; it can leave out any but the last two."""

    RUNNING = "running"
    EVALUATING = "evaluating"
    """The training is done, the evaluator is not."""
    SAVING = "saving"
    """A signal came, or a task failed: those that decide have been told to end, and the others still serve them."""
    STOPPING = "stopping"
    """Every task has been told to end."""
    KILLING = "killing"
    """Every task has been killed."""
    PAUSED = "paused"
    """No task is there; after a while all are started again, in the next attempt."""
    ENDED = "ended"


class Status(Enum):
    """Where a task is, and once it has ended, how."""

    STARTING = "starting"
    UP = "up"
    LOST = "lost"
    """It has failed, and the training goes on without it, perhaps until it is started again."""
    DONE = "done"
    """It ended with 0, or after the training was done."""
    FAILED = "failed"
    STOPPED = "stopped"
    """The launcher ended it, or it ended while the job was on its way out."""

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self not in (Status.STARTING, Status.UP)


@dataclass(frozen=True)
class TaskState:
    """One task.

    Args:
        status: where it is.
        told: how the launcher has last told it to end.
        told_at: when the launcher first told it to end.
        error: the error that it reported, in a line.
        in_vain: whether it has said that starting it again cannot help.
        error_at: when it first reported one.
        ended_at: when its process was gone.
        code: its exit code, or -n for signal n.
        oom_killed: whether the kernel killed it for want of memory; None if that is unknown.
        started_at: when it was last started.
        queued: whether it waits for a place to run in.
        start_at: when it is to be started again.
        restarts: how often it has been started again.
        worked: whether it has been of use since it was started.
        lags: whether it took no step while others did, as the chief last told.
        beat_at: when it last gave a sign of life.
        computed: seconds of processor time that it had used then.
        held: whether a call in it keeps its interpreter from all its threads.
        doing: what it last said it does.
        stalled: why the launcher took it to stand still and killed it; empty when it didn't.
        silent_since: when it last gave a sign of life, where it was found to give none when another failed of that.
        not_restarted_because: why it was not started again when it had failed, where restarts were allowed.
        cause: why it was taken to be gone, where its program did not end of its own, such as a host that was lost.
        final: whether somebody else has ended its job on purpose, so that it must not be started again.
    """

    status: Status = Status.STARTING
    told: How | None = None
    told_at: float | None = None
    error: str = ""
    in_vain: bool = False
    error_at: float | None = None
    ended_at: float | None = None
    code: int | None = None
    oom_killed: bool | None = None
    started_at: float = 0.0
    queued: bool = False
    start_at: float | None = None
    restarts: int = 0
    worked: bool = False
    lags: bool = False
    beat_at: float | None = None
    computed: float = 0.0
    held: bool = False
    doing: str = ""
    stalled: str = ""
    silent_since: float | None = None
    not_restarted_because: str = ""
    cause: str = ""
    final: bool = False

    @property
    def failed_at(self) -> float:
        """When it failed: a task that reports an error may take long to end, and others fail of it meanwhile."""
        times = [time for time in (self.error_at, self.ended_at, self.silent_since) if time is not None]
        return min(times, default=float("inf"))

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or the program that it ran in its turn."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def obeyed(self) -> bool:
        """Whether the launcher's own signal accounts for the exit code."""
        if self.final:
            return False
        accounted = {None: (), How.TERMINATE: (signal.SIGTERM,), How.KILL: (signal.SIGTERM, signal.SIGKILL)}[self.told]
        return self.code in (0, *(-number for number in accounted), *(128 + number for number in accounted))


@dataclass(frozen=True)
class Loss:
    """A task that was lost, for which it or the whole job is started again.

    Args:
        task: which task.
        ended: how it was when it had ended.
        attempt: which attempt that was, from 1.
        alone: whether it is started again alone.
        step: the furthest step that the training had come to.
        fruitful: whether there was progress since the restart before this one, if there was one.
        delay: seconds until the restart.
        follows: the task of whose loss it came, where no limit counts it: that one has been counted.
    """

    task: TaskId
    ended: TaskState
    attempt: int
    alone: bool
    step: int
    made_progress: bool
    delay: float
    follows: TaskId | None = None


@dataclass(frozen=True)
class Resize:
    """Other numbers of tasks, which were asked for while the job ran.

    Args:
        wanted: what was asked for.
        asked_at: when.
        attempt: which attempt ended for it, from 1.
        step: the step that had been told last then; None before the first.
        resumed: the step of the checkpoint that the next attempt went on from; None when it has not said so.
        trained_at: when the next attempt told of its first step; None before.
    """

    wanted: Resized
    asked_at: float
    attempt: int
    step: int | None = None
    resumed: int | None = None
    trained_at: float | None = None


@dataclass(frozen=True)
class JobState:
    """The whole job.

    Args:
        rules: what holds for it.
        tasks: every task, in the order of the plan.
        phase: what the job is about.
        until: when the phase's time is over; None when it has no bound.
        attempt: how often all tasks have been started, from 1.
        began: when they were started last.
        losses: the tasks that were lost and brought about a restart, oldest first.
        resizes: the other numbers of tasks that were asked for, oldest first.
        restarting: whether the job is started again, from its last checkpoint, when all tasks have ended.
        resizing: whether that is with other numbers of tasks, those asked for last.
        step: the furthest step of the training.
        here: the step that was told last in this attempt; None before the first.
        moved_at: when the training last got on.
        computed: seconds of processor time that all tasks have used since.
        failing: whether a task's failure ended the attempt.
        signum: the signal to the launcher that ended it.
        late: the tasks that did not come up in time, which ended it.
        unscored: whether the evaluator was ended before it had scored the last checkpoint.
    """

    rules: Rules
    tasks: Mapping[TaskId, TaskState]
    phase: Phase = Phase.RUNNING
    until: float | None = None
    attempt: int = 1
    began: float = 0.0
    losses: tuple[Loss, ...] = ()
    resizes: tuple[Resize, ...] = ()
    restarting: bool = False
    resizing: bool = False
    step: int = 0
    here: int | None = None
    moved_at: float = 0.0
    computed: float = 0.0
    failing: bool = False
    signum: int | None = None
    late: tuple[TaskId, ...] = ()
    unscored: bool = False

    @property
    def alive(self) -> tuple[TaskId, ...]:
        """The tasks whose processes are there."""
        return tuple(task for task, state in self.tasks.items() if not state.status.ended)

    @property
    def starting(self) -> tuple[TaskId, ...]:
        """The tasks that have not said yet that they are up."""
        return tuple(name for name, task in self.tasks.items() if task.status is Status.STARTING)

    @property
    def expected(self) -> tuple[TaskId, ...]:
        """The tasks that are to say soon that they are up."""
        if self.phase is not Phase.RUNNING or not self.rules.reports:
            return ()
        there = (name for name in self.starting if not self.tasks[name].queued)
        return tuple(name for name in there if self.tasks[name].told is None)

    @property
    def watched(self) -> tuple[TaskId, ...]:
        """The tasks that are to give a sign of life now and then, having begun to."""
        if not self.rules.timeouts.stall or self.phase not in (Phase.RUNNING, Phase.EVALUATING):
            return ()
        alive = (name for name in self.alive if self.phase is Phase.RUNNING or name.traits.outlives_training)
        return tuple(name for name in alive if self.tasks[name].beat_at is not None and self.tasks[name].told is None)

    @property
    def dying(self) -> tuple[TaskId, ...]:
        """The tasks that were killed because they stood still, and are still there."""
        return tuple(name for name in self.alive if self.tasks[name].stalled)

    @property
    def watches_steps(self) -> bool:
        """Whether a training that makes no step is noticed: one whose tasks are up, and tell of their steps."""
        tells = self.here is not None or (self.rules.reports and not self.starting)
        return bool(self.rules.timeouts.stall) and self.phase is Phase.RUNNING and tells and not self.dying

    @cached_property
    def deadline(self) -> float | None:
        """When something has to be done if nothing happens before."""
        timeouts = self.rules.timeouts
        times = [] if self.until is None else [self.until]
        times += [task.start_at for task in self.tasks.values() if task.start_at is not None]
        times += [self.tasks[name].started_at + timeouts.start for name in self.expected]
        times += [(self.tasks[name].beat_at or 0.0) + timeouts.stall for name in self.watched]
        if self.phase in (Phase.RUNNING, Phase.EVALUATING):
            times += [(self.tasks[name].told_at or 0.0) + KILL_TIMEOUT for name in self.dying]
        if self.watches_steps:
            times.append(self.moved_at + timeouts.stall)
        return min(times, default=None)

    @property
    def restarts(self) -> int:
        """How many of the restarts that are allowed have been used."""
        return sum(loss.follows is None for loss in self.losses)

    @property
    def trained(self) -> bool:
        """Whether the training is done: each task that decides has ended with 0."""
        return all(task.status is Status.DONE for name, task in self.tasks.items() if self.rules.decides(name))

    @property
    def is_over(self) -> bool:
        """Whether all tasks that decide have said that they are done: those that serve them may end before them."""
        deciding = [task for name, task in self.tasks.items() if self.rules.decides(name)]
        return all(task.doing == "done" for task in deciding)

    def served(self, name: TaskId) -> bool:
        """Whether a task had nothing left to do when it was told to end: it served others, and they are done."""
        return self.trained and not self.failing and serves(self.rules.strategy, name.role)

    @property
    def unready(self) -> str:
        """Why the job cannot be resized now; empty when it can."""
        last = self.resizes[-1] if self.resizes else None
        if self.resizing or (last and last.trained_at is None and self.attempt == last.attempt + 1):
            return "the numbers of its tasks are being changed already"
        if self.restarting:
            return "its tasks are being started again after a loss"
        if self.phase is Phase.EVALUATING:
            return "its training is done"
        return "" if self.phase is Phase.RUNNING else "it is ending"

    @property
    def failures(self) -> tuple[TaskId, ...]:
        """The tasks that failed, what ended the job first: those that failed before the evaluator's come first."""
        failed = [task for task, state in self.tasks.items() if state.status is Status.FAILED]
        failed.sort(key=lambda task: (task.traits.optional, self.tasks[task].failed_at))
        return causes_first(failed, {task: self.tasks[task].error for task in failed})

    @property
    def exit_code(self) -> int:
        """What `tfdist launch` returns when it ends like this: the code of the first failed task that has one."""
        if self.signum is not None:
            return 128 + self.signum
        if self.late or self.resizing:
            return 124
        failed = [self.tasks[task] for task in self.failures]
        if not failed:
            return 124 if self.failing and self.dying else 0
        own = (code for code in map(shell_code, failed) if code)
        return 124 if failed[0].stalled else next(own, 1)


def shell_code(task: TaskState) -> int:
    """The task's exit code as a shell gives it; 0 for one whose end was the launcher's doing."""
    code = task.code or 0
    if task.obeyed:
        return 0
    return 128 - code if code < 0 else code
