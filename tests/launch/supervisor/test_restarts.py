"""Lost tasks: what is started again, when, and when that is given up."""

import pytest

from tests.support.histories import (
    CHIEF,
    EVALUATOR,
    INT,
    KILL,
    PS,
    PS_TASKS,
    TERM,
    W0,
    W1,
    History,
    error,
    make_policy,
    progress,
    up,
)  # fmt: skip
from tfdist_cli.launch.run.report import cause_of
from tfdist_cli.launch.supervisor.events import Exited, RecordReceived, Start, Tick
from tfdist_cli.launch.supervisor.machine import RESTART_GRACE
from tfdist_cli.launch.supervisor.restarts import LONGEST_BACK_OFF, NOT_RETRYABLE, SAME_FAILURE, USAGE_ERROR
from tfdist_cli.launch.supervisor.state import Phase, Status
from tfdist_cli.spec.sections.role_spec import RestartSpec

MANY = 100


def job(*tasks, strategy="parameter_server", most=3, **options):
    return History(*(tasks or PS_TASKS), policy=make_policy(strategy, max_restarts=most, **options))


def lose_all(history, now, first, code=-9, cause=""):
    """A task is lost, and the others exit after their stop signals; the next attempt begins."""
    history.at(now, Exited(first, code, cause=cause))
    history.at(now, *(Exited(task, -15) for task in history.state.alive))
    assert history.state.phase is Phase.PAUSED
    return history.state.until - now


def test_a_worker_of_parameter_servers_is_started_again_alone():
    history = job()
    assert history.at(5, Exited(W1, -9)) == {}
    assert history.statuses()[W1] is Status.LOST
    history.at(5, Tick())
    assert history.actions == (Start(W1),)
    assert history.statuses()[W1] is Status.STARTING
    assert history.state.attempt == 1
    history.at(9, Exited(CHIEF, 0))
    history.at(9, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert (history.state.exit_code, history.state.failures) == (0, ())
    assert [loss.task for loss in history.state.lost_tasks] == [W1]
    assert history.state.tasks[W1].restarts == 1


def test_a_lost_ps_takes_all_with_it_and_all_are_started_again():
    history = job(reports=True)
    history.at(1, *up(*PS_TASKS), progress(40))
    assert history.at(5, Exited(PS, -9)) == dict.fromkeys((CHIEF, W0, W1), TERM)
    history.at(5.2, Exited(W0, 143), Exited(W1, 143))
    assert history.at(5 + RESTART_GRACE, Tick()) == {CHIEF: KILL}
    history.at(6.1, Exited(CHIEF, -9))
    assert history.state.phase is Phase.PAUSED
    history.at(6.1, Tick())
    assert history.actions == tuple(Start(task, 2) for task in PS_TASKS)
    assert (history.state.attempt, history.state.phase) == (2, Phase.RUNNING)
    (loss,) = history.state.lost_tasks
    assert (loss.task, loss.step, loss.alone) == (PS, 40, False)


def test_the_chief_saves_before_all_are_started_again_for_a_worker_whose_policy_wants_that():
    history = job(restarts={"worker": RestartSpec(policy="job")})
    assert history.at(5, Exited(W0, -9)) == {CHIEF: TERM}
    assert history.state.phase is Phase.SAVING
    assert history.at(7, Exited(CHIEF, 143)) == {W1: TERM, PS: TERM}
    history.at(8, Exited(W1, -15), Exited(PS, -15), Tick())
    assert history.actions == tuple(Start(task, 2) for task in PS_TASKS)


def test_what_is_seen_first_may_be_a_consequence():
    history = job()
    history.at(5, error(CHIEF, "lost ps:0"), Exited(CHIEF, 1))
    history.at(6, Exited(PS, -9, ago=1.5), Exited(W0, -15), Exited(W1, -15))
    assert [loss.task for loss in history.state.lost_tasks] == [PS]


GONE = "failed to connect to /job:worker/replica:0/task:1"


def lost_at_start_up(message=GONE, *, most=3):
    """A worker is killed twice before the first step, and the chief fails of that each time, as it builds its model."""
    history = job(reports=True, most=most)
    for attempt in (1, 2):
        now = 100 * attempt
        history.at(now, Exited(W1, -9), error(CHIEF, message, of="UnavailableError"), Exited(CHIEF, 1))
        history.at(now + 1, *(Exited(task, -15) for task in history.state.alive))
        history.at(now + 50, Tick())
        assert history.state.attempt == attempt + 1
    return history


@pytest.mark.parametrize("message", [GONE, "Socket closed"])
def test_a_loss_that_was_caused_by_another_one_uses_up_no_restart(message):
    history = lost_at_start_up(message)
    assert [(loss.task, loss.caused_by) for loss in history.state.lost_tasks] == [(W1, None), (CHIEF, W1)] * 2
    assert history.state.restarts == 2
    causes = [cause_of(lost) for lost in history.state.lost_tasks]
    assert "SIGKILL" in causes[0]
    assert f"UnavailableError: {message}" in causes[1]
    assert causes[1].endswith("worker:1")


def test_a_loss_that_was_caused_by_the_last_one_that_is_allowed_is_worth_a_restart_too():
    assert lost_at_start_up(most=2).state.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("failure", "works"),
    [
        (error(CHIEF, GONE), False),  # not a consequence
        (error(CHIEF, GONE.replace("task:1", "task:0"), of="UnavailableError"), False),  # of another one
        (error(CHIEF, GONE, of="UnavailableError"), True),  # of the next loss of a worker that was back
    ],
)
def test_another_fault_uses_up_another_restart(failure, works):
    history = job(reports=True)
    history.at(1, *up(*PS_TASKS), Exited(W1, -9), Tick())
    history.at(2, *up(W1), *([progress(3, **{"worker:1": 1.0})] if works else []))
    history.at(3, failure, Exited(CHIEF, 1))
    assert [loss.caused_by for loss in history.state.lost_tasks] == [None, None]
    assert history.state.restarts == 2


