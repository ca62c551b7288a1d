"""Workers and ps keep step: every update is of one gradient of each worker, whoever is lost in between."""

import itertools
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.update_rules import lockstep_functions, token_queues
from tfdist_cli.train.engine.parameter_server.update_rules.gradient_store import GradientStore, Left
from tfdist_cli.train.engine.parameter_server.update_rules.lockstep_functions import LockstepFunctions
from tfdist_cli.train.engine.parameter_server.update_rules.token_queues import (
    END,
    ONE,
    PLACE,
    ROW,
    RUN,
    WHAT,
    WITHIN,
    TokenQueues,
)

pytestmark = pytest.mark.slow

HERE = "/job:localhost/replica:0/task:0/device:CPU:0"
FIRST = 7 * RUN + 30
"""A run's first place."""


@pytest.fixture
def two(monkeypatch):
    """A turnstile of two workers and a ps, which is this process, with one number that comes with a gradient."""
    monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
    return TokenQueues([HERE], workers=2, counted=1)


def given(two, place, what):
    token_queues.give(two.handles["last"][0], two.handles["turns0"], tf.stack([tf.constant(place, tf.int64), what]))


def test_a_turn_is_given_to_every_worker_and_kept(two):
    given(two, FIRST, tf.constant(ROW, tf.int64))
    for worker in range(2):
        assert token_queues.next_turn(two.of(worker)["turns"][0]).numpy().tolist() == [FIRST, ROW]
    assert token_queues.last_turn(two.of(0)["last"][0]).numpy().tolist() == [FIRST, ROW]


def test_turns_that_are_past_are_passed_over_and_a_known_one_is_not_awaited(two):
    for place in range(3):
        given(two, FIRST + place, tf.constant(ONE, tf.int64))
    queue = two.of(0)["turns"][0]
    known = tf.constant([FIRST + 1, WITHIN], tf.int64)
    assert token_queues.turn_of(queue, known, tf.constant(FIRST + 1, tf.int64)).numpy().tolist() == [FIRST + 1, WITHIN]
    assert token_queues.turn_of(queue, known, tf.constant(FIRST + 2, tf.int64)).numpy().tolist() == [FIRST + 2, ONE]
    assert int(tf.raw_ops.QueueSizeV2(handle=queue)) == 0


def test_of_two_gradients_for_a_place_the_first_one_counts(two):
    queue = two.of(1)["commits"][0]
    for place, key in ((FIRST, 5), (FIRST, 6), (FIRST + 1, 7)):
        numbers = tf.constant([place, key], tf.int64)
        token_queues.commit(queue, numbers, tf.constant([key / 2], tf.float64))
    found = [token_queues.committed([queue], tf.constant(place, tf.int64), 1) for place in (FIRST, FIRST + 1)]
    assert [(int(key), float(counted[0])) for [key], [counted] in found] == [(5, 2.5), (7, 3.5)]


def test_what_is_put_into_a_queue_first_is_there_first(two):
    """Commits of a row's steps, and turns on a ps: one that another overtook would be awaited for ever."""
    own = two.of(0)

    @tf.function(autograph=False)
    def function(commits, last, turns):
        for place in range(3):
            numbers = tf.stack([tf.timestamp(), place])  # which is there at any time
            token_queues.commit(commits, tf.cast(numbers, tf.int64), tf.constant([0.0], tf.float64))
            token_queues.give(last, [turns], tf.cast(numbers, tf.int64))

    graph = function.get_concrete_function(own["commits"][0], own["last"][0], own["turns"][0]).graph
    puts = [each for each in graph.get_operations() if each.type in {"QueueEnqueueV2", "AssignVariableOp"}]
    for resource in {put.inputs[0].ref() for put in puts}:
        chain = [put for put in puts if put.inputs[0] is resource.deref()]
        assert len(chain) == 3
        assert all(before in after.control_inputs for before, after in itertools.pairwise(chain))


def test_it_is_known_whether_a_worker_has_begun_a_run_before(two):
    begun = two.of(0)["begun"][0]
    again = [
        bool(token_queues.begins_anew(begun, tf.constant(place, tf.int64))) for place in (FIRST, FIRST, FIRST + RUN)
    ]
    assert again == [False, True, False]
    assert not token_queues.begins_anew(two.of(1)["begun"][0], tf.constant(FIRST, tf.int64))


