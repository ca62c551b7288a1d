"""Two tasks' arrays are the same if a few rows of them are, whatever they are of."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.comparison import SAMPLES, check_same_arrays, is_same, sample
from tfdist_cli.train.data.inputs import as_dataset_function
from tfdist_cli.train.data.python_data.dataset_function import PythonData

NUMBERS = np.random.default_rng(0)
X = NUMBERS.normal(size=(500, 8)).astype(np.float32)
Y = NUMBERS.integers(0, 10, 500)
ORDER = NUMBERS.permutation(500)


def made(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).shard(2, 0).batch(10)


def compared(first, second):
    return is_same(sample(first), sample(second))


@pytest.mark.parametrize(
    "array",
    [
        X,
        Y,
        X.astype(np.float16),
        X > 0,
        np.array([f"id {number}" for number in range(500)]),
        np.arange(500) * 10**12,
        np.where(np.arange(500) % 3, X[:, 0], np.nan),
        X.reshape(500, 2, 2, 2),
    ],
)
def test_another_order_is_seen(array):
    assert compared(made(array), made(array.copy()))
    assert not compared(made(array), made(array[ORDER]))
    assert not compared(made(array), made(array[:-1]))
    assert not compared(made(array), made(array, array))


def test_an_array_of_several_in_another_order_is_seen():
    assert not compared(made({"a": X, "b": Y}), made({"a": X, "b": Y[ORDER]}))


def test_another_processor_s_rounding_is_no_difference():
    assert compared(made(X), made(X * np.float32(1 + 3e-7)))


def test_what_is_in_no_array_is_not_compared():
    assert compared(tf.data.Dataset.range(3), tf.data.Dataset.range(3).shuffle(3))
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3]]))
    assert sample(ragged).tolist() == [0.0] * (SAMPLES + 2)


@pytest.mark.parametrize("shape", [(0, 3), (5, 0)])
def test_empty_arrays(shape):
    empty = tf.data.Dataset.from_tensor_slices(np.zeros(shape))
    assert compared(empty, empty)


class Sum:
    """The sum over two tasks, each in its thread."""

    def __init__(self):
        self._meeting = threading.Barrier(2)
        self._values = {}

    def __call__(self, task, values):
        self._values[task] = values
        self._meeting.wait(20)
        total = sum(self._values.values())
        self._meeting.wait(20)
        return total


def check(*tasks):
    """Checks both tasks; raises what both raise."""
    total = Sum()
    with ThreadPoolExecutor(2) as pool:
        calls = [
            pool.submit(check_same_arrays, data, partial(total, task), is_chief=task == 0)
            for task, data in enumerate(tasks)
        ]
        errors = [call.exception() for call in calls]
    assert type(errors[0]) is type(errors[1])
    if errors[0]:
        raise errors[0]


def arrays(x, validation=X):
    """The data of a training."""
    return {"training": as_dataset_function((x, x)), "validation": as_dataset_function((validation, validation))}


def test_tasks_with_equal_arrays():
    check(arrays(X), arrays(X.copy()))
    check({"training": None}, {"training": None})


@pytest.mark.parametrize("other", [arrays(X[ORDER]), arrays(X, X[ORDER]), arrays(X[:-1])])
def test_tasks_with_other_arrays(other):
    with raises(TrainingError, "arrays-differ"):
        check(arrays(X), other)


def test_a_single_task_compares_nothing():
    def unread(_):
        raise AssertionError

    check_same_arrays({"training": unread}, lambda values: values, is_chief=True)


def test_what_python_code_reads_is_not_compared():
    data = {"training": PythonData(None)}
    check(data, data)