@pytest.mark.parametrize("policy", ["replace", "job"])
def test_what_another_process_has_ended_on_purpose_is_not_started_again(policy):
    history = job(restarts={"worker": RestartSpec(policy=policy)})
    ends = [Exited(task, code, cause="cancelled", cancelled=True) for task, code in ((W1, 143), (CHIEF, 1), (W0, -15))]
    history.at(5, ends[0])
    history.at(5, *ends[1:], Exited(PS, -15, cause="cancelled", cancelled=True))
    assert history.ended
    assert (history.state.exit_code, history.state.lost_tasks) == (143, ())


def test_what_all_have_failed_of_is_not_the_launchers_doing_though_it_tells_the_rest_to_end():
    history = job(W0, W1, strategy="multi_worker_mirrored")
    history.at(4, error(W1, "told to end"))
    for task in (W0, W1):
        history.at(5, Exited(task, 143, cause="cancelled", cancelled=True))
    assert history.state.failures[0] == W1
    assert history.state.exit_code == 143


@pytest.mark.parametrize("lost", [W0, W1])
def test_a_mirrored_worker_takes_all_with_it(lost):
    history = job(W0, W1, EVALUATOR, strategy="multi_worker_mirrored")
    assert set(history.at(5, Exited(lost, -9)).values()) == {TERM}
    history.at(6, *(Exited(task, -15) for task in {W0, W1, EVALUATOR} - {lost}), Tick())
    assert history.actions == tuple(Start(task, 2) for task in (W0, W1, EVALUATOR))


def test_an_evaluator_is_started_again_alone_even_while_it_is_waited_for():
    history = job(CHIEF, PS, W0, EVALUATOR)
    history.at(5, Exited(EVALUATOR, -9), Tick())
    assert history.actions == (Start(EVALUATOR),)
    history.at(6, Exited(CHIEF, 0))
    assert history.state.phase is Phase.EVALUATING
    history.at(7, Exited(EVALUATOR, -9), Tick())
    assert history.state.phase is Phase.EVALUATING
    assert history.state.until == 56  # the time for the last checkpoint goes on
    assert history.at(8, Tick()) == {}
    assert history.actions == (Start(EVALUATOR),)  # after a second: it has done nothing since it was started
    assert history.at(9, Exited(EVALUATOR, 0)) == {PS: TERM, W0: TERM}


