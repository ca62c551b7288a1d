"""A discrete-event simulation of the supervisor: many tasks, random faults, hours of simulated time."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.scale.invariants import Invariants, Violation, shutdown_signals
from benchmarks.scale.simulated_tasks import Behaviour, SimulatedTasks
from tfdist_cli.launch.supervisor.events import Action, Event, ResizeAccepted, SignalReceived, Tick
from tfdist_cli.launch.supervisor.machine import begin, step
from tfdist_cli.launch.supervisor.state import JobPolicy, JobState, Phase, Timeouts
from tfdist_cli.spec.roles import Role
from tfdist_cli.spec.sections.role_spec import RestartPolicy, RestartSpec
from tfdist_cli.spec.strategies import Strategy, joins_cluster
from tfdist_cli.spec.task_id import TaskId

_LOOK = 30.0
"""Seconds between two checks that the job makes progress."""


@dataclass(frozen=True)
class Scenario:
    """A job to simulate.

    Args:
        seed: decides everything that is left to chance.
        tasks: the tasks.
        policy: the user's configuration.
        behaviour: how the tasks behave.
        signal_at: when the launcher gets a signal; infinite for never.
        resize_period: mean seconds between two requests for other numbers of workers; infinite for none.
        hours: simulated time after which the job gets SIGTERM.
    """

    seed: int
    tasks: tuple[TaskId, ...]
    policy: JobPolicy
    behaviour: Behaviour
    signal_at: float = float("inf")
    resize_period: float = float("inf")
    hours: float = 1.0

    @classmethod
    def draw(cls, seed: int, count: int, hours: float, beat_period: float = 2.0) -> Scenario:
        """Draws a scenario of `count` tasks at random."""
        numbers = random.Random(seed)
        strategies: tuple[Strategy, ...] = ("parameter_server", "multi_worker_mirrored")
        strategy = numbers.choices(strategies, (3, 1))[0]
        tasks = list(_draw_tasks(numbers, strategy, count))
        timeouts = Timeouts(
            start=numbers.choice((60.0, 120.0)),
            evaluator=numbers.choice((50.0, 300.0)),
            shutdown=numbers.choice((5.0, 30.0)),
            stall=numbers.choice((0.0, 60.0, 120.0)),
        )
        reports = numbers.random() < 0.85
        most = numbers.choice((0, 10, 10_000, 10_000))
        restarts: dict[Role, RestartSpec] = {
            role: _draw_restart(numbers)
            for role in dict.fromkeys(task.role for task in tasks)
            if numbers.random() < 0.3 and not (role == "chief" or strategy == "multi_worker_mirrored")
        }
        behaviour = Behaviour(
            strategy,
            reports=reports,
            steps=int(hours * 3600 * numbers.uniform(0.2, 1.2)),
            beat_period=beat_period,
            fault_period=numbers.choice((20.0, 120.0, 600.0, float("inf"))),
            queued=numbers.random() < 0.2,
        )
        return cls(
            seed,
            tuple(tasks),
            JobPolicy(strategy, reports, timeouts, most, restarts),
            behaviour,
            signal_at=numbers.uniform(0, hours * 3600) if numbers.random() < 0.3 else float("inf"),
            resize_period=numbers.choice((300.0, float("inf"))) if reports else float("inf"),
            hours=hours,
        )


@dataclass
class Outcome:
    """What happened in a simulation.

    Args:
        state: the last state.
        events: events that the supervisor handled.
        decisions: processor seconds that it took for them, with the time until which it may then wait.
        starts: processes that were started.
        seconds: simulated seconds.
        checks: invariants that were checked.
    """

    state: JobState
    events: int = 0
    decisions: float = 0.0
    starts: int = 0
    seconds: float = 0.0
    checks: int = 0

    @property
    def rate(self) -> float:
        """Decisions per second of processor time."""
        return self.events / self.decisions if self.decisions else 0.0


class Simulation:
    """One job from its start to its end.

    Args:
        scenario: the job.
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._random = random.Random(f"{scenario.seed} job")
        self._now = 0.0
        self._tasks = SimulatedTasks(scenario.behaviour, random.Random(f"{scenario.seed} tasks"), self._deliver)
        self._invariants = Invariants(self._tasks)
        self._hung: set[int] = set()
        state, actions = begin(scenario.policy, scenario.tasks, 0.0)
        self._outcome = Outcome(state)
        self._act(actions)

    def run(self) -> Outcome:
        """Runs it to its end.

        Raises:
            Violation: an invariant does not hold, or the job can never end.
        """
        scenario, outcome = self._scenario, self._outcome
        self._tasks.at(min(scenario.signal_at, scenario.hours * 3600), self._signal)
        self._tasks.at(_LOOK, self._look)
        if scenario.resize_period < float("inf"):
            self._tasks.at(self._random.expovariate(1 / scenario.resize_period), self._resize)
        while outcome.state.phase is not Phase.ENDED:
            deadline = outcome.state.deadline
            if deadline is not None and deadline <= self._tasks.next_time:
                self._deliver(Tick(), max(deadline, self._now))
            else:
                self._tasks.happen()
        self._invariants.check_end(outcome.state)
        return replace(outcome, starts=len(self._tasks.started), seconds=self._now, checks=self._invariants.checks)

    def _deliver(self, event: Event, now: float) -> None:
        """Passes an event to the supervisor, and what is due by then."""
        self._decide(event, now)
        deadline = self._outcome.state.deadline
        if deadline is not None and deadline <= now:
            self._decide(Tick(), now)

    def _decide(self, event: Event, now: float) -> None:
        before, self._now = self._outcome.state, now
        began = time.process_time_ns()
        state, actions = step(before, event, now)
        _ = state.deadline
        self._outcome.decisions += (time.process_time_ns() - began) / 1e9
        self._outcome.events += 1
        self._invariants.check(before, event, state, actions, now)
        self._outcome.state = state
        if state.attempt > before.attempt:
            self._tasks.resume(state.tasks)
        self._act(actions)

    def _act(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self._tasks.act(action, self._now)

    def _signal(self, now: float) -> None:
        self._deliver(SignalReceived(self._random.choice(shutdown_signals())), now)

    def _look(self, now: float) -> None:
        """Checks now and then what no event shows."""
        state = self._outcome.state
        self._invariants.check_liveness(state, now)
        stall = state.policy.timeouts.stall
        for process in self._tasks.processes.values():
            if process.hung and stall and process.pid not in self._hung:
                self._hung.add(process.pid)
                until = now + stall + self._scenario.behaviour.beat_period
                self._tasks.at(until, partial(self._check_silent, process.pid))
        self._tasks.at(now + _LOOK, self._look)

    def _check_silent(self, pid: int, _now: float) -> None:
        self._invariants.check_silent(self._outcome.state, pid)

    def _resize(self, now: float) -> None:
        state = self._outcome.state
        workers = [task for task in state.tasks if task.role == "worker"]
        count = max(2, len(workers) + self._random.randint(-3, 3))
        others = tuple(task for task in state.tasks if task.role != "worker")
        wanted = (*others, *(TaskId("worker", index) for index in range(count)))
        joins: tuple[TaskId, ...] = ()
        leaves: tuple[TaskId, ...] = ()
        live = joins_cluster(state.policy.strategy, "worker") and self._random.random() < 0.5
        if live and not state.not_resizable_because:
            present = state.present
            joins = tuple(task for task in wanted if task.role == "worker" and task not in present)
            leaves = tuple(task for task in present if task not in wanted)
        event = ResizeAccepted("request", {"worker": (len(workers), count)}, wanted, joins, leaves)
        self._deliver(event, now)
        self._tasks.at(now + self._random.expovariate(1 / self._scenario.resize_period), self._resize)


def simulate(scenario: Scenario) -> Outcome:
    """Simulates a job to its end.

    Raises:
        Violation: an invariant does not hold; the message has the seed.
    """
    try:
        return Simulation(scenario).run()
    except Violation as violation:
        raise Violation(f"seed {scenario.seed}: {violation}") from None


def _draw_restart(numbers: random.Random) -> RestartSpec:
    policies: tuple[RestartPolicy, ...] = ("replace", "job", "never")
    (policy,) = numbers.choices(policies, (6, 3, 1))
    return RestartSpec(policy=policy, max=numbers.choice((None, 3, 50)))


def _draw_tasks(numbers: random.Random, strategy: Strategy, count: int) -> Iterator[TaskId]:
    """Draws roles for `count` tasks."""
    if numbers.random() < 0.5:
        yield TaskId("evaluator")
        count -= 1
    if strategy == "parameter_server":
        servers = max(1, count // 10)
        yield TaskId("chief")
        yield from (TaskId("ps", index) for index in range(servers))
        count -= 1 + servers
    yield from (TaskId("worker", index) for index in range(count))
