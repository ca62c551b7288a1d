"""Stalled tasks: which task the others wait for, and how it is handled."""

import re
from dataclasses import replace

import pytest

from tests.support.histories import (
    CHIEF,
    EVALUATOR,
    KILL,
    PS,
    PS_TASKS,
    TERM,
    TIMES,
    W0,
    W1,
    History,
    beat,
    doing,
    make_policy,
    progress,
    up,
)  # fmt: skip
from tfdist_cli.launch.run.report import describe_exit
from tfdist_cli.launch.supervisor.events import Exited, RecordReceived, Start, Tick
from tfdist_cli.launch.supervisor.state import KILL_TIMEOUT, JobPolicy, Phase

STALL = 20.0
RULES = JobPolicy("parameter_server", True, replace(TIMES, stall=STALL), 3)


def training(*tasks, policy=RULES):
    """A job whose tasks are up, and which has just made its first steps."""
    tasks = tasks or PS_TASKS
    history = History(*tasks, policy=policy)
    history.at(0, *up(*tasks), *(beat(task) for task in tasks), doing("training"), progress(10))
    return history


def beats(history, now, *but, cpu_seconds=0.0):
    history.at(now, *(beat(task, cpu_seconds) for task in history.state.alive if task not in but))


def test_a_stopped_task_is_killed_and_started_again_though_the_others_continue():
    history = training()
    for now in range(1, 20):
        beats(history, now, W1)
        history.at(now, progress(10 + now))
        assert history.at(now, Tick()) == {}
    beats(history, 20, W1)
    assert history.at(20, Tick()) == {W1: KILL}
    history.at(20.1, Exited(W1, -9))
    assert "20.0 s" in describe_exit(history.state.lost_tasks[0].ended)
    history.at(20.1, Tick())
    assert history.actions == (Start(W1),)


def test_the_task_that_is_silent_is_the_one_that_a_training_without_steps_waits_for():
    history = training()
    for now in range(1, 21):
        beats(history, now, *([PS] if now > 10 else []))
    assert history.at(20, Tick()) == {PS: KILL}
    assert re.findall(r"\d+\.\d s", history.state.tasks[PS].stall_reason) == ["20.0 s", "10.0 s"]
    assert history.at(20.1, Exited(PS, -9)) == dict.fromkeys((CHIEF, W0, W1), TERM)


def test_the_worker_without_steps_is_the_one_that_is_waited_for():
    history = training()
    history.at(1, progress(20, **{"worker:0": 5.0, "worker:1": 0.0}))
    beats(history, 20)
    assert history.at(21, Tick()) == {W1: KILL}


def test_rates_of_further_workers_are_neither_progress_nor_missed():
    history = training()
    rates = RecordReceived(CHIEF, {"kind": "rates", "workers": {"worker:0": 5.0, "worker:1": 0.0}})
    history.at(1, progress(20))
    beats(history, 20)
    history.at(20, rates)
    assert history.state.tasks[W0].made_progress
    assert not history.state.tasks[W1].made_progress
    assert history.at(21, Tick()) == {W1: KILL}


