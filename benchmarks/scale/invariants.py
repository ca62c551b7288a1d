"""What must hold for every history of a job, checked after each event by one who sees all processes."""

from __future__ import annotations

import signal
from collections import Counter, deque
from collections.abc import Iterable

from benchmarks.scale.simulated_tasks import SimulatedTasks
from tfdist_cli.launch.supervisor.events import Action, Event, Exited, Profile, SignalReceived, Stop, StopSignal, Tick
from tfdist_cli.launch.supervisor.state import KILL_TIMEOUT, JobState, Phase, Status
from tfdist_cli.spec.task_id import TaskId

_KEPT = 12
_ROUNDING = 1e-6
SHUTTING_DOWN = (Phase.SAVING, Phase.STOPPING, Phase.KILLING, Phase.PAUSED, Phase.ENDED)


class Violation(AssertionError):
    """An invariant does not hold. The message has the last events."""


class Invariants:
    """Checks a history.

    Args:
        tasks: the processes, as they really are.
    """

    def __init__(self, tasks: SimulatedTasks) -> None:
        self._tasks = tasks
        self._recent: deque[str] = deque(maxlen=_KEPT)
        self._signalled_at: float | None = None
        self._alone: Counter[TaskId] = Counter()
        self._due_at: dict[TaskId, float] = {}
        """When each lost task starts again, if it does so alone."""
        self._progressed_at = 0.0
        self.checks = 0

    def check(self, before: JobState, event: Event, state: JobState, actions: Iterable[Action], now: float) -> None:
        """Checks what followed from an event.

        Raises:
            Violation: an invariant does not hold.
        """
        self._recent.append(f"{now:.3f} {event} → {state.phase.value} {[str(each) for each in actions][:3]}")
        self._now = now
        self._require(before.phase is not Phase.ENDED or not tuple(actions), "nothing is done after the end")
        if isinstance(event, Exited):
            self._check_exit(before, event, state)
        if isinstance(event, SignalReceived):
            self._check_signal(before, state, now)
        for action in actions:
            self._check_action(action, event, before, state)
        if isinstance(event, Tick):
            late = state.deadline is not None and state.deadline <= now
            self._require(not late, "no deadline passes without what is due")
        if len(state.lost_tasks) > len(before.lost_tasks):
            self._check_limits(state)
            lost = state.lost_tasks[-1]
            self._due_at[lost.task] = now + lost.delay
        if state.step > before.step or state.phase is not before.phase or actions:
            self._progressed_at = now

    def check_end(self, state: JobState) -> None:
        """Checks the end of the job."""
        left = {process.task for process in self._tasks.started if not process.exited}
        self._require(left == set(state.alive), "the processes that are left are those that the supervisor reports")
        for process in self._tasks.started:
            gone = process.exited or (process.immortal and process.stopped is StopSignal.KILL)
            self._require(gone, f"{process.task} ends")
        if state.signum is not None:
            self._require(state.exit_code == 128 + state.signum, "a signal gives the exit code")
        elif state.training_done and not state.failing and not state.start_timed_out:
            own = [task for task in state.failures if not task.traits.optional]
            self._require(not own, "a training that is done succeeds")
            self._require((state.exit_code == 0) == (not state.failures), "only a failed evaluator has an exit code")

    def check_liveness(self, state: JobState, now: float) -> None:
        """Checks that the job makes steps or is being ended, as far as there are timeouts."""
        timeouts = state.policy.timeouts
        if state.policy.reports and timeouts.stall:
            patience = 2 * timeouts.stall + timeouts.start + 2 * timeouts.shutdown + timeouts.evaluator + 700.0
            self._require(now - self._progressed_at < patience, "the job makes progress or acts")
        if self._signalled_at is not None:
            bound = 2 * timeouts.shutdown + KILL_TIMEOUT + _ROUNDING
            self._require(now - self._signalled_at <= bound, "a signal ends the job in time")

    def check_silent(self, state: JobState, process_number: int) -> None:
        """Checks that a task that was hung for longer than the stall timeout has been killed."""
        process = self._tasks.started[process_number]
        noticed = process.exited or process.stopped is not None or state.phase in SHUTTING_DOWN
        outside = process.task not in state.tasks or state.tasks[process.task].heartbeat_at is None
        spared = state.phase is Phase.EVALUATING and not process.task.traits.outlives_training
        self._require(noticed or outside or spared, f"{process.task} hangs and is killed")

    def _check_exit(self, before: JobState, event: Exited, state: JobState) -> None:
        if event.task not in state.tasks:
            return  # a resize has removed it
        task, first = state.tasks[event.task], not before.tasks[event.task].status.ended
        self._require(first, "a process exits once")
        self._require(task.status.ended and task.code == event.code, "an exit is noted")
        if before.phase is not Phase.RUNNING or before.tasks[event.task].stop_sent:
            return
        if event.code and not event.task.traits.optional:
            self._require(task.status in (Status.LOST, Status.FAILED), "a failure counts as one")
        if task.status is Status.LOST:
            due = task.start_at is not None or task.joining
            self._require(due or state.phase in SHUTTING_DOWN, "a lost task is due again, unless it was to join")
        if task.status is Status.FAILED and not event.task.traits.optional:
            self._require(state.failing and state.phase in SHUTTING_DOWN, "a failure ends the attempt")

    def _check_signal(self, before: JobState, state: JobState, now: float) -> None:
        if before.phase is not Phase.ENDED:
            self._require(state.phase in SHUTTING_DOWN and not state.restarting, "a signal ends the job")
            self._signalled_at = now if self._signalled_at is None else self._signalled_at

    def _check_action(self, action: Action, event: Event, before: JobState, state: JobState) -> None:
        process = self._tasks.processes.get(action.task)
        if isinstance(action, Stop):
            self._require(process is not None and not process.exited, "a signal is for a task that runs")
            again = process is not None and process.stopped in (action.signal, StopSignal.KILL)
            self._require(not again, "no signal is sent twice, and none after SIGKILL")
            return
        if isinstance(action, Profile):
            self._require(process is not None and not process.exited, "a task that is profiled runs")
            return
        self._require(process is None or process.exited, "a task that runs is not started")
        self._require(self._signalled_at is None, "nothing is started after a signal")
        self._require(action.attempt == state.attempt, "a task starts in this attempt")
        if state.attempt == before.attempt and isinstance(event, Tick):
            self._alone[action.task] += 1
            in_time = abs(self._now - self._due_at[action.task]) <= _ROUNDING
            self._require(in_time, "a lost task starts when its delay is over")

    def _check_limits(self, state: JobState) -> None:
        policy = state.policy
        self._require(state.restarts <= policy.max_restarts, "restarts have a limit")
        lost = state.lost_tasks[-1]
        own = sum(each.task == lost.task and each.caused_by is None for each in state.lost_tasks)
        most = policy.restart(lost.task).max
        self._require(most is None or not lost.alone or own <= most, "restarts of a task have a limit")
        alone = sum(each.alone for each in state.lost_tasks)
        self._require(sum(self._alone.values()) <= alone, "a task starts again after a loss only")
        whole = len(state.lost_tasks) - alone + len(state.resizes)
        self._require(state.attempt - 1 <= whole, "an attempt follows from a loss or a resize")

    def _require(self, holds: bool, what: str) -> None:
        self.checks += 1
        if not holds:
            raise Violation("\n".join([f"at {self._now:.3f} s this does not hold: {what}", *self._recent]))


def shutdown_signals() -> tuple[int, ...]:
    """The signals that end a job."""
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP
