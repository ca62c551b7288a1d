"""Notes of the time are taken when something is there, and nothing waits for them."""

import time

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS, PHASES
from tfdist_cli.train.engine.step_timer import Turns, Watch, noted, told


def moment():
    """An operation whose result is the time that it ran at."""
    return tf.numpy_function(time.time, [], tf.float64)


def traced(function):
    """The operations of a function."""
    return tf.function(function, autograph=False).get_concrete_function().graph.get_operations()


def test_what_is_not_watched_is_the_same_function():
    variable = tf.Variable(1.0)

    def step(watch=None):
        if watch:
            watch.after("data", moment)
        value = tf.square(variable)
        if watch:
            watch.after("compute", [value, None])
            watch.crossed(lambda: {"pulled": tf.size(value)})
            with watch.over("update"):
                variable.assign_add(value)
            assert watch.totals() == []
        else:
            variable.assign_add(value)
        return value

    watched = traced(lambda: step(Watch(False, *Watch(False).note)))
    assert [each.type for each in watched] == [each.type for each in traced(step)]


def test_of_what_several_devices_did_at_once_the_longest_counts():
    @tf.function(autograph=False)
    def step():
        watch = Watch(True)
        begun = noted(tf.constant(1))
        ended = noted(begun, None)
        watch.longest("update", [ended - begun, tf.constant(3.0, tf.float64), tf.constant(2.0, tf.float64)])
        Watch(False).longest("update", [])
        return watch.totals(), ended - begun

    (totals,), span = step()
    assert span >= 0
    assert totals[COLUMNS.index("update")] == 3
    assert tf.reduce_sum(totals) == 3


def test_a_phase_ends_when_what_it_is_about_is_there_and_all_of_them_add_up():
    variable = tf.Variable(0.0, dtype=tf.float64)

    @tf.function(autograph=False)
    def step():
        watch = Watch(True)
        notes, moments = [*watch.note], []
        for phase in ("data", "pull", "data"):
            moments.append(moment())
            sparse = tf.IndexedSlices(tf.reshape(moments[-1], [1]), tf.constant([0]))
            watch.after(phase, {"x": tf.constant(1.0), "y": [None, sparse]} if phase == "pull" else moments[-1])
            notes += watch.note
        with watch.over("update"):
            variable.assign(moment())
        watch.crossed(lambda: {"pulled": 12, "pushed": tf.constant(3, tf.int64)})
        watch.crossed(lambda: {"pulled": 30})
        return notes, moments, watch.note, watch.totals()

    notes, moments, (end,), (totals,) = tf.nest.map_structure(lambda each: each.numpy(), step())
    for before, seen, note in zip(notes, moments, notes[1:], strict=False):
        assert note >= max(before, seen)
    assert end >= variable.numpy() > 0
    counted = dict(zip(COLUMNS, totals, strict=True))
    assert counted["pull"] == pytest.approx(notes[2] - notes[1])
    assert counted["data"] == pytest.approx(notes[1] - notes[0] + notes[3] - notes[2])
    assert sum(counted[phase] for phase in PHASES) == pytest.approx(end - notes[0])
    assert (counted["pulled"], counted["pushed"], counted["reduced"]) == (42, 3, 0)


def test_nothing_waits_for_a_note():
    def step():
        watch = Watch(True)
        watch.after("data", moment())
        return moment(), watch.note

    made = traced(step)
    assert sum(each.type == "Timestamp" for each in made) == 2
    (_, last) = (each for each in made if each.type == "PyFunc")
    assert not any(other.type == "Timestamp" for other in last.control_inputs)


def test_a_branch_goes_on_from_the_last_note():
    @tf.function(autograph=False)
    def step(taken):
        (first,) = note = Watch(True).note

        def branch():
            watch = Watch(True, *note)
            watch.after("compute", moment())
            return [*watch.note, *watch.totals()]

        return first, *tf.cond(taken, branch, lambda: [*note, tf.zeros([len(COLUMNS)], tf.float64)])

    first, end, totals = step(tf.constant(True))
    assert totals.numpy().sum() == pytest.approx(float(end - first))
    first, end, totals = step(tf.constant(False))
    assert float(end - first) == totals.numpy().sum() == 0


def test_updates_that_a_worker_waits_for_are_taken_from_its_wait():
    turns, totals = Turns(), {}

    def made(seconds):
        counted = np.zeros(len(COLUMNS))
        counted[COLUMNS.index("update")] = seconds
        turns.made(counted)

    turns.wait(0)
    turns.order()  # 1 s, which the first waits for
    turns.wait(1)
    turns.order()  # 2 s, which both wait for
    made(1)
    turns.go(0)
    turns.order()  # 4 s, for the second only
    made(2)
    made(4)
    spent = np.zeros(len(COLUMNS))
    spent[COLUMNS.index("wait")] = 10
    for worker in (0, 1, 0):
        turns.add(worker, spent, totals)
    shown = told(totals)
    assert (shown["worker:0"]["wait"], shown["worker:0"]["update"]) == (17, 3)
    assert (shown["worker:1"]["wait"], shown["worker:1"]["update"]) == (4, 6)


def test_turns_where_nothing_is_watched():
    turns, totals = Turns(), {}
    turns.wait(0)
    turns.order()
    turns.made(np.zeros(0))
    turns.add(0, np.zeros(0), totals)
    assert totals == {}