class Marching:
    """The functions of two workers that compute nothing: what comes with a gradient is its step's number.

    Attributes:
        fails: a worker and the step in which its function fails, once.
    """

    def __init__(self, monkeypatch, counted=1):
        monkeypatch.setattr(token_queues, "CHIEF_DEVICE", HERE)
        self.fails = tf.Variable([-1, -1], dtype=tf.int64)
        self.turnstile = TokenQueues([HERE], 2, counted)
        staged = GradientStore.__new__(GradientStore)
        staged.devices, staged.sizes, staged.state_size, staged.watched = [HERE], [counted, 0, 0, 0], 0, False
        monkeypatch.setattr(staged, "leave", self._leave)
        monkeypatch.setattr(staged, "update", lambda keys, state: [])
        monkeypatch.setattr(lockstep_functions, "GradientStore", lambda workshop, **_: staged)
        self.cadence = LockstepFunctions(SimpleNamespace(workers=[None, None]))

    def _leave(self, iterator, worker, number, after, keys, before, watch):
        with tf.control_dependencies([*after.values(), *before]):
            loss = tf.cast(number, tf.float64)
            failed = tf.reduce_all(self.fails == tf.stack([worker, number]))
        with tf.control_dependencies([tf.debugging.assert_equal(failed, False, "lost")]):
            return Left(tf.identity(loss), {HERE: [tf.identity(loss)]}, loss[None])

    def work(self, worker, size, first=FIRST):
        """A worker's function, and again while it fails."""
        while True:
            try:
                return self.cadence.work(size)(None, tf.constant([worker, first], tf.int64), self.turnstile.of(worker))
            except tf.errors.InvalidArgumentError:
                self.fails.assign([-1, -1])

    def run(self, orders, size, first=FIRST):
        """A run of some orders; what was told of each."""
        self.turnstile.begin(first)
        functions = [partial(self.cadence.updates(size), self.turnstile.handles, tf.constant(first, tf.int64))]
        functions += [partial(self.work, worker, size, first) for worker in range(2)]
        threads = [threading.Thread(target=function) for function in functions]
        for thread in threads:
            thread.start()
        for what in orders:
            self.turnstile.order(what)
        told = [self.turnstile.results.dequeue().numpy() for what in orders if what != END]
        for thread in threads:
            thread.join()
        return told


@pytest.fixture
def marching(monkeypatch):
    return Marching(monkeypatch)


def steps_of(told):
    return [update.tolist() for row in told for update in row[:, :, 0]]


def test_each_update_is_of_the_same_step_of_both_workers_in_rows_and_alone(marching):
    told = marching.run([ONE, ROW, ROW, ONE, END], size=3)
    assert [len(row) for row in told] == [1, 3, 3, 1]
    assert steps_of(told) == [[step, step] for step in range(30, 38)]


def test_a_run_follows_another_one(marching):
    marching.run([ROW, END], size=2)
    told = marching.run([ONE, ROW, END], size=2, first=FIRST + RUN + 2)
    assert steps_of(told) == [[step, step] for step in (32, 33, 34)]


@pytest.mark.parametrize("step", range(30, 40))
def test_a_worker_that_is_lost_and_begins_anew_goes_on_where_the_others_are(marching, step):
    marching.fails.assign([1, step])
    told = marching.run([ONE, ROW, ROW, ROW, END], size=3)
    assert marching.fails.numpy().tolist() == [-1, -1]
    assert steps_of(told) == [[number, number] for number in range(30, 40)]


@pytest.mark.parametrize("turns", [1, 0])
def test_a_worker_that_is_lost_after_it_has_committed_is_not_waited_for_again(marching, turns):
    """Whether or not it had received its next turn: the update is of what it committed first."""
    own, place = marching.turnstile.of(0), tf.constant(FIRST, tf.int64)
    marching.turnstile.begin(FIRST)
    token_queues.begins_anew(own["begun"][0], place)
    given(marching.turnstile, FIRST, tf.constant(ROW, tf.int64))
    for _ in range(turns):
        token_queues.next_turn(own["turns"][0])
    token_queues.commit(own["commits"][0], tf.stack([place, 0]), tf.constant([-5.0], tf.float64))
    marching.turnstile.begin = lambda first: None
    told = marching.run([ROW, ROW, END], size=3)
    assert steps_of(told) == [[-5, 30], *[[step, step] for step in range(31, 36)]]


@pytest.mark.parametrize("current", [[FIRST + 5, END], [FIRST + RUN, ROW]])
def test_a_worker_that_comes_back_when_its_run_is_over_takes_no_step(marching, current):
    own = marching.turnstile.of(0)
    token_queues.begins_anew(own["begun"][0], tf.constant(FIRST, tf.int64))
    given(marching.turnstile, current[PLACE], tf.constant(current[WHAT], tf.int64))
    marching.work(0, size=3)
    assert int(tf.raw_ops.QueueSizeV2(handle=own["commits"][0])) == 0


def test_workers_of_a_run_that_is_broken_off_are_told_to_leave(marching):
    size = 3
    worker = threading.Thread(target=marching.work, args=(0, size))
    worker.start()
    given(marching.turnstile, FIRST, tf.constant(ROW, tf.int64))
    marching.turnstile.break_off(size + 1)
    worker.join()
    [key], counted = token_queues.committed(marching.turnstile.of(0)["commits"], tf.constant(FIRST, tf.int64), 1)
    assert counted.numpy().tolist() == [[30.0]]
    assert int(key) > 0


def test_who_waits_for_a_gradient_that_never_comes_fails(two):
    two.end_commits()
    with pytest.raises(tf.errors.OutOfRangeError):
        token_queues.committed(two.handles["commits"], tf.constant(FIRST, tf.int64), 1)


def test_keys_of_two_workers_and_of_two_functions_of_one_differ(marching):
    marching.fails.assign([1, 33])
    seen = tf.Variable(tf.zeros([0, 2], tf.int64), shape=[None, 2])

    def note(keys_there, state):
        return [seen.assign(tf.concat([seen, keys_there[HERE][None]], axis=0)).op]

    marching.cadence._staged.update = note
    marching.run([ROW, ROW, END], size=3)
    assert len(np.unique(seen.numpy())) == seen.numpy().size == 12
