"""Times are taken when a phase ends, and nothing waits for them."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS, PHASES
from tfdist_cli.train.engine.step_timer import StepTimer, UpdatesInWaits, by_name, time_of


def moment():
    """An operation whose result is the time that it ran at."""
    return tf.numpy_function(time.time, [], tf.float64)


def traced(function):
    """The operations of a function."""
    return tf.function(function, autograph=False).get_concrete_function().graph.get_operations()


def test_a_timer_that_is_off_adds_no_operation():
    variable = tf.Variable(1.0)

    def step(timer=None):
        if timer:
            timer.end("data", moment)
        value = tf.square(variable)
        if timer:
            timer.end("compute", [value, None])
            timer.add_bytes(lambda: {"pulled": tf.size(value)})
            with timer.during("update"):
                variable.assign_add(value)
            assert timer.totals() == []
        else:
            variable.assign_add(value)
        return value

    timed = traced(lambda: step(StepTimer(False, *StepTimer(False).last_time)))
    assert [each.type for each in timed] == [each.type for each in traced(step)]


def test_of_spans_on_several_devices_the_longest_counts():
    @tf.function(autograph=False)
    def step():
        timer = StepTimer(True)
        begun = time_of(tf.constant(1))
        ended = time_of(begun, None)
        timer.add_longest("update", [ended - begun, tf.constant(3.0, tf.float64), tf.constant(2.0, tf.float64)])
        StepTimer(False).add_longest("update", [])
        return timer.totals(), ended - begun

    (totals,), span = step()
    assert span >= 0
    assert totals[COLUMNS.index("update")] == 3
    assert tf.reduce_sum(totals) == 3


def test_a_phase_ends_when_its_results_are_available_and_phases_add_up():
    variable = tf.Variable(0.0, dtype=tf.float64)

    @tf.function(autograph=False)
    def step():
        timer = StepTimer(True)
        times, moments = [*timer.last_time], []
        for phase in ("data", "pull", "data"):
            moments.append(moment())
            sparse = tf.IndexedSlices(tf.reshape(moments[-1], [1]), tf.constant([0]))
            timer.end(phase, {"x": tf.constant(1.0), "y": [None, sparse]} if phase == "pull" else moments[-1])
            times += timer.last_time
        with timer.during("update"):
            variable.assign(moment())
        timer.add_bytes(lambda: {"pulled": 12, "pushed": tf.constant(3, tf.int64)})
        timer.add_bytes(lambda: {"pulled": 30})
        return times, moments, timer.last_time, timer.totals()

    times, moments, (end,), (totals,) = tf.nest.map_structure(lambda each: each.numpy(), step())
    for before, seen, end_of_phase in zip(times, moments, times[1:], strict=False):
        assert end_of_phase >= max(before, seen)
    assert end >= variable.numpy() > 0
    counted = dict(zip(COLUMNS, totals, strict=True))
    assert counted["pull"] == pytest.approx(times[2] - times[1])
    assert counted["data"] == pytest.approx(times[1] - times[0] + times[3] - times[2])
    assert sum(counted[phase] for phase in PHASES) == pytest.approx(end - times[0])
    assert (counted["pulled"], counted["pushed"], counted["reduced"]) == (42, 3, 0)


def test_nothing_waits_for_a_time():
    def step():
        timer = StepTimer(True)
        timer.end("data", moment())
        return moment(), timer.last_time

    made = traced(step)
    assert sum(each.type == "Timestamp" for each in made) == 2
    (_, last) = (each for each in made if each.type == "PyFunc")
    assert not any(other.type == "Timestamp" for other in last.control_inputs)


def test_a_branch_continues_from_the_last_time():
    @tf.function(autograph=False)
    def step(taken):
        (first,) = start = StepTimer(True).last_time

        def branch():
            timer = StepTimer(True, *start)
            timer.end("compute", moment())
            return [*timer.last_time, *timer.totals()]

        return first, *tf.cond(taken, branch, lambda: [*start, tf.zeros([len(COLUMNS)], tf.float64)])

    first, end, totals = step(tf.constant(True))
    assert totals.numpy().sum() == pytest.approx(float(end - first))
    first, end, totals = step(tf.constant(False))
    assert float(end - first) == totals.numpy().sum() == 0


def test_updates_that_a_worker_waits_for_are_subtracted_from_its_wait():
    waits, totals = UpdatesInWaits(), {}

    def applied(seconds):
        counted = np.zeros(len(COLUMNS))
        counted[COLUMNS.index("update")] = seconds
        waits.update_applied(counted)

    waits.start_wait(0)
    waits.update_ordered()  # 1 s, which the first waits for
    waits.start_wait(1)
    waits.update_ordered()  # 2 s, which both wait for
    applied(1)
    waits.end_wait(0)
    waits.update_ordered()  # 4 s, for the second only
    applied(2)
    applied(4)
    spent = np.zeros(len(COLUMNS))
    spent[COLUMNS.index("wait")] = 10
    for worker in (0, 1, 0):
        waits.add(worker, spent, totals)
    shown = by_name(totals)
    assert (shown["worker:0"]["wait"], shown["worker:0"]["update"]) == (17, 3)
    assert (shown["worker:1"]["wait"], shown["worker:1"]["update"]) == (4, 6)


def test_updates_in_waits_if_nothing_is_measured():
    waits, totals = UpdatesInWaits(), {}
    waits.start_wait(0)
    waits.update_ordered()
    waits.update_applied(np.zeros(0))
    waits.add(0, np.zeros(0), totals)
    assert totals == {}
