"""Shared memory has the values of variables in a run, and the variables have copies of them."""

import gc
from contextlib import contextmanager

import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory import stored
from tfdist_cli.train.cluster.shared_memory.memory import ALIGNED
from tfdist_cli.train.cluster.shared_memory.stored import (
    StoredValues,
    aligned_bytes,
    close_unused,
    close_with,
    flat,
    is_at,
    values_of,
)


@pytest.fixture
def places():
    return [np.zeros(6, np.float32), np.zeros(1, np.int64), np.zeros(0, np.float32)]


def variables_of(value):
    return [np.full([2, 3], value, np.float32), np.full([], value, np.int64), np.zeros([0, 4], np.float32)]


def values(places):
    return [set(each.reshape(-1).tolist()) for each in places]


def test_values_that_were_assigned_are_written_and_the_others_are_not_again(places):
    own, variables = StoredValues(places), variables_of(3)
    own.write(variables)
    assert values(places) == [{3}, {3}, set()]
    for each in places:
        each.fill(5)
    own.write(variables)
    assert values(places) == [{5}, {5}, set()]
    assigned = variables_of(7)
    own.write([variables[0], assigned[1], variables[2]])
    assert values(places) == [{5}, {7}, set()]


def test_what_is_read_are_copies_that_tensorflow_uses_where_they_are(places):
    own = StoredValues(places)
    own.write(variables := variables_of(3))
    for each in places:
        each.fill(5)
    copies = own.read(variables)
    assert values(copies) == [{5}, {5}, set()]
    assert [(each.dtype, each.shape) for each in copies] == [(each.dtype, each.shape) for each in places]
    assert all(each.ctypes.data % ALIGNED == 0 for each in copies if each.size)
    for each in places:
        each.fill(6)
    assert values(copies) == [{5}, {5}, set()]
    own.write(copies)  # the variables have them now
    assert values(places) == [{6}, {6}, set()]
    own.write(variables)  # they were assigned again
    assert values(places) == [{3}, {3}, set()]


def test_a_value_that_was_assigned_meanwhile_is_read(places):
    own = StoredValues(places)
    own.write(variables := variables_of(3))
    for each in places:
        each.fill(5)
    assert values(own.read([variables_of(8)[0], *variables[1:]])) == [{8}, {5}, set()]
    assert values(places) == [{8}, {5}, set()]


def test_nobody_changes_values_while_they_are_written_or_read(places):
    held, seen = [], []

    @contextmanager
    def hold():
        held.append(values(places)[0])
        yield
        held.append(values(places)[0])

    own = StoredValues(places, hold)
    own.write(variables := variables_of(3))
    assert held == [{0}, {3}]
    own.write(variables)
    assert len(held) == 2  # nothing was assigned
    own.read(variables, lambda: seen.append(len(held)))
    assert (seen, len(held)) == ([3], 4)


def test_a_value_is_where_it_begins():
    numbers = np.arange(6.0)
    assert is_at(numbers, numbers)
    assert is_at(numbers.reshape([2, 3]), numbers)
    assert not is_at(numbers[1:], numbers)
    assert not is_at(numbers.copy(), numbers)
    assert is_at(np.zeros([0]), numbers)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 1000])
def test_bytes_begin_where_tensorflow_uses_them(size):
    found = aligned_bytes(size)
    assert (found.shape, found.dtype) == ((size,), np.uint8)
    assert found.ctypes.data % ALIGNED == 0 or not size


def address(tensor):
    return np.asarray(memoryview(tensor)).ctypes.data


def test_variables_are_read_where_they_are():
    variable = tf.Variable(tf.ones([4, 8]))
    variable.scatter_update(tf.IndexedSlices(tf.fill([1, 8], 3.0), [1]))
    copies = [variable.read_value() for _ in range(2)]
    assert address(copies[0]) != address(copies[1])  # TensorFlow copies such a variable at each read
    first, second = (values_of([variable])[0] for _ in range(2))
    assert address(first) == address(second)
    assert first.shape == (32,)
    assert set(first.numpy()) == {1, 3}


def test_a_tensor_of_any_shape_is_flat():
    assert [flat(tf.zeros(shape)).shape for shape in ([], [2, 3], [0, 2], [4])] == [(1,), (6,), (0,), (4,)]


class User:
    pass


@pytest.fixture
def known(monkeypatch):
    found = []
    monkeypatch.setattr(stored, "_opened", found)
    return found


def test_what_nobody_uses_is_closed_once_and_the_rest_stays(known):
    closed, first, second = [], User(), User()
    close_with(first, lambda: closed.append(1))
    close_with(second, lambda: closed.append(2))
    close_unused()
    assert not closed
    del first
    gc.collect()
    assert not closed  # a finalizer may run in any thread
    close_unused()
    close_unused()
    assert closed == [1]
    del second
    gc.collect()
    close_unused()
    assert closed == [1, 2]
    assert not known


def test_what_cannot_be_closed_is_not_closed_again(known):
    calls = []

    def fail():
        calls.append(1)
        raise OSError

    user = User()
    close_with(user, fail)
    del user
    gc.collect()
    with pytest.raises(OSError):  # noqa: PT011 the one of above
        close_unused()
    close_unused()
    assert calls == [1]
