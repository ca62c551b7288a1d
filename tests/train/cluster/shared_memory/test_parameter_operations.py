"""Operations let workers update the parameters of ps; this process is both."""

import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.support.descriptors import opened
from tfdist_cli.train.cluster.shared_memory import parameter_operations, parameters
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.parameter_operations import SharedParameters
from tfdist_cli.train.cluster.shared_memory.stored import close_unused
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import is_ended
from tfdist_cli.train.tf_compat.variables import variable_at

FLOATS, DOUBLES, HALVES = (np.dtype(tf.as_dtype(name).as_numpy_dtype) for name in ("float32", "float64", "bfloat16"))
SHAPES: list[list[list[int]]] = [[[3, 5], [], [0, 2], [3, 5]], [[16], [3], [2]]]
"""Of the variables of each ps; the last one of each is a slot."""
TYPES: list[list[np.dtype]] = [[FLOATS, DOUBLES, FLOATS, FLOATS], [FLOATS, HALVES, FLOATS]]
ARRAYS = [
    [Array(dtype, int(np.prod(shape))) for dtype, shape in zip(types, shapes, strict=True)]
    for types, shapes in zip(TYPES, SHAPES, strict=True)
]
LAYOUT = Layout(values=[own[:-1] for own in ARRAYS], others=[own[-1:] for own in ARRAYS])
PS = range(2)
_process = parameter_operations._process


@pytest.fixture
def shared():
    parameter_operations.register()
    found = SharedParameters(["CPU:0", "CPU:0"], LAYOUT)
    yield found
    found.close()
    _process._drop_ended()


@pytest.fixture
def variables(shared):
    """Those of each ps, published to its memory; a run has begun."""
    found = [
        [tf.Variable(tf.ones(shape, dtype)) for shape, dtype in zip(shapes, types, strict=True)]
        for shapes, types in zip(SHAPES, TYPES, strict=True)
    ]
    publish(shared, found)
    for number in PS:
        shared.begin(number, tf.constant(4, tf.int64))
    return found


def publish(shared, variables):
    tf.function(lambda: [shared.publish(number, own) for number, own in enumerate(variables)], autograph=False)()


def read(shared, variables):
    """Lets the variables have the updates; returns how many there were on each ps."""

    @tf.function(autograph=False)
    def read_all():
        return [shared.read(number, own) for number, own in enumerate(variables)]

    return [int(each) for each in read_all()]


def all_have(variables, value):
    return all(np.all(each.numpy() == value) for own in variables for each in own)


def stored(number):
    return _process._of_worker[int(number)][1]


def places_of(shared):
    """The arrays of the ps, as its process has them."""
    return [place for own in shared._ps for place in _process._of_ps[own.tobytes()]._content.stored]


def variables_of(shared, number):
    """The variables of all ps as a function of a worker has them."""
    shapes = [shape for own in SHAPES for shape in own]
    places = zip(shared.places(number), shapes, strict=True)
    return [
        variable_at(place, shape, partial(shared.write, number, index)) for index, (place, shape) in enumerate(places)
    ]


def given_back(shared, number):
    """Gives a worker's side back, as a function does."""

    @tf.function(autograph=False)
    def give_back():
        return shared.give_back(number, [each.read_value() for each in variables_of(shared, number)])

    return give_back()


def changed(variables, ready):
    """Adds 1 to variables, when some tensors are there; returns what changes them."""
    found = []
    with tf.control_dependencies(ready):
        for number, variable in enumerate(variables):
            if number % 2:
                found.append(variable.assign(variable.read_value() + 1))
            else:
                rate, gradient = tf.constant(-1, variable.dtype), tf.ones(variable.shape, variable.dtype)
                found.append(tf.raw_ops.ResourceApplyGradientDescent(var=variable.handle, alpha=rate, delta=gradient))
    return found


def worked(shared, steps):
    """A worker's function: each step adds 1 to all variables of all ps.

    Returns:
        The counts before the steps and after them, and the last values.
    """

    @tf.function(autograph=False)
    def work():
        number = shared.borrow()
        variables = variables_of(shared, number)
        own = [variables[: len(ARRAYS[0])], variables[len(ARRAYS[0]) :]]
        found, ready, values = [], [], []
        for ps in [*PS] * steps:
            with tf.control_dependencies(ready):
                before = shared.acquire(number, ps, counts=True)
            with tf.control_dependencies(changed(own[ps], [before])):
                numbers, read = shared.release(number, ps)
            ready = [numbers]
            found.append([before, numbers[0]])
            values = [*values[-len(LAYOUT.values[0]) :], *(tf.identity(each) for each in read)] if ps else read
        with tf.control_dependencies([*ready, *values]):
            left = [each.read_value() for each in variables]
        with tf.control_dependencies([shared.give_back(number, left)]):
            return tf.stack(found), [tf.identity(each) for each in values]

    return work


