"""Tasks that join and leave a running training, by histories that are played to the supervisor."""

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
    doing,
    error,
    make_policy,
    progress,
    up,
)
from tfdist_cli.launch.supervisor.events import Exited, RecordReceived, ResizeAccepted, Start, Tick
from tfdist_cli.launch.supervisor.state import NOT_TRAINING_YET, Phase, Status
from tfdist_cli.spec.sections.role_spec import RestartSpec
from tfdist_cli.spec.task_id import TaskId

JOINED = (CHIEF, W0, W1, W2, PS)
DATA = TaskId("data_worker", 1)


def joining(*names, tasks=JOINED):
    return ResizeAccepted("r", {"worker": (2, 3)}, tasks, joins=names)


def leaving(*names, tasks=(CHIEF, W0, PS)):
    return ResizeAccepted("r", {"worker": (2, 1)}, tasks, leaves=names)


def joined(task):
    return RecordReceived(CHIEF, {"kind": "joined", "worker": str(task), "step": 5, "took": 1.0})


def left(task):
    return RecordReceived(task, {"kind": "state", "state": "left"})


def elastic(**fields):
    return RecordReceived(CHIEF, {"kind": "elastic", **fields})


def training(**options):
    options = {"max_restarts": 3} | options
    job = History(*PS_TASKS, policy=make_policy(reports=True, **options))
    job.at(1, *up(*PS_TASKS), elastic(joins=True), progress(5))
    return job


def test_a_worker_joins_while_the_others_continue():
    job = training()
    assert job.at(10, joining(W2)) == {}
    assert job.actions == (Start(W2, 1),)
    assert list(job.state.tasks) == list(JOINED)
    assert job.state.open_change
    job.at(11, *up(W2), progress(9))
    assert job.state.resizes[0].trained_at is None  # its server is up, and it has made no step
    job.at(12.5, joined(W2))
    (resize,) = job.state.resizes
    assert (resize.trained_at, resize.failed, resize.resumed, resize.asked_at) == (12.5, (), None, 10)
    assert (job.state.attempt, job.state.restarts, job.state.phase) == (1, 0, Phase.RUNNING)
    assert job.at(20, doing("done"), Exited(CHIEF, 0)) == {W0: TERM, W1: TERM, W2: TERM, PS: TERM}
    job.at(21, *(Exited(task, -15) for task in (W0, W1, W2, PS)))
    assert (job.ended, job.state.exit_code) == (True, 0)
    assert job.statuses()[W2] is Status.DONE


def test_a_later_restart_is_none_of_the_change():
    job = training()
    job.at(10, joining(W2))
    job.at(12, *up(W2), joined(W2))
    job.at(20, Exited(PS, -9))
    job.at(21, *(Exited(task, -15) for task in (CHIEF, W0, W1, W2)))
    job.at(22, Tick())
    assert job.state.attempt == 2
    job.at(23, *up(*JOINED), RecordReceived(CHIEF, {"kind": "resumed", "step": 4}), progress(6))
    (resize,) = job.state.resizes
    assert (resize.trained_at, resize.resumed) == (12, None)


def test_a_worker_leaves_at_a_request():
    job = training()
    assert job.at(10, leaving(W1)) == {W1: TERM}
    assert job.state.resizes[0].trained_at is None
    job.at(11, left(W1), Exited(W1, 0))
    assert job.statuses()[W1] is Status.LEFT
    assert (job.actions, job.state.resizes[0].trained_at, job.state.restarts) == ((), 11, 0)
    assert job.state.present == (CHIEF, W0, PS)
    assert job.at(20, doing("done"), Exited(CHIEF, 0)) == {W0: TERM, PS: TERM}
    job.at(21, Exited(W0, -15), Exited(PS, -15))
    assert (job.state.exit_code, job.state.failures) == (0, ())


def test_joins_and_leaves_in_one_request():
    job = training()
    job.at(10, ResizeAccepted("r", {}, (CHIEF, W0, W2, PS), joins=(W2,), leaves=(W1,)))
    assert {type(action).__name__ for action in job.actions} == {"Start", "Stop"}
    job.at(11, left(W1), Exited(W1, 0))
    assert job.state.open_change
    job.at(12, *up(W2), joined(W2))
    assert not job.state.open_change