def test_waiting_doubles_without_progress_has_a_bound_and_begins_anew_after_progress():
    history = job(most=MANY)
    now, waits = 0.0, []
    for lost in range(9):
        waits.append(lose_all(history, now, PS))
        now += waits[-1]
        history.at(now, Tick())
        if lost == 3:
            history.at(now, progress(10))
    assert waits == [0, 1, 2, 4, 0, 1, 2, 4, 8]
    for _ in range(6):
        wait = lose_all(history, now, PS)
        now += wait
        history.at(now, Tick())
    assert wait == LONGEST_BACK_OFF


def test_steps_that_were_taken_before_are_no_progress():
    history = job(most=MANY)
    history.at(1, progress(50))
    lose_all(history, 2, PS)
    history.at(2, Tick(), progress(40), progress(50))
    assert lose_all(history, 3, PS) == 1


def test_a_workers_own_steps_are_its_progress():
    history = job(most=MANY)
    for now, rates in enumerate([{}, {}, {"worker:1": 2.0}, {}]):
        history.at(now * 10, Exited(W1, -9))
        wait = history.state.tasks[W1].start_at - now * 10
        history.at(now * 10 + 5, Tick(), progress(now, **rates))
        assert wait == {0: 0, 1: 1, 2: 2, 3: 0}[now]


def fails_as_before(message, again, *, step=0, codes=(1, 1)):
    history = job()
    others = Exited(W0, -15), Exited(W1, -15), Exited(PS, -15)
    history.at(1, error(CHIEF, message), Exited(CHIEF, codes[0]), *others, Tick())
    history.at(2, progress(step), error(CHIEF, again), Exited(CHIEF, codes[1]))
    return history


