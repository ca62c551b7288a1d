"""The state of a job: immutable values, which the supervisor replaces after each event."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property

from tfdist_cli.launch.supervisor.events import ResizeAccepted, StopSignal
from tfdist_cli.launch.supervisor.failure_order import NO_ERROR, ReportedError, causes_first
from tfdist_cli.launch.supervisor.task_table import TaskTable
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.role_spec import RestartSpec, default_restart
from tfdist_cli.spec.strategies import Strategy, decides, serves
from tfdist_cli.spec.task_id import TaskId

NOT_TRAINING_YET = "the training has not begun"
"""Why no worker can join before the chief has reported that it takes some."""
EVALUATING = "evaluating"
"""The state that a task reports while it scores validation data."""
WAITING = "waiting"
"""The state that a task reports while it waits for the others to join the cluster."""
BEFORE_JOINING = ("", "starting")
"""What a task has last reported before it joins the cluster."""
KILL_TIMEOUT = 20.0
"""Seconds from SIGKILL until a process in an uninterruptible wait has exited, and a scheduler has reported it."""


@dataclass(frozen=True)
class Timeouts:
    """How long each step of a job may take, in seconds.

    Args:
        start: until every task of a recipe is up.
        evaluator: from the end of the training until the evaluator has scored the last checkpoint.
        shutdown: from SIGTERM to SIGKILL.
        stall: from one training step to the next, and from one heartbeat of a task to the next; 0 for no limit.
    """

    start: float = 120.0
    evaluator: float = 300.0
    shutdown: float = 30.0
    stall: float = 0.0


@dataclass(frozen=True)
class JobPolicy:
    """What the user configured about the end of the job and its restarts.

    Args:
        strategy: determines which tasks decide the end of the training, and what a lost task means for the others.
        reports: whether tasks report that they are up. The tasks of a recipe do; a user's program need not.
        timeouts: how long each step may take.
        max_restarts: restarts in total, of single tasks and of the whole job.
        restarts: the restart policies of the cluster file, by role.
    """

    strategy: Strategy
    reports: bool = False
    timeouts: Timeouts = field(default_factory=Timeouts)
    max_restarts: int = 0
    restarts: Mapping[Role, RestartSpec] = field(default_factory=dict)

    def decides(self, task: TaskId) -> bool:
        """Whether the training is done only after this task has exited with code 0."""
        return decides(self.strategy, task.role)

    def restart(self, task: TaskId) -> RestartSpec:
        """The restart policy of the task's role."""
        return self.restarts.get(task.role) or default_restart(self.strategy, task.role)


class Phase(Enum):
    """The phases of an attempt, in order. An attempt can skip any of them except the last two."""

    RUNNING = "running"
    EVALUATING = "evaluating"
    """The training is done; the evaluator is not."""
    SAVING = "saving"
    """After a signal or a failure: the deciding tasks have got SIGTERM and save; the other tasks still serve them."""
    STOPPING = "stopping"
    """Every task has got SIGTERM."""
    KILLING = "killing"
    """Every task has got SIGKILL."""
    PAUSED = "paused"
    """No task runs. After a delay all tasks start in the next attempt."""
    ENDED = "ended"


class Status(Enum):
    """The status of a task: before its exit, or the kind of its exit."""

    STARTING = "starting"
    UP = "up"
    LEFT = "left"
    """The task has left the training, which continues: at the launcher's request, or by itself after a SIGTERM."""
    LOST = "lost"
    """The task failed. The training continues without it, perhaps until it is restarted."""
    DONE = "done"
    """The task exited with code 0, or after the training was done."""
    FAILED = "failed"
    STOPPED = "stopped"
    """The launcher stopped the task, or it exited while the job was shutting down."""

    @property
    def ended(self) -> bool:
        """Whether the process has exited."""
        return self not in (Status.STARTING, Status.UP)