def all_leave():
    """The first worker has left by itself; one worker is wanted, and by that the first one."""
    job = training()
    job.at(6, left(W0), Exited(W0, 0))
    assert job.at(10, ResizeAccepted("r", {"worker": (1, 1)}, (CHIEF, W0, PS), joins=(W0,), leaves=(W1,))) == {}
    assert job.actions == (Start(W0, 1),)
    assert (job.state.leaving, job.state.deadline) == ((W1,), 10 + TIMES.start)
    return job


def test_the_last_worker_leaves_when_another_one_has_joined():
    job = all_leave()
    assert job.at(12, *up(W0)) == {}
    assert job.at(13, joined(W0)) == {W1: TERM}
    assert job.state.open_change
    job.at(14, left(W1), Exited(W1, 0))
    assert (job.state.resizes[0].trained_at, job.state.resizes[0].kept) == (14, ())
    assert job.state.present == (CHIEF, W0, PS)


def test_the_last_worker_stays_if_no_other_one_can_join():
    job = all_leave()
    job.at(12, RecordReceived(W0, {"kind": "error", "type": "E", "message": "m", "retry": False}), Exited(W0, 1))
    (resize,) = job.state.resizes
    assert (resize.trained_at, resize.failed, resize.kept) == (12, (W0,), (W1,))
    assert job.state.present == (CHIEF, W1, PS)
    assert not job.state.tasks[W1].leaving
    assert job.at(100, Tick()) == {}


def test_an_earlier_failure_to_join_keeps_nobody():
    job = all_leave()
    job.at(12, RecordReceived(W0, {"kind": "error", "type": "E", "message": "m", "retry": False}), Exited(W0, 1))
    assert job.at(20, ResizeAccepted("r", {"worker": (1, 0)}, (CHIEF, PS), leaves=(W1,))) == {W1: TERM}


def test_a_worker_that_does_not_leave_is_killed():
    job = training()
    job.at(10, leaving(W1))
    assert job.state.deadline == 10 + TIMES.shutdown
    assert job.at(39, Tick()) == {}
    assert job.at(40, Tick()) == {W1: KILL}
    assert job.at(41, Tick()) == {}
    job.at(42, Exited(W1, -9))
    assert job.statuses()[W1] is Status.STOPPED
    assert (job.state.resizes[0].trained_at, job.state.restarts, job.state.phase) == (42, 0, Phase.RUNNING)
    assert job.state.resizes[0].lost == (W1,)


@pytest.mark.parametrize(("code", "lost"), [(-15, ()), (143, ()), (1, (W1,)), (-9, (W1,))])
def test_a_worker_that_leaves_without_the_chief_is_stopped_and_no_failure(code, lost):
    job = training()
    job.at(10, leaving(W1), Exited(W1, code))
    assert (job.statuses()[W1], job.state.resizes[0].lost) == (Status.STOPPED, lost)
    assert (job.state.phase, job.state.failures) == (Phase.RUNNING, ())


def test_a_worker_of_a_node_that_is_taken_away_leaves_by_itself():
    job = training()
    assert job.at(10, left(W1), Exited(W1, 0)) == {}
    assert job.statuses()[W1] is Status.LEFT
    assert (job.actions, job.state.restarts, job.state.phase) == ((), 0, Phase.RUNNING)
    job.at(50, Tick())
    assert job.actions == ()  # it is not started again


@pytest.mark.parametrize("events", [[Exited(W1, 0)], [left(W1), Exited(W1, 1)], [Exited(W1, 143)]])
def test_a_worker_that_ends_in_another_way_has_failed(events):
    job = training()
    job.at(10, *events)
    assert job.statuses()[W1] is Status.LOST
    assert job.state.restarts == 1


def test_a_ps_cannot_leave():
    job = training(max_restarts=0)
    assert job.at(10, left(PS), Exited(PS, 0)) == {CHIEF: TERM}
    assert job.statuses()[PS] is Status.FAILED


def test_a_worker_that_has_left_joins_again():
    job = training()
    job.at(10, left(W1), Exited(W1, 0))
    job.at(11, joining(W1, tasks=PS_TASKS))
    assert job.actions == (Start(W1, 1),)
    assert job.state.tasks[W1].restarts == 1  # so it has been started twice
    job.at(12, *up(W1), joined(W1))
    assert not job.state.open_change
    assert job.state.restarts == 0


