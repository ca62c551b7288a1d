"""The supervisor against simulated tasks that fail, hang and ignore signals: fixed seeds of `benchmarks.scale`."""

from dataclasses import replace

import pytest

from benchmarks.scale import simulation
from benchmarks.scale.invariants import Violation
from benchmarks.scale.simulated_tasks import Behaviour
from benchmarks.scale.simulation import Scenario, simulate
from tfdist_cli.launch.supervisor.events import Exited, SignalReceived, Start, StopSignal
from tfdist_cli.launch.supervisor.machine import step
from tfdist_cli.launch.supervisor.state import JobPolicy, Phase, Timeouts
from tfdist_cli.spec.task_id import TaskId

FEW = [Scenario.draw(seed, 12, 0.15, beat_period=20.0) for seed in range(1000, 1016)]


@pytest.mark.parametrize("scenario", FEW, ids=lambda scenario: scenario.seed)
def test_a_job_of_few_tasks_ends_and_no_event_is_lost(scenario):
    outcome = simulate(scenario)
    assert outcome.state.phase is Phase.ENDED
    assert outcome.checks > outcome.events


def harsh(seed, tasks, max_restarts=10_000, **options):
    """A job that loses a task every few seconds, and whose tasks ignore signals or hang."""
    drawn = Scenario.draw(seed, 20, 0.1, beat_period=20.0)
    workers = (TaskId("worker", index) for index in range(tasks - 2))
    behaviour = Behaviour("parameter_server", steps=10_000, beat_period=20.0, fault_period=5.0)
    policy = JobPolicy("parameter_server", True, Timeouts(60.0, 50.0, 5.0, 60.0), max_restarts)
    tasks = (TaskId("chief"), TaskId("ps"), *workers)
    return replace(drawn, tasks=tasks, behaviour=behaviour, policy=policy, **{"signal_at": float("inf"), **options})


@pytest.mark.slow
def test_a_hundred_tasks_with_losses_and_resizes():
    outcome = simulate(harsh(3, 100, resize_period=60.0))
    assert outcome.starts > 200
    assert len(outcome.state.lost_tasks) > 5
    assert outcome.state.resizes


def test_a_seed_repeats_a_history():
    first, second = (simulate(Scenario.draw(1004, 12, 0.15, beat_period=20.0)) for _ in range(2))
    assert (first.events, first.starts, first.seconds) == (second.events, second.starts, second.seconds)


def without_single_starts(state, event, now):
    state, actions = step(state, event, now)
    return state, tuple(each for each in actions if not (isinstance(each, Start) and now and len(actions) < 3))


def without_kills(state, event, now):
    state, actions = step(state, event, now)
    return state, tuple(each for each in actions if getattr(each, "signal", None) is not StopSignal.KILL)


def deaf_to_signals(state, event, now):
    return (state, ()) if isinstance(event, SignalReceived) else step(state, event, now)


def deaf_to_exits(state, event, now):
    return (state, ()) if isinstance(event, Exited) and event.code == -9 else step(state, event, now)


def without_restart_delays(state, event, now):
    after, actions = step(state, event, now)
    late = {name: replace(after.tasks[name], start_at=now - 1.0) for name in after.due}
    return replace(after, tasks=after.tasks.with_states(late)), actions


def without_limits(state, event, now):
    policy = replace(state.policy, max_restarts=10_000, restarts={})
    after, actions = step(replace(state, policy=policy), event, now)
    return replace(after, policy=state.policy), actions


@pytest.mark.parametrize(
    "broken",
    [without_single_starts, without_kills, deaf_to_signals, deaf_to_exits, without_restart_delays, without_limits],
)
def test_a_broken_supervisor_is_found(broken, monkeypatch):
    monkeypatch.setattr(simulation, "step", broken)
    most, when = (5, float("inf")) if broken is without_limits else (10_000, 60.0)
    scenarios = [harsh(seed, 12, most, signal_at=when) for seed in range(10)]
    with pytest.raises(Violation, match="does not hold"):
        list(map(simulate, scenarios))