@dataclass(frozen=True)
class TaskState:
    """The state of one task. All times are in seconds since the job began.

    Args:
        status: its status.
        joining: whether it was started beside a running training, and has not taken part in it yet.
        leaving: whether it has to end while the training continues.
        stop_sent: the last stop signal that the launcher sent it.
        stop_sent_at: when the launcher sent it the first stop signal.
        error: the first error that it reported.
        error_at: when it reported that error.
        ended_at: when its process exited.
        code: its exit code, or -n for signal n.
        oom_killed: whether the kernel killed it for lack of memory; None if unknown.
        started_at: when it was last started.
        queued: whether it waits in a scheduler's queue.
        start_at: when it is due to be restarted.
        restarts: how often it was restarted.
        made_progress: whether it trained or evaluated since its last start.
        lagging: whether it made no step while others did, according to the chief's last report.
        heartbeat_at: when it sent its last heartbeat.
        cpu_seconds: the processor time that it had used at that heartbeat.
        gil_blocked: whether a native call keeps its Python threads from running.
        reported_state: the state that it last reported.
        evaluated_at: when it last ended an evaluation; 0 before.
        stall_reason: why the launcher considered it stalled and killed it; empty otherwise.
        silent_since: its last heartbeat, if it was found silent when another task failed because of it.
        not_restarted_because: why it was not restarted after it failed, although restarts are allowed.
        cause: why it counts as exited although its program did not exit by itself, such as a lost host.
        cancelled: whether its job was cancelled from outside, so that it must not be restarted.
        profile: the request for the profile that is taken of it; empty if none is.
    """

    status: Status = Status.STARTING
    joining: bool = False
    leaving: bool = False
    stop_sent: StopSignal | None = None
    stop_sent_at: float | None = None
    error: ReportedError = NO_ERROR
    error_at: float | None = None
    ended_at: float | None = None
    code: int | None = None
    oom_killed: bool | None = None
    started_at: float = 0.0
    queued: bool = False
    start_at: float | None = None
    restarts: int = 0
    made_progress: bool = False
    lagging: bool = False
    heartbeat_at: float | None = None
    cpu_seconds: float = 0.0
    gil_blocked: bool = False
    reported_state: str = ""
    evaluated_at: float = 0.0
    stall_reason: str = ""
    silent_since: float | None = None
    not_restarted_because: str = ""
    cause: str = ""
    cancelled: bool = False
    profile: str = ""

    @property
    def failed_at(self) -> float:
        """When it failed. A task that reports an error may exit much later, and other tasks fail of it in between."""
        times = [time for time in (self.error_at, self.ended_at, self.silent_since) if time is not None]
        return min(times, default=float("inf"))

    @property
    def was_killed(self) -> bool:
        """Whether SIGKILL ended it, or the program that it ran as a child."""
        return self.code in (-signal.SIGKILL, 128 + signal.SIGKILL)

    @property
    def ended_by_launcher(self) -> bool:
        """Whether the exit code is 0 or follows from the launcher's own signal."""
        if self.cancelled:
            return False
        sent = {
            None: (),
            StopSignal.TERMINATE: (signal.SIGTERM,),
            StopSignal.KILL: (signal.SIGTERM, signal.SIGKILL),
        }[self.stop_sent]
        return self.code in (0, *(-number for number in sent), *(128 + number for number in sent))

    @property
    def ended_as_asked(self) -> bool:
        """Whether it ended by itself after SIGTERM: neither an error nor SIGKILL kept it from finishing its work."""
        return self.ended_by_launcher and not self.was_killed


@dataclass(frozen=True)
class LostTask:
    """A failed task that leads to a restart, of itself or of the whole job; or one that a resize has cost.

    Args:
        task: the task.
        ended: its state at its exit.
        attempt: the attempt in which it failed, from 1.
        alone: whether the task is restarted alone; otherwise the whole job is.
        step: the furthest step that the training had reached.
        made_progress: whether there was progress since the previous restart, if there was one.
        delay: seconds until the restart.
        caused_by: the lost task that caused this failure. Only that one counts toward the limits then.
        resizing: whether it was to save for a resize, or one is reverted because of it. It counts toward no limit.
    """

    task: TaskId
    ended: TaskState
    attempt: int
    alone: bool
    step: int
    made_progress: bool
    delay: float
    caused_by: TaskId | None = None
    resizing: bool = False