def test_workers_update_the_variables_of_the_ps(shared, variables):
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(shared.wait, number) for number in PS]
        try:
            found, values = worked(shared, 2)()
        finally:
            shared.end()
        assert all(bool(each.result()) for each in waits)
    assert found.numpy().tolist() == [[4, 5], [4, 5], [5, 6], [5, 6]]
    sizes = [array.size for own in LAYOUT.values for array in own]
    assert [each.numpy().tolist() for each in values] == [[3] * size for size in sizes]
    assert all_have(variables, 1)
    assert read(shared, variables) == [6, 6]
    assert [[each.numpy().tolist() for each in own] for own in variables] == [
        [np.full(shape, 3).tolist() for shape in own] for own in SHAPES
    ]


def test_updates_of_workers_at_once_are_all_made(shared, variables):
    work = worked(shared, 5).get_concrete_function()
    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(work) for _ in range(9)]:
            each.result()
    assert read(shared, variables) == [49, 49]
    assert all_have(variables, 46)
    (free,) = _process._free.values()
    assert 1 <= len(free) <= 3


KEPT = tf.fill([3, 5], 7.0)
WAYS = {
    "assign": lambda variable: variable.assign(tf.fill(variable.shape, 7.0)),
    "assign-what-is-kept": lambda variable: variable.assign(KEPT),
    "add": lambda variable: variable.assign_add(7 - variable.read_value()),
    "rows": lambda variable: variable.scatter_update(tf.IndexedSlices(tf.fill([3, 5], 7.0), [0, 1, 2])),
}
"""How a variable may get another value: TensorFlow changes some in their places, if nobody else has them."""


