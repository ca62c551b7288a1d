"""The tasks of a simulated job: they start, train, fail, hang, obey signals and exit, by a seeded random generator.

It is the supervisor's counterpart: it gets actions and produces events at simulated times.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

from tfdist_cli.launch.supervisor.events import (
    Action,
    Event,
    Exited,
    Queued,
    RecordReceived,
    Start,
    Started,
    Stop,
    StopSignal,
)
from tfdist_cli.launch.supervisor.membership import LEFT
from tfdist_cli.spec.strategies import Strategy, computes_gradients, decides, joins_cluster
from tfdist_cli.spec.task_id import TaskId

STEP_PERIOD = 1.0
"""Seconds between two steps, each of which is reported."""
_FAILS_TO_START = 2e-5
"""The probability that a task's program cannot be started, and that it is never up."""
_RATES = 100
"""Workers whose rates are in a report."""


FAULTS = {
    "kill": 6.0,
    "crash": 2.0,
    "lose_host": 1.0,
    "hang": 2.0,
    "block": 1.0,
    "stop_answering_signals": 1.0,
    "exit_early": 0.2,
    "cancel": 0.02,
    "preempt": 1.0,
    "stay_after_kill": 0.1,
}


@dataclass(frozen=True)
class Behaviour:
    """How the tasks behave.

    Args:
        strategy: determines which tasks drive the steps.
        reports: whether they send records, as the tasks of a recipe do.
        steps: the steps after which the training is done.
        beat_period: seconds between two heartbeats of a task.
        fault_period: mean seconds between two faults of the whole cluster; infinite for none.
        faults: the relative frequency of each fault, a method of `SimulatedTasks`.
        queued: whether a scheduler starts the tasks after a while.
    """

    strategy: Strategy
    reports: bool = True
    steps: int = 600
    beat_period: float = 2.0
    fault_period: float = 60.0
    faults: Mapping[str, float] = field(default_factory=lambda: dict(FAULTS))
    queued: bool = False


@dataclass
class SimulatedProcess:
    """One process of a task.

    Args:
        task: the task.
        pid: unique in the simulation.
        up: whether it has reported that it is up.
        joined: whether it has taken part in a step.
        hung: whether it is stopped: it sends nothing, and only SIGKILL ends it.
        blocked: whether it makes no steps, although it sends heartbeats.
        deaf: whether it ignores SIGTERM.
        immortal: whether not even SIGKILL ends it: it waits in the kernel.
        stopped: the last signal that it got.
        exiting: whether its exit is due.
        exited: whether it has exited.
    """

    task: TaskId
    pid: int
    up: bool = False
    joined: bool = False
    hung: bool = False
    blocked: bool = False
    deaf: bool = False
    immortal: bool = False
    stopped: StopSignal | None = None
    exiting: bool = False
    exited: bool = False

    @property
    def works(self) -> bool:
        """Whether it takes part in steps."""
        return self.up and not (self.hung or self.blocked or self.exiting or self.exited)


