"""The policy of a quorum, whatever the order in which workers submit gradients, fail and restart."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_cli.train.engine.parameter_server.quorum.policy import QuorumPolicy


def submitted(policy, worker, step):
    return policy.submit(worker, step, key=100 * worker + step)


def updated(policy):
    made = policy.complete()
    policy.updated()
    return [(gradient.worker, gradient.step) for gradient in made]


def test_an_update_takes_one_gradient_of_each_worker():
    policy = QuorumPolicy(2, 2, 0, done=5, end=7)
    policy.start(0)
    assert list(policy.assign()) == [(0, 5, False)]
    policy.start(1)
    assert list(policy.assign()) == [(1, 5, False)]
    assert submitted(policy, 1, 5)
    assert not policy.complete()
    assert list(policy.assign()) == []
    assert submitted(policy, 0, 5)
    assert [gradient.key for gradient in policy.complete()] == [5, 105]
    assert updated(policy) == [(0, 5), (1, 5)]
    assert list(policy.assign()) == [(0, 6, False), (1, 6, False)]


def test_a_gradient_that_comes_too_late_is_dropped_and_its_worker_continues_with_the_others():
    policy = QuorumPolicy(2, 1, 0, done=0, end=9)
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, False), (1, 0, False)]
    for step in (0, 1, 2):
        assert submitted(policy, 0, step)
        assert updated(policy) == [(0, step)]
        assert list(policy.assign()) == [(0, step + 1, False)]
    assert not submitted(policy, 1, 0)
    assert list(policy.assign()) == [(1, 3, False)]


def test_a_backup_worker_is_dropped_also_before_the_update_is_made():
    policy = QuorumPolicy(2, 1, 0, done=0, end=1)
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, False), (1, 0, False)]
    assert submitted(policy, 1, 0)
    assert not submitted(policy, 0, 0)
    assert updated(policy) == [(1, 0)]
    assert list(policy.assign()) == [(0, -1, False), (1, -1, False)]


def test_a_worker_may_be_ahead_by_as_much_as_is_allowed():
    policy = QuorumPolicy(2, 2, 3, done=0, end=99)
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, False), (1, 0, False)]
    for step in (0, 1, 2):
        assert submitted(policy, 0, step)
        assert list(policy.assign()) == [(0, step + 1, False)]
    assert submitted(policy, 0, 3)
    assert list(policy.assign()) == []
    assert policy.largest_gap == 3
    assert submitted(policy, 1, 0)
    assert [gradient.staleness for gradient in policy.complete()] == [0, 0]
    assert updated(policy) == [(0, 0), (1, 0)]
    assert list(policy.assign()) == [(0, 4, False), (1, 1, False)]
    assert submitted(policy, 1, 1)
    assert [gradient.staleness for gradient in policy.complete()] == [1, 0]


def test_a_worker_that_restarts_is_assigned_again_the_step_it_lost():
    policy = QuorumPolicy(2, 2, 1, done=0, end=99)
    policy.start(0)
    assert list(policy.assign()) == [(0, 0, False)]
    assert submitted(policy, 0, 0)
    assert list(policy.assign()) == [(0, 1, False)]
    policy.start(0)
    assert list(policy.assign()) == [(0, 1, False)]


def test_a_gradient_that_is_submitted_twice_counts_once():
    policy = QuorumPolicy(2, 1, 1, done=0, end=99)
    policy.start(0)
    assert list(policy.assign()) == [(0, 0, False)]
    assert submitted(policy, 0, 0)
    assert not submitted(policy, 0, 0)


def test_winding_up_finishes_the_assigned_steps():
    policy = QuorumPolicy(2, 2, 2, done=0, end=99)
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, False), (1, 0, False)]
    assert submitted(policy, 0, 0)
    assert list(policy.assign()) == [(0, 1, False)]
    policy.wind_up()
    assert policy.end == 2
    assert submitted(policy, 1, 0)
    assert updated(policy) == [(0, 0), (1, 0)]
    assert list(policy.assign()) == [(1, 1, False)]
    assert submitted(policy, 0, 1)
    assert submitted(policy, 1, 1)
    assert updated(policy) == [(0, 1), (1, 1)]
    assert list(policy.assign()) == [(0, -1, False), (1, -1, False)]


def test_gradients_of_updates_that_are_never_made_are_left_over():
    policy = QuorumPolicy(2, 2, 1, done=0, end=99)
    policy.start(0)
    assert list(policy.assign()) == [(0, 0, False)]
    assert submitted(policy, 0, 0)
    assert [gradient.key for gradient in policy.left_over()] == [0]


def test_several_steps_are_promised_after_the_last_promised_one_and_only_if_there_are_as_many():
    policy = QuorumPolicy(1, 1, 0, done=0, end=5)
    policy.several = 2
    policy.start(0)
    promised, certain = [], []
    for step in range(5):
        [(_, assigned, several)] = policy.assign()
        assert assigned == step
        promised.append(several)
        submitted(policy, 0, step)
        assert policy.complete()
        certain.append(policy.updated())
    assert promised == certain == [True, False, True, False, False]
    assert list(policy.assign()) == [(0, -1, False)]


def test_nothing_is_promised_if_an_update_can_leave_out_a_worker():
    policy = QuorumPolicy(2, 1, 0, done=0, end=9)
    policy.several = 2
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, False), (1, 0, False)]
    assert submitted(policy, 0, 0)
    assert not policy.updated()


def test_promised_steps_are_done_before_the_training_ends():
    policy = QuorumPolicy(2, 2, 0, done=0, end=99)
    policy.several = 3
    for worker in (0, 1):
        policy.start(worker)
    assert list(policy.assign()) == [(0, 0, True), (1, 0, True)]
    policy.wind_up()
    assert policy.end == 3
    policy = QuorumPolicy(1, 1, 0, done=4, end=99)
    policy.start(0)
    assert list(policy.assign()) == [(0, 4, False)]
    submitted(policy, 0, 4)
    policy.several = 5
    assert policy.updated()
    policy.wind_up()
    assert policy.end == 9


def test_a_worker_that_restarts_is_promised_several_steps_again():
    policy = QuorumPolicy(1, 1, 0, done=0, end=99)
    policy.several = 4
    policy.start(0)
    assert list(policy.assign()) == [(0, 0, True)]
    submitted(policy, 0, 0)
    policy.updated()
    assert list(policy.assign()) == [(0, 1, False)]
    policy.start(0)
    assert list(policy.assign()) == [(0, 1, True)]


@pytest.mark.parametrize("backups", [False, True])
@settings(max_examples=40)
@given(data=st.data())
@pytest.mark.slow
def test_any_order_of_events_comes_to_the_end(backups, data):  # noqa: PLR0915 one history, event by event
    workers = data.draw(st.integers(1, 5))
    aggregate = data.draw(st.integers(1, workers)) if backups else workers
    staleness = data.draw(st.integers(0, 4))
    end = data.draw(st.integers(1, 12))
    policy = QuorumPolicy(workers, aggregate, staleness, done=0, end=end)
    running, stopped, keys, made, wound_up = {}, set(range(workers)), 0, [], False
    promised, promised_updates = dict.fromkeys(range(workers), 0), 0  # how many more steps, and updates
    for _ in range(4000):
        if policy.done == policy.end and not running:
            break
        choices = [("starts", worker) for worker in stopped] + [("submits", worker) for worker in running]
        # A worker fails now and then, and the training may be wound up.
        choices += [("fails", worker) for worker in running] * data.draw(st.booleans())
        choices += [("ends", 0)] * (not wound_up and data.draw(st.integers(0, 30)) == 0)
        event, worker = data.draw(st.sampled_from(choices)) if choices else ("stuck", 0)
        assert event != "stuck"
        if event == "starts":
            stopped.discard(worker)
            policy.start(worker)
            promised[worker] = 0
        elif event == "fails":
            del running[worker]
            stopped.add(worker)
        elif event == "ends":
            policy.wind_up()
            wound_up = True
        else:
            keys += 1
            policy.submit(worker, running.pop(worker), keys)
        policy.several = data.draw(st.sampled_from([1, 3]))
        while gradients := policy.complete():
            assert len({gradient.worker for gradient in gradients}) == aggregate
            assert {gradient.step for gradient in gradients} == {policy.done}
            assert all(0 <= gradient.staleness <= staleness for gradient in gradients)
            made += [gradient.key for gradient in gradients]
            several = policy.updated()
            promised_updates = promised_updates - 1 if promised_updates else (policy.several - 1) * several
        for assigned, step, several in policy.assign():
            assert assigned not in stopped
            assert not (promised[assigned] and step < 0)
            promised[assigned] = promised[assigned] - 1 if promised[assigned] else (policy.several - 1) * several
            if step >= 0:
                assert policy.done <= step < policy.end
                running[assigned] = step
    assert policy.done == policy.end
    assert not promised_updates
    assert len(made) == len(set(made)) == aggregate * policy.done
    assert policy.largest_gap <= staleness