def test_without_any_trace_all_wait_for_one_another():
    history = training(policy=replace(RULES, max_restarts=0))
    beats(history, 19)
    assert history.at(20, Tick()) == {CHIEF: KILL}
    assert "worker:0: serving" in history.state.tasks[CHIEF].stall_reason
    history.at(20, Exited(CHIEF, -9))
    history.at(21, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert history.state.failures == (CHIEF,)
    assert history.state.exit_code == 124


def test_the_same_stall_again_without_a_step_ends_the_job():
    history = training()
    beats(history, 19)
    history.at(20, Tick(), Exited(CHIEF, -9), *(Exited(task, -15) for task in (W0, W1, PS)))
    history.at(20, Tick(), *up(*PS_TASKS), *(beat(task) for task in PS_TASKS))
    beats(history, 39)
    assert history.at(40, Tick()) == {CHIEF: KILL}
    assert history.at(40, Exited(CHIEF, -9)) == dict.fromkeys((W0, W1, PS), TERM)
    history.at(41, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert history.ended
    assert history.state.exit_code == 124


@pytest.mark.parametrize("what", ["evaluating", "saving"])
def test_work_without_steps_is_no_stall_as_long_as_another_process_computes(what):
    history = training()
    history.at(5, doing(what))
    beats(history, 20, cpu_seconds=10.0)
    assert history.state.deadline == 25
    assert history.at(25, Tick()) == {}
    beats(history, 44, cpu_seconds=10.5)
    assert history.at(44, Tick()) == {}
    assert history.at(45, Tick()) == {CHIEF: KILL}  # half a second of work in twenty


def test_compiling_the_first_step_is_no_stall_and_computing_without_an_end_is_one():
    history = History(*PS_TASKS, policy=RULES)
    history.at(0, *up(*PS_TASKS), doing("training"))
    beats(history, 19, cpu_seconds=15.0)
    assert history.at(20, Tick()) == {}
    history.at(30, progress(1))
    beats(history, 49, cpu_seconds=45.0)
    assert history.at(50, Tick()) == {}  # a function of several steps is compiled next
    beats(history, 69, cpu_seconds=65.0)
    assert history.at(70, Tick()) == {}
    beats(history, 89, cpu_seconds=85.0)
    assert history.at(90, Tick()) == {CHIEF: KILL}
    assert "60.0 s" in history.state.tasks[CHIEF].stall_reason


def test_who_computed_between_two_steps_has_the_whole_time_after_the_next_step():
    history = training()
    beats(history, 19, cpu_seconds=10.0)
    assert history.at(20, Tick()) == {}
    history.at(30, progress(20))
    beats(history, 49, cpu_seconds=20.0)
    assert history.at(49.9, Tick()) == history.at(50, Tick()) == {}
    beats(history, 69, cpu_seconds=20.5)
    assert history.at(70, Tick()) == {CHIEF: KILL}  # idle


def test_a_task_whose_interpreter_is_held_is_not_the_one_that_is_stopped():
    history = training()
    beats(history, 10, CHIEF, W0)
    for now in (5, 10, 15, 20):
        history.at(now, RecordReceived(CHIEF, {"kind": "beat", "held": True}))
    assert history.at(20, Tick()) == {W0: KILL}


def test_a_task_whose_interpreter_is_held_is_named_when_all_others_answer():
    history = training()
    beats(history, 1, cpu_seconds=0.5)
    beats(history, 19, CHIEF, cpu_seconds=0.5)
    history.at(19, RecordReceived(CHIEF, {"kind": "beat", "held": True}))
    assert history.state.tasks[CHIEF].cpu_seconds == 0.5
    assert history.at(20, Tick()) == {CHIEF: KILL}
    assert "interpreter lock" in history.state.tasks[CHIEF].stall_reason


def test_what_the_training_reports_moves_its_time_on():
    history = training()
    for now in (10, 20, 30, 40):
        history.at(now, progress(10 + now))
        beats(history, now)
    history.at(55, doing("evaluating"))
    beats(history, 55)
    assert history.at(70, Tick()) == {}


def test_a_silent_evaluator_is_started_again_also_after_the_training():
    history = training(*PS_TASKS, EVALUATOR)
    history.at(1, Exited(CHIEF, 0))
    assert history.at(19, Tick()) == {}
    assert history.at(20, Tick()) == {EVALUATOR: KILL}  # the others are silent too, but have nothing to do any more
    history.at(20, Exited(EVALUATOR, -9), Tick())
    assert history.actions == (Start(EVALUATOR),)


def test_what_was_killed_is_not_missed_when_the_training_has_just_been_done():
    history = training(*PS_TASKS, EVALUATOR)
    beats(history, 20, PS)
    assert history.at(20, Tick()) == {PS: KILL}
    history.at(20, Exited(CHIEF, 0), Exited(PS, -9))
    assert history.state.phase is Phase.EVALUATING
    assert (history.state.lost_tasks, history.state.failures) == ((), ())


def test_a_program_that_tells_nothing_is_not_watched():
    history = History(*PS_TASKS, policy=JobPolicy("parameter_server", timeouts=replace(TIMES, stall=STALL)))
    assert history.state.deadline is None


def test_a_task_that_outlives_sigkill_ends_the_job():
    history = training()
    beats(history, 19)
    history.at(20, Tick())
    given_up = 20 + KILL_TIMEOUT
    for now in (25, 30, 35, given_up - 1):
        beats(history, now, CHIEF)
    assert history.at(given_up, Tick()) == dict.fromkeys((W0, W1, PS), TERM)
    history.at(given_up + 1, *(Exited(task, -15) for task in (W0, W1, PS)))
    history.at(given_up + 1 + TIMES.shutdown, Tick())
    history.at(given_up + 1 + TIMES.shutdown + KILL_TIMEOUT, Tick())
    assert history.ended
    assert history.state.exit_code == 124


def test_there_is_no_watch_without_a_timeout():
    assert training(policy=make_policy(reports=True)).state.deadline is None


def mirrored(restarts):
    """Two workers that train together, the first of which stops after its first sign of life."""
    history = History(W0, W1, policy=replace(RULES, strategy="multi_worker_mirrored", max_restarts=restarts))
    history.at(0, *up(W0, W1), beat(W0), beat(W1), progress(10, task=W0))
    for now in range(1, 11):
        beats(history, now, W0)
    return history


@pytest.mark.parametrize(("restarts", "phase"), [(0, Phase.ENDED), (3, Phase.PAUSED)])
def test_a_silent_task_is_the_first_failure_though_another_one_ends_of_it_before_the_stall_timeout(restarts, phase):
    """TensorFlow gives up a task that does not answer after ten seconds, and may not say which."""
    history = mirrored(restarts)
    history.at(11, RecordReceived(W1, {"kind": "error", "type": "DeadlineExceededError", "message": "Heartbeat"}))
    history.at(11.1, Exited(W1, 1))
    history.at(50, Tick())
    history.at(50.1, Exited(W0, -9))
    assert history.state.phase is phase
    first = history.state.lost_tasks[0].task if restarts else history.state.failures[0]
    assert first == W0
    lost = history.state.lost_tasks[0].ended if restarts else history.state.tasks[W0]
    assert "11.1 s" in lost.stall_reason
    assert restarts or history.state.exit_code == 124


def test_a_task_that_failed_of_itself_is_the_first_failure_though_another_one_is_silent():
    history = mirrored(0)
    history.at(11, RecordReceived(W1, {"kind": "error", "type": "ValueError", "message": "no"}), Exited(W1, 1))
    history.at(50, Tick())
    history.at(50.1, Exited(W0, -9))
    assert history.state.failures == (W1,)
    assert history.state.exit_code == 1