@dataclass(frozen=True)
class Resize:
    """A change of the numbers of tasks while the job runs.

    Args:
        wanted: the request.
        asked_at: when it was accepted.
        attempt: the attempt that ended because of it, from 1.
        step: the last step reported before it; None before the first.
        resumed: the step of the checkpoint from which the next attempt resumed; None until that is reported.
        trained_at: when the next attempt reported its first step; without another attempt, when all tasks had joined or
            left. None until then.
        failed: the tasks that could not join.
        kept: the tasks that did not leave, since no other task of their role could join.
        lost: the tasks that were asked to leave or to save, and failed or were killed instead.
        before: every task of the numbers from before it.
        reverted: the failure because of which the job goes on with those; None if it does not.
    """

    wanted: ResizeAccepted
    asked_at: float
    attempt: int
    step: int | None = None
    resumed: int | None = None
    trained_at: float | None = None
    failed: tuple[TaskId, ...] = ()
    kept: tuple[TaskId, ...] = ()
    lost: tuple[TaskId, ...] = ()
    before: tuple[TaskId, ...] = ()
    reverted: LostTask | None = None


@dataclass(frozen=True)
class JobState:
    """The state of the whole job. All times are in seconds since the job began.

    Args:
        policy: the user's configuration.
        tasks: every task, in the order of the plan.
        phase: the phase of the attempt.
        until: when the phase times out; None for no limit.
        attempt: how often all tasks were started, from 1.
        attempt_started_at: when they were last started.
        lost_tasks: the failures that led to a restart, and those of a resize, oldest first.
        resizes: the changes of the numbers of tasks, oldest first.
        restarting: whether the job restarts from its last checkpoint once all tasks have exited.
        resizing: whether that restart is with other numbers of tasks, those of the last resize.
        takes_no_workers_because: why no worker can join now; empty if workers can.
        limits: the most tasks of a role with which the model can be trained, and why.
        step: the furthest step of the training.
        attempt_step: the last step reported in this attempt; None before the first.
        progressed_at: when the training last made progress, or had computed for the stall timeout.
        reported_at: when it last reported progress.
        cpu_seconds: the processor time that all tasks have used since then.
        failing: whether a task's failure ended the attempt.
        signum: the signal to the launcher that ended the job.
        start_timed_out: the tasks that were not up in time, which ended the job.
        evaluator_timed_out: whether the evaluator was stopped before it had scored the last checkpoint.
    """

    policy: JobPolicy
    tasks: TaskTable[TaskState]
    phase: Phase = Phase.RUNNING
    until: float | None = None
    attempt: int = 1
    attempt_started_at: float = 0.0
    lost_tasks: tuple[LostTask, ...] = ()
    resizes: tuple[Resize, ...] = ()
    restarting: bool = False
    resizing: bool = False
    takes_no_workers_because: str = NOT_TRAINING_YET
    limits: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    step: int = 0
    attempt_step: int | None = None
    progressed_at: float = 0.0
    reported_at: float = 0.0
    cpu_seconds: float = 0.0
    failing: bool = False
    signum: int | None = None
    start_timed_out: tuple[TaskId, ...] = ()
    evaluator_timed_out: bool = False

    @property
    def alive(self) -> tuple[TaskId, ...]:
        """The tasks whose processes have not exited."""
        return self.tasks.select(_is_alive)

    @property
    def starting(self) -> tuple[TaskId, ...]:
        """The tasks that have not yet reported that they are up."""
        return self.tasks.select(_is_starting)

    @property
    def due(self) -> tuple[TaskId, ...]:
        """The lost tasks that are to be restarted."""
        return self.tasks.select(_is_due)

    @property
    def start_pending(self) -> tuple[TaskId, ...]:
        """The tasks to which the start timeout applies."""
        return self.tasks.select(_start_pending) if self._start_limited else ()

    @property
    def heartbeat_expected(self) -> tuple[TaskId, ...]:
        """The tasks that must send heartbeats: those that have sent the first one."""
        if not self.policy.timeouts.stall or self.phase not in (Phase.RUNNING, Phase.EVALUATING):
            return ()
        beating = self.tasks.select(_beats)
        return (
            beating if self.phase is Phase.RUNNING else tuple(name for name in beating if name.traits.outlives_training)
        )

    @property
    def stalled(self) -> tuple[TaskId, ...]:
        """The tasks that were killed because they were stalled, whether or not they have exited."""
        return self.tasks.select(_stall_reason)

    @property
    def being_killed(self) -> tuple[TaskId, ...]:
        """The stalled tasks that were killed and have not exited yet."""
        return self.tasks.select(_is_being_killed)

    @property
    def step_expected(self) -> bool:
        """Whether the stall timeout applies to training steps: all tasks are up, and they report steps."""
        if not self.policy.timeouts.stall or self.phase is not Phase.RUNNING or self.being_killed:
            return False
        return self.attempt_step is not None or (self.policy.reports and not self.starting)

    @property
    def _start_limited(self) -> bool:
        """Whether there is a start timeout."""
        return self.phase is Phase.RUNNING and self.policy.reports

    @property
    def leaving(self) -> tuple[TaskId, ...]:
        """The tasks that were asked to leave, and neither have left nor were killed."""
        return self.tasks.select(_is_leaving)

    @property
    def leaving_since(self) -> Mapping[TaskId, float]:
        """From when on the time of each leaving task is limited. One that nobody reads from waits, and is not listed.

        The tasks that train read no examples of data workers while they evaluate.
        """
        training = [task for name, task in self.tasks.items() if self.policy.decides(name) and not task.status.ended]
        evaluating = any(task.reported_state == EVALUATING for task in training)
        read = max((task.evaluated_at for task in training), default=0.0)
        since = {}
        for name in self.leaving:
            sent, waits = self.tasks[name].stop_sent_at, name.traits.prepares_data
            if sent is not None and not (waits and evaluating):
                since[name] = max(sent, read) if waits else sent
        return since

    @property
    def open_change(self) -> Resize | None:
        """The last resize, if it is a change of the running attempt that is not finished."""
        last = self.resizes[-1] if self.resizes else None
        live = last is not None and last.wanted.is_live and last.attempt == self.attempt
        return last if last and live and last.trained_at is None else None

    @property
    def wanted(self) -> tuple[TaskId, ...]:
        """The tasks of the next attempt."""
        if not self.resizes:
            return tuple(self.tasks)
        last = self.resizes[-1]
        return last.before if last.reverted else last.wanted.tasks

    @property
    def revertible(self) -> bool:
        """Whether the job can go back to the numbers of tasks before the last resize: it has not trained since."""
        last = self.resizes[-1] if self.resizes else None
        if last is None or last.wanted.is_live or last.trained_at is not None:
            return False
        return last.reverted is None and self.attempt > last.attempt

    @property
    def present(self) -> tuple[TaskId, ...]:
        """The tasks that run, or are due to be restarted, except those that leave."""
        return self.tasks.select(_is_present)

    @cached_property
    def deadline(self) -> float | None:
        """When the supervisor must act even if no event arrives."""
        timeouts, earliest = self.policy.timeouts, self.tasks.earliest
        times = [self.until, earliest(_start_at)]
        if self._start_limited:
            times.append(_after(earliest(_pending_since), timeouts.start))
        if timeouts.stall and self.phase in _LAST_BEATS:
            times.append(_after(earliest(_LAST_BEATS[self.phase]), timeouts.stall))
        if self.phase in (Phase.RUNNING, Phase.EVALUATING):
            times.append(_after(earliest(_killed_at), KILL_TIMEOUT))
            since = self.leaving_since if earliest(_leaving_since) is not None else {}
            times.append(_after(min(since.values(), default=None), timeouts.shutdown))
        if self.step_expected:
            times.append(self.progressed_at + timeouts.stall)
        return min((time for time in times if time is not None), default=None)

    @property
    def restarts(self) -> int:
        """How many of the allowed restarts have been used."""
        return sum(lost.caused_by is None and not lost.resizing for lost in self.lost_tasks)

    @property
    def training_done(self) -> bool:
        """Whether each deciding task has exited with code 0."""
        return all(task.status is Status.DONE for name, task in self.tasks.items() if self.policy.decides(name))

    @property
    def deciding_tasks_done(self) -> bool:
        """Whether all deciding tasks have reported that they are done. The tasks that serve them may exit from then."""
        deciding = [task for name, task in self.tasks.items() if self.policy.decides(name)]
        return all(task.reported_state == "done" for task in deciding)

    def has_served(self, name: TaskId) -> bool:
        """Whether a task that only serves others had no work left when it was stopped: the training is done."""
        return self.training_done and not self.failing and serves(self.policy.strategy, name.role)

    @property
    def not_resizable_because(self) -> str:
        """Why the job cannot be resized now; empty if it can."""
        last = self.resizes[-1] if self.resizes else None
        begins = last and last.trained_at is None and self.attempt == last.attempt + (2 if last.reverted else 1)
        if self.open_change or self.resizing or begins:
            return "the previous resize is not finished"
        if self.restarting:
            return "its tasks are being restarted after a failure"
        if self.phase is Phase.EVALUATING:
            return "its training is done"
        return "" if self.phase is Phase.RUNNING else "it is shutting down"

    @property
    def failures(self) -> tuple[TaskId, ...]:
        """The failed tasks, the cause first. Failures of evaluators come last."""
        failed = [task for task, state in self.tasks.items() if state.status is Status.FAILED]
        failed.sort(key=lambda task: (task.traits.optional, self.tasks[task].failed_at))
        return causes_first(failed, {task: self.tasks[task].error for task in failed})

    @property
    def exit_code(self) -> int:
        """The exit code of `tfdist launch` in this state: that of the first failed task that has one."""
        if self.signum is not None:
            return 128 + self.signum
        if self.start_timed_out or self.resizing:
            return 124
        failed = [self.tasks[task] for task in self.failures]
        if not failed:
            return 124 if self.failing and self.being_killed else 0
        own = (code for code in map(shell_code, failed) if code)
        return 124 if failed[0].stall_reason else next(own, 1)


