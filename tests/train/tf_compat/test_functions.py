"""One thread for an operation has operations carried out one by one, where TensorFlow can do that."""

import contextlib
import gc
import threading

import numpy as np
import pytest
import tensorflow as tf

from tests.support.compare import assert_same, classifier, train_both
from tfdist_cli.train.tf_compat.functions import (
    SINGLE_THREADED,
    announced_calls,
    copied,
    function_kept_whole,
    functions_inlined,
    has_one_thread,
    may_run_in_order,
    placing,
    rehearse,
    why_not_in_order,
)

ONE_BY_ONE = SINGLE_THREADED


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "1")


def loop(value):
    return tf.while_loop(lambda number, _: number < 3, lambda number, value: (number + 1, value * 2), (0, value))[1]


def condition(value):
    return tf.cond(value > 1, lambda: value * 4, lambda: value)


def within(function, **options):
    return tf.function(lambda value: tf.function(function, **options)(value) + 1)


FUNCTIONS = {
    "plain": (lambda value: value * 8, ONE_BY_ONE),
    "a function in it": (within(lambda value: value * 7), ONE_BY_ONE),
    "python in it": (lambda value: tf.numpy_function(lambda value: value * 8, [value], tf.float32), ONE_BY_ONE),
    "a loop": (loop, ""),
    "a loop in a function in it": (within(lambda value: loop(value) - 1), ""),
    "a loop by XLA": (within(lambda value: loop(value) - 1, jit_compile=True), ONE_BY_ONE),
    "a condition": (lambda value: condition(value) * 2, ""),
}