def test_a_join_that_fails_is_tried_again_while_the_training_continues():
    job = training()
    job.at(10, joining(W2), error(W2, "no memory"), Exited(W2, 1))
    assert job.statuses()[W2] is Status.LOST
    assert (job.state.phase, job.state.restarts) == (Phase.RUNNING, 1)
    assert job.state.open_change
    job.at(10, Tick())
    assert job.actions == (Start(W2, 1),)
    job.at(11, *up(W2), joined(W2))
    assert job.state.resizes[0].trained_at == 11


@pytest.mark.parametrize(
    "options",
    [{"max_restarts": 0}, {"restarts": {"worker": RestartSpec(policy="never")}},
     {"restarts": {"worker": RestartSpec(policy="job")}}],
)  # fmt: skip
def test_a_join_that_fails_for_good_ends_nothing(options):
    job = training(**options)
    assert job.at(10, joining(W2), Exited(W2, 1)) == {}
    (resize,) = job.state.resizes
    assert (resize.trained_at, resize.failed) == (10, (W2,))
    assert (job.state.phase, job.state.restarts, job.statuses()[W2]) == (Phase.RUNNING, 0, Status.LOST)
    job.at(20, doing("done"), Exited(CHIEF, 0))
    job.at(21, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert (job.ended, job.state.exit_code, job.state.failures) == (True, 0, ())


def test_the_same_failure_of_a_join_is_not_tried_for_ever():
    job = training(max_restarts=9)
    job.at(10, joining(W2), error(W2), Exited(W2, 1))
    job.at(11, Tick())
    assert job.actions == (Start(W2, 1),)
    job.at(12, error(W2), Exited(W2, 1))
    (resize,) = job.state.resizes
    assert resize.failed == (W2,)
    assert "as before" in job.state.tasks[W2].not_restarted_because


def test_a_refused_join_is_not_tried_again():
    job = training()
    refusal = {"kind": "error", "type": "TrainingError", "message": "full", "code": "cluster-full", "retry": False}
    job.at(10, joining(W2), RecordReceived(W2, refusal), Exited(W2, 1))
    assert job.state.resizes[0].failed == (W2,)


def test_a_join_that_is_not_up_in_time_is_killed_alone():
    job = training(max_restarts=0)
    job.at(10, joining(W2))
    assert job.at(10 + TIMES.start, Tick()) == {W2: KILL}
    job.at(111, Exited(W2, -9))
    assert job.state.resizes[0].failed == (W2,)
    assert job.state.phase is Phase.RUNNING


def test_after_it_has_joined_a_worker_fails_like_the_others():
    job = training()
    job.at(10, joining(W2), *up(W2), joined(W2), Exited(W2, 1))
    assert job.statuses()[W2] is Status.LOST
    job.at(11, Tick())
    assert job.actions == (Start(W2, 1),)


def test_a_failure_during_a_join_restarts_all_tasks_of_the_new_size():
    job = training()
    job.at(10, joining(W2))
    assert job.at(11, Exited(PS, 1)) == {CHIEF: TERM, W0: TERM, W1: TERM, W2: TERM}
    job.at(12, *(Exited(task, -15) for task in (CHIEF, W0, W1, W2)))
    job.at(13, Tick())
    assert job.actions == tuple(Start(task, 2) for task in JOINED)
    assert job.state.not_resizable_because
    job.at(14, *up(*JOINED), progress(6))
    assert not job.state.not_resizable_because
    assert job.state.resizes[0].trained_at == 14


def test_after_a_leave_all_tasks_restart_without_the_one_that_left():
    job = training()
    job.at(10, leaving(W1), left(W1), Exited(W1, 0))
    job.at(11, Exited(PS, 1))
    job.at(12, Exited(CHIEF, -15), Exited(W0, -15))
    job.at(13, Tick())
    assert job.actions == tuple(Start(task, 2) for task in (CHIEF, W0, PS))


def test_a_worker_that_left_by_itself_is_back_after_a_restart_of_all():
    job = training()
    job.at(10, left(W1), Exited(W1, 0), Exited(PS, 1))
    job.at(12, Exited(CHIEF, -15), Exited(W0, -15))
    job.at(13, Tick())
    assert job.actions == tuple(Start(task, 2) for task in PS_TASKS)


def test_a_lost_worker_that_has_to_leave_is_not_started_again():
    job = training()
    job.at(10, error(W1), Exited(W1, 1), leaving(W1))
    assert job.actions == ()
    assert job.state.resizes[0].trained_at == 10
    job.at(20, Tick())
    assert job.actions == ()


@pytest.mark.parametrize("stop", [INT, TERMINATED])
def test_a_signal_during_a_join_ends_the_job(stop):
    job = training()
    job.at(10, joining(W2))
    assert job.at(11, stop) == {CHIEF: TERM}
    assert job.at(12, Exited(CHIEF, 143)) == {W0: TERM, W1: TERM, W2: TERM, PS: TERM}
    job.at(13, *(Exited(task, -15) for task in (W0, W1, W2, PS)))
    assert job.ended
    assert job.state.exit_code == 128 + stop.signum
    assert job.state.resizes[0].trained_at is None


def test_a_signal_during_a_leave_ends_the_job_and_signals_nobody_twice():
    job = training()
    job.at(10, leaving(W1))
    job.at(11, TERMINATED)
    assert job.at(12, Exited(CHIEF, 143)) == {W0: TERM, PS: TERM}
    job.at(13, *(Exited(task, -15) for task in (W0, W1, PS)))
    assert job.ended


def test_the_training_is_done_during_a_join():
    job = training()
    job.at(10, joining(W2))
    job.at(11, doing("done"), Exited(CHIEF, 0))
    job.at(12, *(Exited(task, -15) for task in (W0, W1, W2, PS)))
    assert (job.ended, job.state.exit_code) == (True, 0)


def test_nothing_else_changes_until_a_change_is_finished():
    job = training()
    job.at(10, joining(W2))
    assert job.state.not_resizable_because
    job.at(11, leaving(W1))
    assert (job.actions, len(job.state.resizes)) == ((), 1)
    job.at(12, *up(W2), joined(W2))
    assert not job.state.not_resizable_because


def test_a_change_during_a_restart_is_ignored():
    job = training()
    job.at(10, Exited(PS, 1))
    job.at(11, joining(W2))
    assert (job.actions, job.state.resizes) == ((), ())


def test_whether_the_chief_takes_workers():
    job = History(*PS_TASKS, policy=make_policy(reports=True, max_restarts=1))
    assert job.state.takes_no_workers_because == NOT_TRAINING_YET
    job.at(1, *up(*PS_TASKS), elastic(joins=False, reason="synchronous updates"))
    assert job.state.takes_no_workers_because == "synchronous updates"
    job.at(2, RecordReceived(W0, {"kind": "elastic", "joins": True}))
    assert job.state.takes_no_workers_because  # only the chief knows
    job.at(3, elastic(joins=True))
    assert not job.state.takes_no_workers_because
    job.at(4, Exited(PS, 1))
    job.at(5, Exited(CHIEF, -15), Exited(W0, -15), Exited(W1, -15))
    job.at(6, Tick())
    assert job.state.takes_no_workers_because == NOT_TRAINING_YET


@pytest.mark.parametrize("strategy", ["single", "multi_worker_mirrored", "parameter_server"])
def test_evaluators_and_data_workers_join_by_themselves(strategy):
    tasks = {"parameter_server": PS_TASKS, "single": (CHIEF,), "multi_worker_mirrored": (W0, W1)}[strategy]
    job = History(*tasks, policy=make_policy(strategy, reports=True))
    job.at(1, *up(*tasks), progress(3, task=tasks[0]))
    job.at(2, ResizeAccepted("r", {}, (*tasks, EVALUATOR, DATA), joins=(EVALUATOR, DATA)))
    assert set(job.actions) == {Start(EVALUATOR), Start(DATA)}
    job.at(3, RecordReceived(DATA, {"kind": "state", "state": "starting"}))
    job.at(4, *up(DATA), RecordReceived(EVALUATOR, {"kind": "state", "state": "waiting"}))
    assert job.state.resizes[0].trained_at == 4


@pytest.mark.parametrize(("strategy", "status"), [("parameter_server", Status.LEFT), ("single", Status.FAILED)])
def test_a_data_worker_leaves_by_itself_where_one_task_reads(strategy, status):
    tasks = (*(PS_TASKS if strategy == "parameter_server" else (CHIEF,)), DATA)
    job = History(*tasks, policy=make_policy(strategy, reports=True))
    job.at(1, *up(*tasks), progress(3))
    job.at(2, left(DATA), Exited(DATA, 0))
    assert job.statuses()[DATA] is status


def test_a_data_worker_that_still_has_examples_is_killed_in_the_end():
    job = History(*PS_TASKS, DATA, policy=make_policy(reports=True))
    job.at(1, *up(*PS_TASKS, DATA), elastic(joins=True), progress(5))
    assert job.at(10, ResizeAccepted("r", {}, PS_TASKS, leaves=(DATA,))) == {DATA: TERM}
    assert job.at(10 + TIMES.shutdown, Tick()) == {DATA: KILL}
    job.at(41, Exited(DATA, -9))
    assert job.statuses()[DATA] is Status.STOPPED


@pytest.mark.parametrize("code", [0, -15, 143])
def test_an_evaluator_leaves_whatever_its_code(code):
    job = History(CHIEF, EVALUATOR, policy=make_policy("single", reports=True))
    job.at(1, *up(CHIEF, EVALUATOR))
    assert job.at(2, ResizeAccepted("r", {}, (CHIEF,), leaves=(EVALUATOR,))) == {EVALUATOR: TERM}
    job.at(3, Exited(EVALUATOR, code))
    assert job.statuses()[EVALUATOR] is Status.LEFT
    job.at(4, Exited(CHIEF, 0))
    assert (job.ended, job.state.exit_code) == (True, 0)


EVENTS = st.sampled_from(
    [
        *(joining(*names, tasks=JOINED) for names in ((W2,), (W1, W2))),
        leaving(W1),
        leaving(W2, tasks=PS_TASKS),
        *(event(task) for event in (joined, left) for task in (W1, W2)),
        *(Exited(task, code) for task in (CHIEF, W0, W1, W2, PS) for code in (0, 1, -15)),
        *up(W2),
        progress(6),
        progress(7),
        Tick(),
        TERMINATED,
        doing("done"),
    ]
)


@settings(max_examples=100)
@given(st.lists(EVENTS, max_size=25), st.integers(0, 3))
def test_any_history_with_changes_comes_to_an_end(events, most):
    job = CheckedHistory(*PS_TASKS, policy=make_policy(reports=True, max_restarts=most))
    for task in PS_TASKS:
        job.at(0, *up(task))
    now = 1.0
    for event in events:
        now += 1
        possible = _possible(job, event) if isinstance(event, ResizeAccepted) else event
        if isinstance(event, Exited | RecordReceived) and event.task not in job.state.alive:
            continue
        if possible:
            job.at(now, possible)
    job.at(now + 1, INT)
    for _ in range(9):
        now += 100
        job.obey(now)
        job.at(now, Tick())
    assert job.ended


def _possible(job, event):
    """The part of a request that fits the tasks that are there; None if there is none, or none is possible now."""
    present = job.state.present
    joins = tuple(task for task in event.joins if task not in present and task not in job.state.alive)
    leaves = tuple(task for task in event.leaves if task in present)
    if not (joins or leaves) or job.state.not_resizable_because:
        return None
    tasks = tuple(sorted({*present, *joins} - {*leaves}, key=[*PS_TASKS, W2].index))
    return ResizeAccepted("r", {}, tasks, joins=joins, leaves=leaves)


def test_a_data_worker_has_no_time_limit_while_the_chief_evaluates():
    tasks = (*PS_TASKS, TaskId("data_dispatcher"), DATA, TaskId("data_worker", 2))
    job = History(*tasks, policy=make_policy(reports=True))
    job.at(1, *up(*tasks), elastic(joins=True), progress(5))
    job.at(9, doing("evaluating"))
    assert job.at(10, ResizeAccepted("r", {"data_worker": (2, 1)}, tasks[:-1], leaves=tasks[-1:])) == {tasks[-1]: TERM}
    assert [job.state.deadline] == [None]
    assert job.at(100, Tick(), doing("training")) == {}
    assert job.state.deadline == 100 + TIMES.shutdown
    assert job.at(110, doing("saving"), doing("training")) == {}
    assert job.at(100 + TIMES.shutdown, Tick()) == {tasks[-1]: KILL}