def test_a_task_that_fails_of_the_same_without_a_step_in_between_ends_the_job_with_its_error():
    history = fails_as_before("bad batch at step 3", "bad batch at step 5")
    assert len(history.state.lost_tasks) == 1
    assert history.state.tasks[CHIEF].not_restarted_because == SAME_FAILURE
    history.at(3, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert history.ended
    assert (history.state.exit_code, history.state.failures) == (1, (CHIEF,))


@pytest.mark.parametrize("codes", [(-6, 1), (1, -11), (-9, 1)])
def test_a_task_that_crashes_while_it_exits_has_failed_of_the_error_that_it_reported(codes):
    history = fails_as_before("bad batch", "bad batch", codes=codes)
    assert history.state.tasks[CHIEF].not_restarted_because == SAME_FAILURE


def test_a_ps_that_ends_because_the_chief_has_failed_is_no_failure():
    """The chief has reported its error, and the exit of the ps is noticed before its own."""
    history = job()
    for now in (1, 2):
        history.at(now, error(CHIEF, "bad batch"), Exited(PS, 0), Exited(CHIEF, 1))
        history.at(now, *(Exited(task, -15) for task in (W0, W1)), Tick())
    assert [lost.task for lost in history.state.lost_tasks] == [CHIEF]
    assert history.state.tasks[CHIEF].not_restarted_because == SAME_FAILURE
    assert history.ended


def test_a_ps_that_ends_before_a_chief_that_misses_it_is_the_failure():
    history = job()
    history.at(1, error(CHIEF, "connection refused", of="UnavailableError"), Exited(PS, 0), Exited(CHIEF, 1))
    assert [lost.task for lost in history.state.lost_tasks] == [PS]


def test_another_error_or_a_step_in_between_is_worth_another_restart():
    for history in (fails_as_before("this", "that"), fails_as_before("this", "this", step=1)):
        assert len(history.state.lost_tasks) == 2
        assert history.state.tasks[CHIEF].not_restarted_because == ""


def test_a_host_that_is_lost_again_reports_nothing_of_the_program():
    history, lost = job(most=2), "the connection to h2 was lost"
    for now in range(2):
        wait = lose_all(history, now * 10, CHIEF, 255, lost)
        history.at(now * 10 + wait, Tick())
    history.at(50, Exited(CHIEF, 255, cause=lost))
    assert "--max-restarts 2" in history.state.tasks[CHIEF].not_restarted_because


def test_a_kill_from_outside_reports_nothing_of_the_program():
    history = job(most=2)
    for now in range(2):
        wait = lose_all(history, now * 10, CHIEF)
        history.at(now * 10 + wait, Tick())
    history.at(50, Exited(CHIEF, -9))
    assert "--max-restarts 2" in history.state.tasks[CHIEF].not_restarted_because
    history.at(51, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert history.state.exit_code == 137


def test_what_cannot_be_done_is_not_tried_again():
    history = job(reports=True)
    assert history.at(5, Exited(CHIEF, 2)) == dict.fromkeys((W0, W1, PS), TERM)
    assert history.state.lost_tasks == ()
    assert history.state.tasks[CHIEF].not_restarted_because == USAGE_ERROR


def test_a_task_that_reports_that_it_would_be_not_retryable_is_not_started_again():
    history = job(reports=True)
    said = {"kind": "error", "type": "ResultNotSaved", "message": "no room", "retry": False}
    history.at(5, *up(*PS_TASKS), progress(40), RecordReceived(CHIEF, said))
    assert history.at(6, Exited(CHIEF, 1)) == dict.fromkeys((W0, W1, PS), TERM)
    assert history.state.lost_tasks == ()
    assert history.state.tasks[CHIEF].not_restarted_because == NOT_RETRYABLE


@pytest.mark.parametrize("policy", [RestartSpec(policy="never"), RestartSpec(policy="replace", max=0)])
def test_a_role_may_say_that_it_is_not_started_again(policy):
    history = job(restarts={"worker": policy})
    assert history.at(5, Exited(W0, -9)) == {CHIEF: TERM}
    assert history.state.lost_tasks == ()


def test_a_role_has_a_limit_of_its_own():
    history = job(restarts={"worker": RestartSpec(policy="replace", max=1)})
    history.at(5, Exited(W0, -9), Exited(W1, -9), Tick())
    assert history.actions == (Start(W0), Start(W1))
    assert history.at(6, Exited(W0, -9)) == {CHIEF: TERM}
    assert "restart.max is 1" in history.state.tasks[W0].not_restarted_because


def test_a_signal_ends_a_job_that_waits_for_its_restart_at_once():
    history = job(most=MANY)
    lose_all(history, 0, PS)
    history.at(0, Tick())
    assert lose_all(history, 1, PS) == 1
    assert history.at(1.5, INT) == {}
    assert history.ended
    assert history.state.exit_code == 130


def test_a_signal_while_tasks_end_for_a_restart_ends_the_job():
    history = job()
    history.at(5, Exited(PS, -9))
    assert history.at(5.1, INT) == {}
    assert history.at(5.2, INT) == dict.fromkeys((CHIEF, W0, W1), KILL)
    history.at(6, *(Exited(task, -9) for task in (CHIEF, W0, W1)))
    assert history.ended
    assert history.state.exit_code == 130


def test_a_worker_that_waits_for_its_restart_is_not_started_when_the_training_is_done():
    history = job(most=MANY)
    history.at(0, Exited(W1, -9), Tick())
    history.at(1, Exited(W1, -9), Exited(CHIEF, 0))
    assert history.state.tasks[W1].start_at is None
    assert history.statuses()[W1] is Status.LOST
    history.at(1, Exited(W0, -15), Exited(PS, -15), Tick())
    assert history.ended
    assert history.state.exit_code == 0


def test_a_replaced_worker_that_does_not_come_up_is_killed_and_replaced_again():
    history = job(reports=True)
    history.at(1, *up(*PS_TASKS))
    history.at(10, Exited(W1, -9), Tick())
    assert history.at(109, Tick()) == {}
    assert history.at(110, Tick()) == {W1: KILL}
    history.at(110, Exited(W1, -9))
    assert history.at(111, Tick()) == {}
    assert history.actions == (Start(W1),)
    assert "100 s" in history.state.lost_tasks[-1].ended.stall_reason


def test_a_program_without_reports_is_judged_by_how_long_it_lived():
    history = job(CHIEF, strategy="single", most=MANY)
    lives, waits, now = (1, 1, 100, 1), [], 0.0
    for number, life in enumerate(lives):
        history.at(now, RecordReceived(CHIEF, {"kind": "odd"}))
        now += life
        history.at(now, Exited(CHIEF, number + 1))
        waits.append(history.state.until - now)
        now = history.state.until
        history.at(now, Tick())
    assert waits == [0, 1, 0, 1]
