"""Checks of the tasks' agreement before a training."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.support.codes import raises
from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.pipeline import as_dataset_function
from tfdist_cli.train.trainer.checks import check_tasks_have_same_arrays
from tfdist_cli.train.trainer.config import TrainingConfig, Validation

X = np.arange(200, dtype=np.float32)
OTHER = X[::-1].copy()


class Engines:
    """Two tasks, each in its thread."""

    def __init__(self):
        self._meeting = threading.Barrier(2)
        self._values = {}

    def of(self, *, chief):
        return SimpleNamespace(is_chief=chief, total=partial(self._total, chief))

    def _total(self, chief, values):
        self._values[chief] = values
        self._meeting.wait(20)
        total = self._values[True] + self._values[False]
        self._meeting.wait(20)
        return total


def config(data, validation=None):
    function = as_dataset_function((data, data))
    scored = None if validation is None else Validation(as_dataset_function((validation, validation)))
    return TrainingConfig(function, 5, validation=scored, divided=function)


def check(chiefs, workers):
    """Checks both tasks; raises what both raise."""
    engines = Engines()
    with ThreadPoolExecutor(2) as pool:
        tasks = [
            pool.submit(check_tasks_have_same_arrays, chiefs, engines.of(chief=True)),
            pool.submit(check_tasks_have_same_arrays, workers, engines.of(chief=False)),
        ]
        errors = [task.exception() for task in tasks]
    assert type(errors[0]) is type(errors[1])
    if errors[0]:
        raise errors[0]


def test_equal_arrays():
    check(config(X), config(X.copy()))
    check(config(X, OTHER), config(X, OTHER))


@pytest.mark.parametrize("workers", [config(OTHER, X), config(X, OTHER), config(X[:-1], X)])
def test_another_order_or_other_examples(workers):
    with raises(TrainingError, "arrays-differ"):
        check(config(X, X), workers)


def test_arrays_that_each_task_has_for_itself():
    check(TrainingConfig(None, 5), TrainingConfig(None, 5))


def test_a_single_task_compares_nothing():
    def unread(_):
        raise AssertionError

    alone = SimpleNamespace(is_chief=True, total=lambda values: values)
    check_tasks_have_same_arrays(TrainingConfig(unread, 5, divided=unread), alone)


def numbers(size):
    return lambda _: tf.data.Dataset.range(size)


def test_files_are_not_compared():
    check(TrainingConfig(None, 5, divided=numbers(3)), TrainingConfig(None, 5, divided=numbers(4)))
