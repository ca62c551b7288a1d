"""The supervisor, by histories that are played to it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.histories import (
    CHIEF,
    EVALUATOR,
    INT,
    KILL,
    PS,
    PS_TASKS,
    TERM,
    TERMINATED,
    TIMES,
    W0,
    W1,
    W2,
    CheckedHistory,
    History,
    beat,
    doing,
    error,
    make_policy,
    progress,
    resized,
    up,
)  # fmt: skip
from tfdist_cli.launch.supervisor.events import (
    Exited,
    Output,
    Queued,
    RecordReceived,
    ResizeAccepted,
    SignalReceived,
    Start,
    Started,
    Tick,
)
from tfdist_cli.launch.supervisor.state import KILL_TIMEOUT, JobPolicy, Phase, Status
from tfdist_cli.spec.sections.role_spec import RestartSpec
from tfdist_cli.spec.task_id import TaskId


@pytest.mark.parametrize("strategy", ["single", "multi_worker_mirrored", "parameter_server"])
def test_data_workers_are_reported_to_end_after_the_training_and_end_it_when_they_fail(strategy):
    data = TaskId("data_worker")
    job = History(CHIEF, data, policy=make_policy(strategy))
    assert job.at(5, Exited(CHIEF, 0)) == {data: TERM}
    job.at(6, Exited(data, -15))
    assert job.state.exit_code == 0
    job = History(CHIEF, data, policy=make_policy(strategy))
    assert job.at(5, Exited(data, 0)) == {CHIEF: TERM}
    assert job.statuses()[data] is Status.FAILED


def test_training_is_done_when_the_chief_is():
    job = History(*PS_TASKS)
    assert job.at(5, Exited(CHIEF, 0)) == {PS: TERM, W0: TERM, W1: TERM}
    assert job.at(6, Exited(PS, -15), Exited(W0, 0), Exited(W1, 1)) == {}
    assert job.ended
    assert job.state.exit_code == 0
    assert job.state.failures == ()
    assert job.statuses() == {CHIEF: Status.DONE, PS: Status.DONE, W0: Status.DONE, W1: Status.STOPPED}


def test_a_server_that_does_not_end_is_killed_after_the_shutdown_timeout():
    job = History(CHIEF, PS)
    job.at(5, Exited(CHIEF, 0))
    assert job.state.deadline == 35
    assert job.at(34.9, Tick()) == {}
    assert job.at(35, Tick()) == {PS: KILL}
    job.at(36, Exited(PS, -9))
    assert job.ended
    assert job.state.exit_code == 0
    assert job.statuses()[PS] is Status.STOPPED


def test_a_process_that_outlives_sigkill_is_given_up():
    job = History(CHIEF, PS)
    job.at(0, Exited(CHIEF, 0))
    job.at(30, Tick())
    job.at(30 + KILL_TIMEOUT, Tick())
    assert job.ended
    assert job.state.alive == (PS,)
    assert job.state.exit_code == 0


@pytest.mark.parametrize("code", [0, 1, -9])
@pytest.mark.parametrize("server", [PS, W0])
def test_a_server_that_ends_before_the_chief_is_a_failure_whatever_its_code(server, code):
    job = History(CHIEF, PS, W0)
    (other,) = {PS, W0} - {server}
    assert job.at(5, Exited(server, code)) == {CHIEF: TERM}
    assert job.at(6, Exited(CHIEF, 143)) == {other: TERM}
    job.at(7, Exited(other, -15))
    assert job.ended
    assert job.state.failures == (server,)
    assert job.state.exit_code == {0: 1, 1: 1, -9: 137}[code]


@pytest.mark.parametrize("waits_first", [True, False])
def test_a_task_that_exits_before_it_joins_has_failed_if_another_waits_for_it(waits_first):
    job = History(CHIEF, W0, W1, policy=make_policy("multi_worker_mirrored"))
    job.at(1, doing("starting", W0), doing("starting", CHIEF))
    exits, waits = Exited(W1, 0), doing("waiting", CHIEF)
    first, second = (waits, exits) if waits_first else (exits, waits)
    assert job.at(3, first) == {}
    assert job.at(4, second) == {CHIEF: TERM, W0: TERM}
    job.at(5, Exited(CHIEF, 143), Exited(W0, 143))
    assert job.state.failures == (W1,)
    assert job.state.exit_code == 1


def test_a_task_that_exits_before_it_joins_is_done_if_nobody_waits_for_it():
    job = History(CHIEF, W0, W1, policy=make_policy("multi_worker_mirrored"))
    assert job.at(3, Exited(W1, 0), doing("training", CHIEF), Exited(W0, 0)) == {}
    job.at(4, Exited(CHIEF, 0))
    assert job.state.exit_code == 0


def test_a_task_that_has_trained_may_exit_while_another_waits():
    job = History(CHIEF, W0, policy=make_policy("multi_worker_mirrored"))
    assert job.at(3, doing("training", W0), Exited(W0, 0), doing("waiting", CHIEF)) == {}


def test_a_task_that_was_awaited_restarts_with_the_others():
    job = History(CHIEF, W0, policy=make_policy("multi_worker_mirrored", max_restarts=1))
    job.at(3, doing("waiting", CHIEF))
    assert job.at(4, Exited(W0, 0)) == {CHIEF: TERM}
    job.at(5, Exited(CHIEF, 143))
    assert job.state.phase is Phase.PAUSED


def test_the_first_failure_gives_the_exit_code_and_the_others_are_consequences():
    job = History(*PS_TASKS)
    assert job.at(5, Exited(PS, -9)) == {CHIEF: TERM}
    assert job.at(6, error(CHIEF), Exited(W0, 4), Exited(CHIEF, 1)) == {W1: TERM}
    job.at(7, Exited(W1, -15))
    assert job.ended
    assert job.state.failures == (PS, CHIEF, W0)
    assert job.state.exit_code == 137


def test_who_reported_an_error_first_failed_first_even_if_it_takes_long_to_end():
    job = History(W0, W1, policy=make_policy("multi_worker_mirrored"))
    job.at(5, error(W1))
    assert job.at(6, error(W0), Exited(W0, 4)) == {W1: TERM}
    assert job.state.phase is Phase.SAVING
    job.at(7, Exited(W1, 3))
    assert job.state.failures == (W1, W0)
    assert job.state.exit_code == 3


def test_what_a_failed_program_leaves_behind_does_not_make_it_fail_later():
    job = History(*PS_TASKS)
    job.at(5, error(CHIEF), Exited(PS, -9, ago=0.5))
    job.at(6, Exited(CHIEF, 1))
    assert job.state.failures == (PS, CHIEF)


def test_a_first_failure_that_the_launcher_had_to_end_leaves_the_code_to_the_next():
    job = History(W0, W1, policy=make_policy("multi_worker_mirrored"))
    job.at(5, error(W1))
    job.at(6, error(W0), Exited(W0, 4))
    job.at(7, Exited(W1, -15))
    assert job.state.failures == (W1, W0)
    assert job.state.exit_code == 4


def test_failures_without_a_code_of_their_own_are_no_success():
    job = History(*PS_TASKS)
    job.at(6, Exited(PS, 0))
    job.at(7, Exited(CHIEF, -15))
    assert job.state.failures == (PS,)
    assert job.state.exit_code == 1


def test_what_a_task_answers_to_being_reported_to_end_is_no_failure():
    job = History(W0, W1, policy=make_policy("multi_worker_mirrored"))
    job.at(5, Exited(W0, 4))
    job.at(6, Exited(W1, 1))
    assert job.state.failures == (W0,)
    assert job.statuses()[W1] is Status.STOPPED


def test_a_chief_that_saves_and_ends_as_it_is_reported_is_no_consequence():
    job = History(*PS_TASKS)
    job.at(5, Exited(W0, -9))
    job.at(6, error(CHIEF), Exited(CHIEF, 143))
    assert job.state.failures == (W0,)
    assert job.statuses()[CHIEF] is Status.STOPPED


def test_mirrored_training_is_done_when_all_workers_are():
    job = History(W0, W1, policy=make_policy("multi_worker_mirrored"))
    assert job.at(5, Exited(W1, 0)) == {}
    assert not job.ended
    job.at(6, Exited(W0, 0))
    assert job.ended
    assert job.state.exit_code == 0


@pytest.mark.parametrize("strategy", ["single", "mirrored"])
@pytest.mark.parametrize(("code", "expected"), [(0, 0), (7, 7), (-11, 139)])
def test_one_process(strategy, code, expected):
    job = History(CHIEF, policy=make_policy(strategy))
    job.at(5, Exited(CHIEF, code))
    assert job.ended
    assert job.state.exit_code == expected


def test_the_evaluator_is_waited_for_with_the_servers_still_there():
    job = History(CHIEF, PS, EVALUATOR)
    assert job.at(5, Exited(CHIEF, 0)) == {}
    assert job.state.phase is Phase.EVALUATING
    assert job.at(6, Exited(EVALUATOR, 0)) == {PS: TERM}
    job.at(7, Exited(PS, -15))
    assert job.ended
    assert job.state.exit_code == 0
    assert not job.state.evaluator_timed_out


def test_a_server_that_ends_while_the_evaluator_scores_is_no_failure():
    job = History(CHIEF, PS, EVALUATOR)
    job.at(5, Exited(CHIEF, 0), Exited(PS, 1))
    assert job.state.phase is Phase.EVALUATING
    job.at(6, Exited(EVALUATOR, 0))
    assert job.ended
    assert job.state.exit_code == 0


def test_the_evaluator_has_bounded_time():
    job = History(CHIEF, PS, EVALUATOR)
    job.at(5, Exited(CHIEF, 0))
    assert job.at(55, Tick()) == {PS: TERM, EVALUATOR: TERM}
    job.at(56, Exited(PS, -15), Exited(EVALUATOR, -15))
    assert job.ended
    assert job.state.evaluator_timed_out
    assert job.state.exit_code == 0


def test_a_failed_evaluator_leaves_the_training_alone_and_gives_the_exit_code():
    job = History(CHIEF, PS, EVALUATOR)
    assert job.at(5, Exited(EVALUATOR, 9)) == {}
    assert job.at(60, Exited(CHIEF, 0)) == {PS: TERM}
    job.at(61, Exited(PS, -15))
    assert job.state.failures == (EVALUATOR,)
    assert job.state.exit_code == 9


def test_a_failure_of_the_training_is_reported_before_an_earlier_one_of_the_evaluator():
    job = History(CHIEF, PS, EVALUATOR)
    job.at(5, Exited(EVALUATOR, 9))
    job.at(60, Exited(CHIEF, 3), Exited(PS, -15))
    assert job.state.failures == (CHIEF, EVALUATOR)
    assert job.state.exit_code == 3


def test_a_signal_lets_the_chief_save_before_the_servers_are_reported():
    job = History(*PS_TASKS)
    assert job.at(5, INT) == {CHIEF: TERM}
    assert job.state.phase is Phase.SAVING
    assert job.at(9, Exited(CHIEF, 0)) == {PS: TERM, W0: TERM, W1: TERM}
    job.at(10, Exited(PS, -15), Exited(W0, -15), Exited(W1, -15))
    assert job.ended
    assert job.state.exit_code == 130
    assert job.state.failures == ()


def test_a_chief_that_takes_too_long_to_save_is_killed():
    job = History(CHIEF, PS)
    job.at(5, TERMINATED)
    assert job.at(35, Tick()) == {CHIEF: KILL, PS: TERM}
    job.at(36, Exited(CHIEF, -9), Exited(PS, -15))
    assert job.ended
    assert job.state.exit_code == 143


def test_mirrored_workers_save_together():
    job = History(W0, W1, EVALUATOR, policy=make_policy("multi_worker_mirrored"))
    assert job.at(5, INT) == {W0: TERM, W1: TERM}
    assert job.at(6, Exited(W0, 0)) == {}
    assert job.at(7, Exited(W1, 0)) == {EVALUATOR: TERM}


def test_a_second_sigint_kills_at_once():
    job = History(CHIEF, PS)
    job.at(5, INT)
    assert job.at(5.5, INT) == {CHIEF: KILL, PS: KILL}
    job.at(6, Exited(CHIEF, -9), Exited(PS, -9))
    assert job.ended
    assert job.state.exit_code == 130


def test_a_second_sigterm_changes_nothing():
    job = History(CHIEF, PS)
    job.at(5, TERMINATED)
    assert job.at(6, TERMINATED) == {}
    assert job.state.phase is Phase.SAVING


def test_sigint_hurries_an_end_that_is_under_way_and_leaves_its_exit_code():
    job = History(CHIEF, PS)
    job.at(5, Exited(CHIEF, 0))
    assert job.at(6, INT) == {PS: KILL}
    job.at(6, Exited(PS, -9))
    assert job.ended
    assert job.state.exit_code == 0


def test_a_signal_while_the_evaluator_scores():
    job = History(CHIEF, PS, EVALUATOR)
    job.at(5, Exited(CHIEF, 0))
    assert job.at(6, INT) == {PS: TERM, EVALUATOR: TERM}
    job.at(7, Exited(PS, -15), Exited(EVALUATOR, -15))
    assert job.state.exit_code == 130


def test_tasks_that_do_not_come_up_end_the_job():
    job = History(*PS_TASKS, policy=make_policy(reports=True))
    job.at(1, *up(CHIEF, PS), RecordReceived(W0, {"kind": "state", "state": "starting"}))
    assert job.at(99, Tick()) == {}
    assert job.at(100, Tick()) == dict.fromkeys(PS_TASKS, TERM)
    assert job.state.start_timed_out == (W0, W1)
    job.at(101, *(Exited(task, -15) for task in PS_TASKS))
    assert job.ended
    assert job.state.exit_code == 124


def test_once_all_are_up_the_start_has_no_deadline():
    job = History(*PS_TASKS, policy=make_policy(reports=True))
    job.at(1, *up(*PS_TASKS))
    assert job.state.deadline is None
    assert job.at(1000, Tick()) == {}


def test_an_evaluator_that_failed_at_its_start_is_not_waited_for():
    job = History(CHIEF, EVALUATOR, policy=make_policy("single", reports=True))
    job.at(1, *up(CHIEF), Exited(EVALUATOR, 1))
    assert job.state.deadline is None


def test_a_command_need_not_say_that_it_is_up():
    job = History(*PS_TASKS)
    assert job.at(10_000, Tick()) == {}


@pytest.mark.parametrize("event", [Started(W0, 1), Output(W0, "stdout", ("x",)), RecordReceived(W0, {"kind": "odd"})])
def test_other_events_change_no_phase(event):
    job = History(CHIEF, W0, PS)
    assert job.at(1, event) == {}
    assert job.state.phase is Phase.RUNNING


@pytest.mark.parametrize("value", [math.inf, math.nan, pytest.param(10**400, id="huge"), "5"])
@pytest.mark.parametrize("kind", ["progress", "resumed", "beat"])
def test_numbers_that_a_program_cannot_mean_change_nothing(kind, value):
    job = resized_job()
    job.at(6, Exited(CHIEF, 143), *(Exited(task, -15) for task in (W0, W1, PS, EVALUATOR)))
    job.at(6, Tick())
    job.at(7, RecordReceived(CHIEF, {"kind": kind, "step": value, "computed": value, "workers": {"worker:0": value}}))
    assert (job.state.step, job.state.attempt_step, job.state.resizes[0].resumed) == (40, None, None)
    assert job.at(8, progress(41)) == {}
    assert job.state.attempt_step == 41


MORE = resized(CHIEF, W0, W1, W2, PS, worker=(2, 3))


def resized_job(**options):
    """A job that has trained to step 40 and gets a third worker; the chief saves."""
    job = History(*PS_TASKS, EVALUATOR, policy=make_policy(reports=True, **options))
    job.at(1, *up(*PS_TASKS, EVALUATOR), progress(40))
    assert job.at(5, MORE) == {CHIEF: TERM}
    return job


def test_a_job_is_resized_when_its_training_has_been_saved():
    job = resized_job(max_restarts=0)
    assert job.state.phase is Phase.SAVING
    assert job.at(7, Exited(CHIEF, 143)) == dict.fromkeys((W0, W1, PS, EVALUATOR), TERM)
    job.at(8, *(Exited(task, 143) for task in (W0, W1, PS, EVALUATOR)))
    assert (job.state.phase, job.state.deadline, job.actions) == (Phase.PAUSED, 8, ())
    job.at(8, Tick())
    assert job.actions == tuple(Start(task, 2) for task in (CHIEF, W0, W1, W2, PS))
    assert tuple(job.state.tasks) == (CHIEF, W0, W1, W2, PS)
    assert [job.state.tasks[task].restarts for task in (W1, W2)] == [1, 0]
    assert (job.state.lost_tasks, job.state.exit_code) == ((), 0)
    job.at(9, *up(*MORE.tasks), RecordReceived(CHIEF, {"kind": "resumed", "step": 44}))
    assert "resize" in job.state.not_resizable_because
    assert job.at(10, MORE) == {}
    job.at(11, progress(50))
    (resize,) = job.state.resizes
    assert (resize.asked_at, resize.step, resize.resumed, resize.trained_at) == (5, 40, 44, 11)
    assert job.state.not_resizable_because == ""


def test_a_task_that_is_lost_after_it_is_the_first_loss():
    job = resized_job(max_restarts=1)
    job.at(7, Exited(CHIEF, 143))
    job.at(8, *(Exited(task, 143) for task in (W0, W1, PS, EVALUATOR)))
    job.at(8, Tick())
    job.at(9, Exited(PS, -9), *(Exited(task, 143) for task in (CHIEF, W0, W1, W2)))
    assert [loss.task for loss in job.state.lost_tasks] == [PS]
    job.at(9, Tick())
    assert job.actions == tuple(Start(task, 3) for task in MORE.tasks)


def test_a_training_that_is_done_before_it_has_ended_for_other_numbers_is_done():
    job = resized_job()
    assert job.at(6, Exited(CHIEF, 0)) == {}
    assert job.state.phase is Phase.EVALUATING
    assert job.at(7, Exited(EVALUATOR, 0)) == dict.fromkeys((W0, W1, PS), TERM)
    job.at(8, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert (job.ended, job.state.exit_code) == (True, 0)
    assert job.statuses()[CHIEF] is Status.DONE


def test_a_chief_that_cannot_save_in_time_is_killed_and_the_job_is_resized_all_the_same():
    job = resized_job(max_restarts=1)
    assert job.at(35, Tick()) == {CHIEF: KILL} | dict.fromkeys((W0, W1, PS, EVALUATOR), TERM)
    job.at(36, *(Exited(task, -9) for task in (*PS_TASKS, EVALUATOR)), Tick())
    assert job.actions == tuple(Start(task, 2) for task in MORE.tasks)
    (lost,), (resize,) = job.state.lost_tasks, job.state.resizes
    assert (lost.task, lost.attempt, lost.step, resize.lost, job.state.restarts) == (CHIEF, 1, 40, (CHIEF,), 0)
    job.at(37, *up(*MORE.tasks), progress(41))
    job.at(38, Exited(PS, -9), *(Exited(task, 143) for task in (CHIEF, W0, W1, W2)))
    job.at(38, Tick())
    assert job.actions == tuple(Start(task, 3) for task in MORE.tasks), "the one restart is not used up"


@pytest.mark.parametrize("code", [1, -11, -9])
def test_a_chief_that_fails_while_it_saves_for_a_resize_is_reported_as_lost(code):
    job = resized_job(max_restarts=0)
    job.at(6, Exited(CHIEF, code), *(Exited(task, 143) for task in (W0, W1, PS, EVALUATOR)))
    job.at(6, Tick())
    assert job.actions == tuple(Start(task, 2) for task in MORE.tasks)
    assert [lost.task for lost in job.state.lost_tasks] == [CHIEF]


def reverted_job(**options):
    """A resized job whose chief fails before its first step, for a reason that a restart cannot help."""
    job = resized_job(**options)
    job.at(6, *(Exited(task, 143) for task in (*PS_TASKS, EVALUATOR)))
    job.at(6, Tick())
    job.at(8, *up(*MORE.tasks), RecordReceived(CHIEF, {"kind": "error", "type": "E", "message": "no", "retry": False}))
    assert job.at(9, Exited(CHIEF, 1)) == dict.fromkeys((W0, W1, W2, PS), TERM)
    return job


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_job_that_cannot_train_with_other_numbers_goes_on_with_those_from_before(restarts):
    job = reverted_job(max_restarts=restarts)
    job.at(10, *(Exited(task, 143) for task in (W0, W1, W2, PS)))
    job.at(10, Tick())
    assert job.actions == tuple(Start(task, 3) for task in (*PS_TASKS, EVALUATOR))
    assert "resize" in job.state.not_resizable_because
    job.at(12, *up(*PS_TASKS), progress(41))
    (resize,), (lost,) = job.state.resizes, job.state.lost_tasks
    assert (resize.trained_at, resize.reverted, lost.task, job.state.restarts) == (12, lost, CHIEF, 0)
    assert (job.state.not_resizable_because, job.state.exit_code) == ("", 0)


def test_a_job_that_fails_with_the_numbers_from_before_too_ends():
    job = reverted_job()
    job.at(10, *(Exited(task, 143) for task in (W0, W1, W2, PS)))
    job.at(10, Tick())
    job.at(11, *up(*PS_TASKS), error(CHIEF), Exited(CHIEF, 1), *(Exited(task, 143) for task in (W0, W1, PS, EVALUATOR)))
    assert (job.ended, job.state.exit_code) == (True, 1)


def test_a_signal_ends_a_job_whose_resize_is_reverted():
    job = reverted_job()
    job.at(10, TERMINATED, *(Exited(task, 143) for task in (W0, W1, W2, PS)))
    assert (job.ended, job.state.exit_code) == (True, 143)


def test_a_job_whose_tasks_cannot_be_ended_is_not_resized():
    job = resized_job()
    job.at(6, Exited(CHIEF, 143), Exited(PS, 143), Exited(W0, 143), Exited(EVALUATOR, 143))
    job.at(36, Tick())
    job.at(36 + KILL_TIMEOUT, Tick())
    assert (job.ended, job.state.exit_code, job.state.alive) == (True, 124, (W1,))


def test_a_signal_ends_a_job_that_is_being_resized():
    job = resized_job()
    assert job.at(6, TERMINATED) == {}
    job.at(7, *(Exited(task, 143) for task in (*PS_TASKS, EVALUATOR)))
    assert (job.ended, job.state.exit_code) == (True, 143)


@pytest.mark.parametrize("events", [[INT], [Exited(CHIEF, 0)], [Exited(PS, -9)]], ids=["ending", "done", "restarting"])
def test_a_job_is_not_resized_when_it_does_something_else(events):
    job = History(*PS_TASKS, EVALUATOR, policy=make_policy(max_restarts=3))
    job.at(5, *events)
    assert job.state.not_resizable_because
    assert job.at(6, MORE) == {}
    assert job.state.resizes == ()


CLUSTERS = {
    "parameter_server": (CHIEF, W0, W1, PS, EVALUATOR),
    "multi_worker_mirrored": (W0, W1, EVALUATOR),
    "single": (CHIEF,),
}
SIZES = {
    "parameter_server": ((CHIEF, W0, PS), (CHIEF, W0, W1, W2, PS, EVALUATOR)),
    "multi_worker_mirrored": ((W0,), (W0, W1, W2, EVALUATOR)),
    "single": ((CHIEF,), (CHIEF, EVALUATOR)),
}
RESIZE = "other numbers of tasks"
EVENTS = st.tuples(
    st.one_of(
        st.builds(lambda code: lambda task: Exited(task, code), st.sampled_from([0, 0, 1, 2, 3, -15, -9])),
        st.builds(lambda step: lambda task: progress(step, task, **{str(task): 1.0}), st.integers(0, 5)),
        st.sampled_from([error, lambda task: up(task)[0], beat, lambda _: Tick(), lambda _: Tick()]),
        st.sampled_from([lambda _: INT, lambda _: TERMINATED]),
        st.just(RESIZE),
    ),
    st.integers(0, 4),
)
POLICIES = st.fixed_dictionaries(
    {},
    optional={
        role: st.builds(RestartSpec, policy=st.sampled_from(policies), max=st.none() | st.integers(0, 3))
        for role, policies in (
            ("worker", ("job", "never")), ("ps", ("job", "never")), ("chief", ("job", "never")),
            ("evaluator", ("replace", "job", "never")),
        )
    },
)  # fmt: skip


@settings(max_examples=100)  # a busy machine is no reason to fail
@given(
    strategy=st.sampled_from(sorted(CLUSTERS)),
    reports=st.booleans(),
    history=st.lists(st.tuples(EVENTS, st.floats(0, 40)), max_size=40),
    stubborn=st.booleans(),
    most=st.integers(0, 4),
    policies=POLICIES,
    stall=st.sampled_from([0.0, 15.0]),
)
def test_any_history_comes_to_an_end(strategy, reports, history, stubborn, most, policies, stall):
    tasks = CLUSTERS[strategy]
    times = replace(TIMES, stall=stall)
    job = CheckedHistory(*tasks, policy=JobPolicy(strategy, reports, times, most, policies))
    now = 0.0
    for make_event, which, pause in ((make, which, pause) for (make, which), pause in history):
        tasks, now = tuple(job.state.tasks), now + pause
        size = resized(*SIZES[strategy][which % 2])
        event = size if make_event is RESIZE else make_event(tasks[which % len(tasks)])
        if isinstance(event, SignalReceived | Tick | ResizeAccepted) or event.task not in job.exited:
            job.at(now, event)
        if job.state.deadline is not None and job.state.deadline <= now:
            job.at(now, Tick())
        assert job.ended or job.state.deadline is None or job.state.deadline > now, "what is due is done"
        if not stubborn and pause > 10:
            job.obey(now)
    job.at(now, INT)
    job.at(now, INT)
    if not stubborn:
        job.obey(now)
    for _ in range(3):
        now = max(now, job.state.deadline or 0)
        job.at(now, Tick())
    assert job.ended
    assert 0 <= job.state.exit_code <= 255
    assert job.state.exit_code or not job.state.failures


@given(history=st.lists(st.tuples(st.sampled_from([1, -9, 0]), st.integers(0, 4), st.floats(0, 5)), max_size=30))
def test_without_signals_a_job_that_always_loses_tasks_ends_by_itself(history):
    """Every task exits after its stop signal, and starts when it is due: only the limit on restarts ends the job."""
    tasks = CLUSTERS["parameter_server"]
    job = CheckedHistory(*tasks, policy=make_policy(max_restarts=3))
    now = 0.0
    for code, which, pause in history * 5 + [(1, 0, 0.0)] * 6:
        now += pause
        task = tasks[which]
        if task not in job.exited:
            job.at(now, Exited(task, code))
        job.obey(now)
        while not job.ended and job.state.deadline is not None:
            now = max(now, job.state.deadline)
            job.at(now, Tick())
            job.obey(now)
    assert job.ended
    assert job.state.exit_code in (0, 1, 137)
    assert job.state.restarts <= 3


def test_the_time_in_a_queue_does_not_count():
    history = History(CHIEF, W0, PS, policy=make_policy(reports=True))
    history.at(0, *(Queued(task) for task in (CHIEF, W0, PS)))
    assert history.at(5000, Tick()) == {}
    history.at(5000, *(Started(task, 1) for task in (CHIEF, W0, PS)))
    assert history.at(5099, Tick()) == {}
    assert history.at(5100, Tick()) == dict.fromkeys((CHIEF, W0, PS), TERM)
    assert history.state.start_timed_out == (CHIEF, W0, PS)


def test_a_task_that_served_may_end_before_the_chief_that_is_done():
    """The chief reports that; and after a pause of the machine exits are noticed in any order."""
    history = History(*PS_TASKS, policy=make_policy(reports=True))
    history.at(0, *up(*PS_TASKS), progress(40), doing("done"))
    assert history.at(5, Exited(PS, 0), Exited(W0, 0)) == {}
    assert history.statuses()[PS] is Status.DONE
    assert history.at(6, Exited(CHIEF, 0)) == {W1: TERM}
    history.at(7, Exited(W1, 0))
    assert (history.ended, history.state.exit_code, history.state.failures) == (True, 0, ())


def test_a_task_that_served_and_fails_has_failed_though_the_chief_is_done():
    history = History(*PS_TASKS, policy=make_policy(reports=True))
    history.at(0, *up(*PS_TASKS), doing("done"))
    assert history.at(5, Exited(PS, 1)) == {CHIEF: TERM}
    assert history.statuses()[PS] is Status.FAILED