@pytest.mark.parametrize("was_read", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_assigned_to_a_variable_is_published_and_the_others_stay(shared, variables, way, was_read):
    work = worked(shared, 1)
    work()
    if was_read:
        WAYS[way](variables[0][0])
        assert read(shared, variables) == [5, 5]
        work()
    WAYS[way](variables[0][0])
    work()
    publish(shared, variables)
    first, *others = places_of(shared)
    assert set(first.tolist()) == {7}
    assert all(set(each.tolist()) <= {3 + was_read} for each in others)
    work()
    assert read(shared, variables) == [7 + was_read] * 2
    assert set(variables[0][0].numpy().flat) == {8}
    variables[0][0].assign(tf.fill([3, 5], 4.0 + was_read))
    assert all_have(variables, 4 + was_read)


def test_what_was_read_is_not_published_again(shared, variables):
    """Scalars, values of few bits, and those without numbers, too: updates would be lost."""
    work = worked(shared, 1)
    for turn in range(3):
        work()
        publish(shared, variables)
        work()
        assert read(shared, variables) == [6 + 2 * turn] * 2
        assert all_have(variables, 3 + 2 * turn)


def test_a_value_that_was_assigned_in_a_run_is_not_undone_when_variables_are_read(shared, variables):
    work = worked(shared, 1)
    work()
    variables[0][1].assign(7)  # a scalar
    variables[1][0].assign(tf.fill([16], 7.0))
    read(shared, variables)
    assert [set(each.numpy().flat) for own in variables for each in own] == [{2}, {7}, set(), {2}, {7}, {2}, {2}]
    work()
    read(shared, variables)
    assert [set(each.numpy().flat) for own in variables for each in own] == [{3}, {8}, set(), {3}, {8}, {3}, {3}]


def test_what_was_read_from_a_variable_before_stays(shared, variables):
    """A value that is read, or assigned to another variable, is not copied by TensorFlow."""
    work = worked(shared, 1)
    work()
    read(shared, variables)
    values = [each.read_value() for own in variables for each in own]
    others = [tf.Variable(tf.zeros_like(each)) for each in values]
    for other, value in zip(others, values, strict=True):
        other.assign(value)
    work()
    assert all_have([values, others, *variables], 2)
    read(shared, variables)
    work()
    assert all_have([values, others], 2)
    assert all_have(variables, 3)


def test_a_variable_that_changes_does_not_change_the_memory_before_it_is_published(shared, variables):
    worked(shared, 1)()
    read(shared, variables)
    for own in variables:
        for each in own:
            each.assign_add(tf.ones(each.shape, each.dtype))
    assert all(set(each.tolist()) <= {2} for each in places_of(shared))


def test_workers_are_told_to_stop(shared, variables):
    shared.stop()
    number = shared.borrow()
    for ps in PS:
        assert int(shared.acquire(number, ps, counts=False)) == 4
        assert shared.release(number, ps)[0].numpy().tolist() == [4, 1]
    given_back(shared, number)


def test_a_workers_side_that_was_given_back_is_used_again(shared):
    borrowed = [shared.borrow() for _ in range(2)]
    found = [stored(number) for number in borrowed]
    assert found[0] is not found[1]
    given_back(shared, borrowed[1])
    again = shared.borrow()
    assert int(again) not in map(int, borrowed)
    assert stored(again) is found[1]
    for number in (borrowed[0], again):
        given_back(shared, number)


def test_those_of_another_training_are_others(shared):
    given_back(shared, shared.borrow())
    other = SharedParameters(["CPU:0", "CPU:0"], LAYOUT)
    number = other.borrow()
    (free,) = [each for each in _process._free.values() if each]
    assert len(free) == 1
    assert stored(number) not in free
    given_back(other, number)
    other.close()


def test_a_variable_that_has_left_the_memory_is_an_error_and_leaves_nothing_open(shared, variables):
    before = opened()
    number = shared.borrow()
    with pytest.raises(tf.errors.OpError) as raised:
        shared.give_back(number, [tf.identity(each) for own in variables for each in own])
    assert not is_ended(raised.value)
    assert int(number) not in _process._of_worker
    assert not any(_process._free.values())
    del raised
    assert not opened() - before


def test_workers_that_wait_fail_and_ps_return_when_all_are_closed(shared, variables, monkeypatch):
    monkeypatch.setattr(parameters, "_CHECK_SECONDS", 0.01)
    holds, number = shared.borrow(), shared.borrow()
    shared.acquire(holds, 0, counts=True)
    with ThreadPoolExecutor(3) as pool:
        waits = [pool.submit(shared.wait, ps) for ps in PS]
        waiting = pool.submit(shared.acquire, number, 0, counts=True)
        shared.close()
        for each in waits:
            each.result()
        with pytest.raises(tf.errors.UnknownError) as raised:
            waiting.result()
    assert is_ended(raised.value)
    shared.close()  # again
    for ps in PS:
        shared.wait(ps)


@pytest.mark.parametrize("ends", ["end", "close"])
def test_a_wait_that_begins_after_the_end_returns(shared, ends):
    getattr(shared, ends)()
    assert [bool(shared.wait(number)) for number in PS] == [True, True]


def test_what_a_failed_function_had_borrowed_is_dropped_after_the_end(shared, variables):
    before = opened()
    number = shared.borrow()
    shared.acquire(number, 0, counts=True)
    shared.close()
    _process._drop_ended()
    assert not _process._of_worker
    for call in (
        lambda: shared.release(number, 0),  # a function of before that goes on
        lambda: shared.acquire(number, 0, counts=True),
        lambda: shared.places(number),
        lambda: shared.write(number, 0, tf.zeros([15])),
    ):
        with pytest.raises(tf.errors.UnknownError) as raised:
            call()
        assert is_ended(raised.value)
    shared.give_back(number, places_of(shared))
    del raised
    assert not opened() - before


def test_a_function_that_waits_when_another_one_drops_what_has_ended_finds_the_end(shared, variables, monkeypatch):
    holds, number = shared.borrow(), shared.borrow()
    shared.acquire(holds, 0, counts=True)
    waits, lock = threading.Event(), stored(number)._ps[0].lock
    acquire = lock.acquire
    monkeypatch.setattr(parameters, "_CHECK_SECONDS", 0.01)
    monkeypatch.setattr(lock, "acquire", lambda seconds: (waits.set(), acquire(seconds))[1])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(shared.acquire, number, 0, counts=True)
        assert waits.wait(60)
        shared.close()
        _process._drop_ended()
        with pytest.raises(tf.errors.UnknownError) as raised:
            waiting.result()
    assert is_ended(raised.value)


def test_a_worker_that_comes_after_the_end_fails(shared):
    shared.close()
    number = shared.borrow()
    with pytest.raises(tf.errors.UnknownError) as raised:
        shared.places(number)
    assert is_ended(raised.value)


def test_a_closed_ps_is_read_and_what_was_assigned_stays(shared, variables):
    worked(shared, 1)()
    number = shared.borrow()
    shared.acquire(number, 0, counts=True)  # by a function that fails
    shared.close()
    publish(shared, variables)
    variables[0][0].assign(tf.zeros([3, 5]))
    publish(shared, variables)
    assert read(shared, variables) == [6, 5]
    assert [set(each.numpy().flat) for own in variables for each in own] == [{0}, {2}, set(), {2}, {2}, {2}, {2}]


def test_what_has_ended_is_dropped(shared):
    given_back(shared, shared.borrow())
    shared.close()
    _process._drop_ended()
    assert not _process._free
    for _ in range(3):
        other = SharedParameters(["CPU:0"], Layout(LAYOUT.values[:1], LAYOUT.others[:1]))
        assert [each.is_closed for each in _process._of_ps.values()] == [False]
        other.close()


def test_parameters_that_nobody_uses_are_closed_when_others_are_opened(shared):
    unused = SharedParameters(["CPU:0"], Layout(LAYOUT.values[:1], LAYOUT.others[:1]))
    of_ps = _process._of_ps[unused._ps[0].tobytes()]
    del unused
    gc.collect()
    before = of_ps.is_closed
    close_unused()
    assert (before, of_ps.is_closed) == (False, True)
    assert not any(each.is_closed for each in _process._of_ps.values() if each is not of_ps)


def test_variables_keep_their_values_after_the_memory_is_closed(shared, variables):
    worked(shared, 1)()
    read(shared, variables)
    shared.close()
    _process._of_ps.clear()
    gc.collect()
    assert all_have(variables, 2)
