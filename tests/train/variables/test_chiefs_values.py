"""Tests of what tasks copy from the chief. The tasks are threads, whose sums cross in this process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist_cli.train.variables.chiefs_values import copy_from_chief, differing

TYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "uint32", "uint64", "complex64", "bool"]


class Sums:
    """Sums of tensors over some threads, and how many elements have crossed."""

    def __init__(self, tasks):
        self.elements = 0
        self._given, self._barrier = [None] * tasks, threading.Barrier(tasks, timeout=60)

    def of(self, task):
        def total(value):
            self._given[task] = value
            self._barrier.wait()
            summed = tf.add_n(self._given)
            self._barrier.wait()
            self.elements += int(tf.size(value)) if task == 0 else 0
            return summed

        return total


def copied(tasks):
    """Runs the tasks, each of which has a list of variables; returns the places of what was copied, and the sums."""
    sums = Sums(len(tasks))

    def run(task):
        variables, own = tasks[task], sums.of(task)
        found = differing(variables, own, is_chief=task == 0)
        copy_from_chief(found, own, nullcontext, is_chief=task == 0)
        return [next(n for n, each in enumerate(variables) if each is one) for one in found]

    with ThreadPoolExecutor(len(tasks)) as pool:
        places = list(pool.map(run, range(len(tasks))))
    assert all(own == places[0] for own in places)
    return places[0], sums


@pytest.mark.parametrize("dtype", TYPES)
def test_variables_that_differ_on_a_task_get_the_chiefs_values(dtype):
    values = [np.arange(6).reshape(2, 3) % 2, np.array(1), np.zeros([0, 3]), np.ones(4)]
    tasks = [[keras.Variable(value, dtype=dtype, trainable=False) for value in values] for _ in range(3)]
    tasks[1][0].assign(1 - values[0])
    tasks[2][3].assign(np.array([1, 1, 0, 1]))
    places, _ = copied(tasks)
    assert places == [0, 3]
    for own in tasks:
        for variable, value in zip(own, values, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.value).astype(complex), value)


def test_of_equal_variables_only_fingerprints_cross():
    tasks = [[keras.Variable(np.ones([100, 100])), keras.Variable(np.float32(np.nan))] for _ in range(2)]
    places, sums = copied(tasks)
    assert (places, sums.elements) == ([], 2 * 2)


def test_no_variables_need_no_messages():
    assert copied([[], []])[1].elements == 0


def test_large_numbers_and_the_last_bit_are_copied():
    chief = np.array([3.1e38, -0.0, np.inf, np.nextafter(np.float32(1), np.float32(2))], np.float32)
    tasks = [[keras.Variable(chief)], [keras.Variable(np.array([3.1e38, 0.0, np.inf, 1.0], np.float32))]]
    assert copied(tasks)[0] == [0]
    np.testing.assert_array_equal(tasks[1][0].numpy(), chief)