def shell_code(task: TaskState) -> int:
    """The task's exit code as a shell reports it; 0 if the exit follows from the launcher's own signal."""
    code = task.code or 0
    if task.ended_by_launcher:
        return 0
    return 128 - code if code < 0 else code


def _after(time: float | None, seconds: float) -> float | None:
    return None if time is None else time + seconds


# Functions of one task, for `TaskTable.select` and `TaskTable.earliest`.


def _is_alive(_: TaskId, task: TaskState) -> bool:
    return not task.status.ended


def _is_starting(_: TaskId, task: TaskState) -> bool:
    return task.status is Status.STARTING


def _is_due(_: TaskId, task: TaskState) -> bool:
    return task.start_at is not None


def _is_present(_: TaskId, task: TaskState) -> bool:
    return not task.leaving and (not task.status.ended or task.start_at is not None)


def _is_leaving(_: TaskId, task: TaskState) -> bool:
    return task.leaving and not task.status.ended and task.stop_sent is not StopSignal.KILL


def _leaving_since(name: TaskId, task: TaskState) -> float | None:
    return task.stop_sent_at if _is_leaving(name, task) else None


def _start_pending(_: TaskId, task: TaskState) -> bool:
    return task.status is Status.STARTING and not task.queued and task.stop_sent is None


def _stall_reason(_: TaskId, task: TaskState) -> str:
    return task.stall_reason


def _is_being_killed(_: TaskId, task: TaskState) -> bool:
    return bool(task.stall_reason) and not task.status.ended


def _start_at(_: TaskId, task: TaskState) -> float | None:
    return task.start_at


def _pending_since(name: TaskId, task: TaskState) -> float | None:
    return task.started_at if _start_pending(name, task) else None


def _beats(_: TaskId, task: TaskState) -> bool:
    return not task.status.ended and task.heartbeat_at is not None and task.stop_sent is None


def _last_beat(name: TaskId, task: TaskState) -> float | None:
    return task.heartbeat_at if _beats(name, task) else None


def _last_beat_of_evaluator(name: TaskId, task: TaskState) -> float | None:
    return _last_beat(name, task) if name.traits.outlives_training else None


def _killed_at(name: TaskId, task: TaskState) -> float | None:
    return (task.stop_sent_at or 0.0) if _is_being_killed(name, task) else None


_LAST_BEATS = {Phase.RUNNING: _last_beat, Phase.EVALUATING: _last_beat_of_evaluator}
