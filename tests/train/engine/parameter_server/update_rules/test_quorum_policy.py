"""Synchronous training's rule, whatever the order in which workers work, die and come back."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist_cli.train.engine.parameter_server.update_rules.quorum_policy import QuorumPolicy


def handed_in(rule, worker, step):
    return rule.hand_in(worker, step, key=100 * worker + step)


def updated(rule):
    made = rule.complete()
    rule.updated()
    return [(gradient.worker, gradient.step) for gradient in made]


def test_an_update_takes_one_gradient_of_each_worker():
    rule = QuorumPolicy(2, 2, 0, done=5, end=7)
    rule.greet(0)
    assert list(rule.assign()) == [(0, 5, False)]
    rule.greet(1)
    assert list(rule.assign()) == [(1, 5, False)]
    assert handed_in(rule, 1, 5)
    assert not rule.complete()
    assert list(rule.assign()) == []
    assert handed_in(rule, 0, 5)
    assert [gradient.key for gradient in rule.complete()] == [5, 105]
    assert updated(rule) == [(0, 5), (1, 5)]
    assert list(rule.assign()) == [(0, 6, False), (1, 6, False)]


def test_who_comes_too_late_is_dropped_and_goes_on_with_the_others():
    rule = QuorumPolicy(2, 1, 0, done=0, end=9)
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, False), (1, 0, False)]
    for step in (0, 1, 2):
        assert handed_in(rule, 0, step)
        assert updated(rule) == [(0, step)]
        assert list(rule.assign()) == [(0, step + 1, False)]
    assert not handed_in(rule, 1, 0)
    assert list(rule.assign()) == [(1, 3, False)]


def test_a_backup_worker_is_dropped_also_before_the_update_is_made():
    rule = QuorumPolicy(2, 1, 0, done=0, end=1)
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, False), (1, 0, False)]
    assert handed_in(rule, 1, 0)
    assert not handed_in(rule, 0, 0)
    assert updated(rule) == [(1, 0)]
    assert list(rule.assign()) == [(0, -1, False), (1, -1, False)]


def test_a_worker_may_be_ahead_by_as_much_as_is_allowed():
    rule = QuorumPolicy(2, 2, 3, done=0, end=99)
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, False), (1, 0, False)]
    for step in (0, 1, 2):
        assert handed_in(rule, 0, step)
        assert list(rule.assign()) == [(0, step + 1, False)]
    assert handed_in(rule, 0, 3)
    assert list(rule.assign()) == []
    assert rule.largest_gap == 3
    assert handed_in(rule, 1, 0)
    assert [gradient.staleness for gradient in rule.complete()] == [0, 0]
    assert updated(rule) == [(0, 0), (1, 0)]
    assert list(rule.assign()) == [(0, 4, False), (1, 1, False)]
    assert handed_in(rule, 1, 1)
    assert [gradient.staleness for gradient in rule.complete()] == [1, 0]


def test_a_worker_that_comes_back_is_given_again_what_it_lost():
    rule = QuorumPolicy(2, 2, 1, done=0, end=99)
    rule.greet(0)
    assert list(rule.assign()) == [(0, 0, False)]
    assert handed_in(rule, 0, 0)
    assert list(rule.assign()) == [(0, 1, False)]
    rule.greet(0)
    assert list(rule.assign()) == [(0, 1, False)]


def test_what_a_dead_worker_has_handed_in_counts_once():
    rule = QuorumPolicy(2, 1, 1, done=0, end=99)
    rule.greet(0)
    assert list(rule.assign()) == [(0, 0, False)]
    assert handed_in(rule, 0, 0)
    assert not handed_in(rule, 0, 0)


def test_winding_up_finishes_what_was_given_out():
    rule = QuorumPolicy(2, 2, 2, done=0, end=99)
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, False), (1, 0, False)]
    assert handed_in(rule, 0, 0)
    assert list(rule.assign()) == [(0, 1, False)]
    rule.wind_up()
    assert rule.end == 2
    assert handed_in(rule, 1, 0)
    assert updated(rule) == [(0, 0), (1, 0)]
    assert list(rule.assign()) == [(1, 1, False)]
    assert handed_in(rule, 0, 1)
    assert handed_in(rule, 1, 1)
    assert updated(rule) == [(0, 1), (1, 1)]
    assert list(rule.assign()) == [(0, -1, False), (1, -1, False)]


def test_gradients_of_updates_that_are_never_made_are_known():
    rule = QuorumPolicy(2, 2, 1, done=0, end=99)
    rule.greet(0)
    assert list(rule.assign()) == [(0, 0, False)]
    assert handed_in(rule, 0, 0)
    assert [gradient.key for gradient in rule.left_over()] == [0]


def test_a_row_of_steps_is_promised_to_who_has_done_the_last_one_and_only_if_there_are_so_many():
    rule = QuorumPolicy(1, 1, 0, done=0, end=5)
    rule.several = 2
    rule.greet(0)
    promised, sure = [], []
    for step in range(5):
        [(_, given, several)] = rule.assign()
        assert given == step
        promised.append(several)
        handed_in(rule, 0, step)
        assert rule.complete()
        sure.append(rule.updated())
    assert promised == sure == [True, False, True, False, False]
    assert list(rule.assign()) == [(0, -1, False)]


def test_nothing_is_promised_where_a_worker_can_be_left_out():
    rule = QuorumPolicy(2, 1, 0, done=0, end=9)
    rule.several = 2
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, False), (1, 0, False)]
    assert handed_in(rule, 0, 0)
    assert not rule.updated()


def test_what_was_promised_is_done_before_the_training_ends():
    rule = QuorumPolicy(2, 2, 0, done=0, end=99)
    rule.several = 3
    for worker in (0, 1):
        rule.greet(worker)
    assert list(rule.assign()) == [(0, 0, True), (1, 0, True)]
    rule.wind_up()
    assert rule.end == 3
    rule = QuorumPolicy(1, 1, 0, done=4, end=99)
    rule.greet(0)
    assert list(rule.assign()) == [(0, 4, False)]
    handed_in(rule, 0, 4)
    rule.several = 5
    assert rule.updated()
    rule.wind_up()
    assert rule.end == 9


def test_a_worker_that_comes_back_is_promised_a_row_anew():
    rule = QuorumPolicy(1, 1, 0, done=0, end=99)
    rule.several = 4
    rule.greet(0)
    assert list(rule.assign()) == [(0, 0, True)]
    handed_in(rule, 0, 0)
    rule.updated()
    assert list(rule.assign()) == [(0, 1, False)]
    rule.greet(0)
    assert list(rule.assign()) == [(0, 1, True)]


@pytest.mark.parametrize("backups", [False, True])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_order_of_events_comes_to_the_end(backups, data):  # noqa: PLR0915 one story, told event by event
    workers = data.draw(st.integers(1, 5))
    aggregate = data.draw(st.integers(1, workers)) if backups else workers
    staleness = data.draw(st.integers(0, 4))
    end = data.draw(st.integers(1, 12))
    rule = QuorumPolicy(workers, aggregate, staleness, done=0, end=end)
    at_work, away, keys, made, given_up = {}, set(range(workers)), 0, [], False
    sure, sure_updates = dict.fromkeys(range(workers), 0), 0  # how many more steps, and updates, are promised
    for _ in range(4000):
        if rule.done == rule.end and not at_work:
            break
        choices = [("back", worker) for worker in away] + [("done", worker) for worker in at_work]
        # A worker dies now and then; a training that is told to end does so.
        choices += [("dies", worker) for worker in at_work] * data.draw(st.booleans())
        choices += [("ends", 0)] * (not given_up and data.draw(st.integers(0, 30)) == 0)
        event, worker = data.draw(st.sampled_from(choices)) if choices else ("stuck", 0)
        assert event != "stuck"
        if event == "back":
            away.discard(worker)
            rule.greet(worker)
            sure[worker] = 0
        elif event == "dies":
            del at_work[worker]
            away.add(worker)
        elif event == "ends":
            rule.wind_up()
            given_up = True
        else:
            keys += 1
            rule.hand_in(worker, at_work.pop(worker), keys)
        rule.several = data.draw(st.sampled_from([1, 3]))
        while gradients := rule.complete():
            assert len({gradient.worker for gradient in gradients}) == aggregate
            assert {gradient.step for gradient in gradients} == {rule.done}
            assert all(0 <= gradient.staleness <= staleness for gradient in gradients)
            made += [gradient.key for gradient in gradients]
            several = rule.updated()
            sure_updates = sure_updates - 1 if sure_updates else (rule.several - 1) * several
        for assigned, step, several in rule.assign():
            assert assigned not in away
            assert not (sure[assigned] and step < 0)
            sure[assigned] = sure[assigned] - 1 if sure[assigned] else (rule.several - 1) * several
            if step >= 0:
                assert rule.done <= step < rule.end
                at_work[assigned] = step
    assert rule.done == rule.end
    assert not sure_updates
    assert len(made) == len(set(made)) == aggregate * rule.done
    assert rule.largest_gap <= staleness