class SimulatedTasks:
    """All processes, and the events that are due.

    Args:
        behaviour: how the tasks behave.
        random_numbers: decides what is left to chance.
        deliver: gets each event at its time.
    """

    def __init__(
        self, behaviour: Behaviour, random_numbers: random.Random, deliver: Callable[[Event, float], None]
    ) -> None:
        self.processes: dict[TaskId, SimulatedProcess] = {}
        """The latest process of each task."""
        self.started: list[SimulatedProcess] = []
        self.step = 0
        self._behaviour = behaviour
        self._random = random_numbers
        self._deliver = deliver
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._saved = 0
        self.at(self._next_fault(), self._fault)
        self.at(STEP_PERIOD, self._train)

    @property
    def next_time(self) -> float:
        """When the next event is due; infinite if there is none."""
        return self._due[0][0] if self._due else float("inf")

    def happen(self) -> None:
        """Makes the next event happen."""
        time, _, what = heapq.heappop(self._due)
        what(time)

    def at(self, time: float, what: Callable[[float], None]) -> None:
        """Plans something for a later time."""
        if time < float("inf"):
            heapq.heappush(self._due, (time, next(self._order), what))

    def resume(self, tasks: Container[TaskId]) -> None:
        """Begins an attempt of these tasks from the last checkpoint."""
        self.step = self._saved
        self.processes = {task: process for task, process in self.processes.items() if task in tasks}

    def act(self, action: Action, now: float) -> None:
        """Carries out an action of the supervisor."""
        if isinstance(action, Start):
            self._start(action.task, now)
        elif isinstance(action, Stop):
            self._stop(action, now)

    def _stop(self, action: Stop, now: float) -> None:
        process = self.processes[action.task]
        process.stopped = action.signal
        if action.signal is StopSignal.KILL:
            if not process.immortal:
                self._exit(process, -9, now + self._between(0.01, 1.0))
        elif not (process.hung or process.deaf or process.immortal):
            self._end(process, now)

    def _end(self, process: SimulatedProcess, now: float) -> None:
        """A process that has got SIGTERM: one that drives saves, one that may leave says so."""
        code = self._random.choice((0, 143)) if self._drives(process.task) else -15
        if process.works and joins_cluster(self._behaviour.strategy, process.task.role):
            self._record(process, now, "state", state=LEFT)
            code = 0
        self._exit(process, code, now + self._between(0.01, 8.0))

    def _start(self, task: TaskId, now: float) -> None:
        process = self.processes[task] = SimulatedProcess(task, len(self.started))
        self.started.append(process)
        began = now + self._between(0.01, 0.5)
        if self._behaviour.queued:
            self.at(began, lambda time: self._send(process, Queued(task), time))
            began += self._between(0.0, 600.0)
        if self._random.random() < _FAILS_TO_START:
            self._exit(process, 127, began)
            return
        self.at(began, lambda time: self._send(process, Started(task, process.pid), time))
        slow = self._random.random() < _FAILS_TO_START
        self.at(began + (1e6 if slow else self._between(1.0, 15.0)), lambda time: self._come_up(process, time))

    def _come_up(self, process: SimulatedProcess, now: float) -> None:
        if process.exited or process.hung:
            return
        process.up = True
        self._record(process, now, "state", state="training" if self._drives(process.task) else "serving")
        if self._behaviour.reports:
            self._beat(process, now)

    def _beat(self, process: SimulatedProcess, now: float) -> None:
        if not (process.exited or process.hung):
            self._record(process, now, "beat", computed=now / 10, held=process.blocked)
            self.at(now + self._behaviour.beat_period, lambda time: self._beat(process, time))

    def _train(self, now: float) -> None:
        """One step, and its report."""
        self.at(now + STEP_PERIOD, self._train)
        needed = [process for process in self.processes.values() if self._is_needed(process.task)]
        workers = [process for process in self.processes.values() if self._computes(process.task)]
        trains = needed and all(process.works for process in needed) and any(worker.works for worker in workers)
        if not trains:
            return
        self.step += 1
        if self.step % 60 == 0:
            self._saved = self.step
        leader = needed[0]
        for worker in workers:
            if worker.works and not worker.joined:
                worker.joined = True
                self._record(leader, now, "joined", worker=str(worker.task))
        rates = {str(each.task): float(each.works) for each in workers[:_RATES]} if self.step % 10 == 0 else {}
        self._record(leader, now, "progress", step=self.step, workers=rates)
        if self.step >= self._behaviour.steps:
            for process in [each for each in needed if self._drives(each.task)]:
                self._record(process, now, "state", state="done")
                self._exit(process, 0, now + self._between(0.1, 2.0))

    def _is_needed(self, task: TaskId) -> bool:
        """Whether the training cannot take a step without the task."""
        return self._drives(task) or task.traits.holds_variables

    def _computes(self, task: TaskId) -> bool:
        return computes_gradients(self._behaviour.strategy, task.role)

    def _drives(self, task: TaskId) -> bool:
        return decides(self._behaviour.strategy, task.role)

    def _exit(self, process: SimulatedProcess, code: int, at: float, **fields: Any) -> None:
        process.exiting = True

        def leave(now: float) -> None:
            if process.exited:
                return
            process.exited = True
            self._deliver(Exited(process.task, code, **fields), now)
            if code and process.stopped is None:
                self._notice_loss(process.task, now)
            elif not code and self._drives(process.task):
                self._finish_evaluation(now)

        self.at(at, leave)

    def _finish_evaluation(self, now: float) -> None:
        for process in self.processes.values():
            if process.task.traits.outlives_training and process.works:
                self._exit(process, 0, now + self._between(1.0, 400.0))

    def _notice_loss(self, lost: TaskId, now: float) -> None:
        """Makes the tasks that need a lost one fail of it."""
        if not self._is_needed(lost):
            return
        for process in self.processes.values():
            if self._drives(process.task) and process.works and process.task != lost:
                self.at(now + self._between(0.1, 10.0), partial(self._fail_of, process, lost))

    def _fail_of(self, process: SimulatedProcess, lost: TaskId, now: float) -> None:
        if process.exited or process.exiting or process.hung:
            return
        text = f"lost connection to /job:{lost.role}/replica:0/task:{lost.index}"
        self._record(process, now, "error", type="UnavailableError", message=text)
        self._exit(process, 1, now + self._between(0.0, 3.0))

    def _fault(self, now: float) -> None:
        self.at(now + self._next_fault(), self._fault)
        running = [process for process in self.processes.values() if not (process.exited or process.exiting)]
        if not running:
            return
        faults = self._behaviour.faults
        (name,) = self._random.choices(list(faults), list(faults.values()))
        getattr(self, f"_{name}")(self._random.choice(running), now)

    def _kill(self, process: SimulatedProcess, now: float) -> None:
        self._exit(process, -9, now)

    def _crash(self, process: SimulatedProcess, now: float) -> None:
        self._record(process, now, "error", type="ValueError", message=f"no {self._random.randrange(10)}")
        self._exit(process, 1, now + self._between(0.0, 3.0))

    def _lose_host(self, process: SimulatedProcess, now: float) -> None:
        """Loses the host of eight tasks."""
        host = process.task.index // 8
        for each in self.processes.values():
            if each.task.role == process.task.role and each.task.index // 8 == host and not each.exiting:
                self._exit(each, -9, now, cause="its host is lost")

    def _hang(self, process: SimulatedProcess, now: float) -> None:  # noqa: ARG002
        process.hung = True

    def _block(self, process: SimulatedProcess, now: float) -> None:  # noqa: ARG002
        process.blocked = True

    def _stop_answering_signals(self, process: SimulatedProcess, now: float) -> None:  # noqa: ARG002
        process.deaf = True

    def _stay_after_kill(self, process: SimulatedProcess, now: float) -> None:  # noqa: ARG002
        process.immortal = process.hung = True

    def _exit_early(self, process: SimulatedProcess, now: float) -> None:
        self._exit(process, 0, now)

    def _preempt(self, process: SimulatedProcess, now: float) -> None:
        """Takes a task's node away: it gets SIGTERM from outside."""
        if not process.deaf:
            self._end(process, now)

    def _cancel(self, process: SimulatedProcess, now: float) -> None:
        self._exit(process, -15, now, cancelled=True)

    def _record(self, process: SimulatedProcess, now: float, kind: str, **fields: Any) -> None:
        if self._behaviour.reports:
            self._send(process, RecordReceived(process.task, {"kind": kind, **fields}), now)

    def _send(self, process: SimulatedProcess, event: Event, now: float) -> None:
        if not process.exited:
            self._deliver(event, now)

    def _next_fault(self) -> float:
        period = self._behaviour.fault_period
        return self._random.expovariate(1 / period) if period < float("inf") else period

    def _between(self, low: float, high: float) -> float:
        return self._random.uniform(low, high)