@pytest.mark.parametrize(("written", "expected"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_function_runs_with_its_executor(written, expected):
    function = tf.function(written, autograph=False)
    given = tf.constant(2.0)
    assert may_run_in_order(function, given) == bool(expected)
    with tf.experimental.function_executor_type(expected):
        assert function(given).numpy() == pytest.approx(16, abs=1)


def test_with_more_threads_it_is_the_usual_one(monkeypatch):
    function = tf.function(FUNCTIONS["plain"][0], autograph=False)
    monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "2")
    assert not may_run_in_order(function, tf.constant(2.0))
    assert not has_one_thread()
    monkeypatch.delenv("TF_NUM_INTRAOP_THREADS")
    assert not may_run_in_order(function, tf.constant(2.0))


def test_a_rehearsal_changes_nothing_and_finds_what_the_executor_cannot_do():
    data, total = tf.data.Dataset.from_tensors(tf.ones([4, 4])), tf.Variable(tf.zeros([4, 4]))

    @tf.function(autograph=False)
    def plain(iterator):
        total.assign_add(next(iterator))

    @tf.function(autograph=False)
    def held(iterator):
        total.assign(accumulated(next(iterator)))

    rehearse(plain, data.take(0))
    assert not np.any(total.numpy())
    with pytest.raises(tf.errors.UnimplementedError, match="reference-typed"):
        rehearse(held, data.take(0))
    assert not np.any(total.numpy())


def accumulated(value):
    """As TensorFlow's optimization of a large model's memory makes it."""
    held = tf.raw_ops.TemporaryVariable(shape=value.shape, dtype=value.dtype, var_name="held")
    return tf.raw_ops.DestroyTemporaryVariable(ref=tf.raw_ops.Assign(ref=held, value=value), var_name="held")


@pytest.mark.parametrize(
    ("computed", "reads", "refusal"),
    [
        (lambda batch: batch * 2, True, ""),
        (lambda batch: batch * 2, False, "reads no batch"),
        (loop, True, "loops or conditions"),
        (lambda batch: condition(tf.reduce_sum(batch)) * batch, True, "loops or conditions"),
        (accumulated, True, "reference-typed"),
    ],
    ids=["plain", "without_a_batch", "a_loop", "a_condition", "accumulated"],
)
def test_a_function_that_is_traced_within_another_one_is_tried_without_data(computed, reads, refusal):
    """It uses a variable and tensors of the other one, which do not change."""
    data, total, found = tf.data.Dataset.from_tensors(tf.ones([4, 4])), tf.Variable(tf.zeros([4, 4])), []

    @tf.function(autograph=False)
    def outer(iterator, factor):
        weight = factor + 1

        def inner(value):
            if not reads:
                return computed(value) * weight
            return total.assign_add(computed(next(iterator)) * weight, read_value=True) + value

        traced = function_kept_whole(inner).get_concrete_function(tf.TensorSpec([4, 4]))
        found.append(why_not_in_order(traced))
        return traced(factor * tf.ones([4, 4]))

    traced = outer.get_concrete_function(iter(data), tf.constant(2.0))
    (why,) = found
    assert (refusal in why) if refusal else not why
    assert not np.any(total.numpy())
    traced(iter(data), tf.constant(2.0))
    assert np.all(total.numpy()) == reads


def test_copies_may_use_an_iterator():
    data = tf.data.Dataset.range(6)

    @tf.function(autograph=False)
    def three(iterator):
        start = tf.constant(0, tf.int64)
        copy = copied(lambda before: before * 10 + next(iterator), start)
        assert copy
        return copy(copy(copy(start)))

    iterator = iter(data)
    assert [int(three(iterator)) for _ in range(2)] == [12, 345]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_a_training_is_rehearsed_without_an_update(optimizer):
    """Nothing of an update has happened when it finds no data: not its count, nor a decay, which need no batch."""
    assert_same(*train_both(lambda: classifier(optimizer=optimizer)))


def test_a_function_is_a_part_of_the_one_that_is_traced():
    inner = tf.function(lambda x: x * 2 if x > 1 else x)  # AutoGraph makes a condition of it

    def kinds(scope):
        @tf.function(autograph=False)
        def outer(x):
            with scope:
                return inner(x)

        graph = outer.get_concrete_function(tf.TensorSpec([])).graph
        assert [outer(tf.constant(float(n))).numpy() for n in (1, 3)] == [1, 6]
        return {operation.type for operation in graph.get_operations()}

    assert not kinds(functions_inlined()) & {"PartitionedCall", "StatefulPartitionedCall"}
    assert kinds(contextlib.nullcontext()) & {"PartitionedCall", "StatefulPartitionedCall"}


def test_the_gradient_of_an_operation_is_placed_by_its_name():
    names = []

    def named(operation):
        names.append(operation.name)
        return ""

    @tf.function
    def gradient(x):
        with placing(named), tf.GradientTape() as tape:
            tape.watch(x)
            with tf.name_scope("part"):
                y = tf.sin(x)
            return tape.gradient(y, x)

    gradient.get_concrete_function(tf.constant(1.0))
    assert [name for name in names if name.startswith("gradient_tape/part/")]


def test_a_function_that_is_kept_whole_is_called_and_not_inlined():
    kept = function_kept_whole(lambda value: value * 7)
    caller = tf.function(lambda value: kept(value) + 1)
    traced = caller.get_concrete_function(tf.constant(1.0))
    (called,) = traced.graph.as_graph_def().library.function
    assert called.attr["_noinline"].b
    assert float(caller(tf.constant(2.0))) == 15


def test_copies_of_operations_act_in_order_and_are_traced_once():
    """The order is that of the program, also where operations have no common resource, and nothing precedes it."""
    total, seen, traced = tf.Variable(1.0), [], []

    def note(value):
        seen.append(float(value))
        return value

    def once(x):
        traced.append(x)
        before = total * x
        total.assign(before)
        return {"before": [tf.numpy_function(note, [before], tf.float32)], "x": x}

    @tf.function(autograph=False)
    def function(data):
        with tf.control_dependencies([next(data)]):
            first = once(tf.constant(2.0))
        copy = copied(once, tf.constant(2.0))
        assert copy is not None
        with tf.control_dependencies([first["x"]]):
            return [first, copy(tf.constant(3.0)), copy(first["x"] + 3)]

    with pytest.raises(tf.errors.OutOfRangeError):
        function(iter(tf.data.Dataset.range(0)))
    assert total.numpy() == 1
    results = function(iter(tf.data.Dataset.range(1)))
    assert [each["x"].numpy() for each in results] == [2, 3, 5]
    assert seen == [2, 6, 30]
    assert total.numpy() == 30
    assert len(traced) == 2


@pytest.mark.parametrize(
    ("draw", "copies"),
    [
        (lambda: tf.random.normal([3]), True),  # without a seed, each copy draws by itself
        (lambda: tf.random.normal([3], seed=4), False),
        (lambda: tf.cond(tf.constant(1.0) > 0, lambda: tf.random.uniform([3], seed=4), lambda: tf.zeros([3])), False),
        (lambda: tf.random.stateless_normal([3], (1, 2)), True),
    ],
    ids=["no seed", "a seed", "a seed in a condition", "stateless"],
)
def test_operations_that_would_draw_the_same_numbers_are_not_copied(draw, copies):
    tf.random.set_seed(None)  # that of another test
    made = []

    @tf.function(autograph=False)
    def function():
        made.append(copied(lambda x: x + draw(), tf.constant(1.0)))

    function()
    assert (made[0] is not None) == copies


def test_copies_keep_the_functions_that_they_call():
    """TensorFlow forgets a branch of a condition when Python has freed the graph that it was traced in."""

    @tf.function(autograph=False)
    def function(x):
        copy = copied(condition, x)
        assert copy is not None
        return copy(x)

    concrete = function.get_concrete_function(tf.constant(3.0))
    gc.collect()
    assert concrete(tf.constant(3.0)).numpy() == 12


def test_calls_of_functions_are_announced_in_their_thread():
    seen, inner = [], tf.function(lambda: tf.constant(1))
    outer = tf.function(lambda: inner() + 1)
    concrete = inner.get_concrete_function()
    with announced_calls(lambda: seen.append(1)):
        assert (int(outer()), len(seen)) == (2, 1)  # the inner one is called in a trace
        assert (int(concrete()), len(seen)) == (1, 2)
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        with announced_calls(lambda: seen.append(2)):
            inner()
        inner()
    inner()
    assert seen == [1, 1, 2, 1]
