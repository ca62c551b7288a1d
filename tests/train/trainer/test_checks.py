"""Checks of the tasks' agreement before a training."""

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


class Chief:
    """The engine of the chief of two tasks: records what it contributes."""

    is_chief = True

    def __init__(self):
        self.totals = []

    def total(self, values):
        self.totals.append(values * (2 if values.shape == (1,) else 1))
        return self.totals[-1]


class Worker:
    """The engine of the other task."""

    is_chief = False

    def __init__(self, chief):
        self._totals = iter(chief.totals)

    def total(self, values):
        return values + next(self._totals) - values * (values.shape == (1,))


def config(data, validation=None):
    function = as_dataset_function((data, data))
    scored = None if validation is None else Validation(as_dataset_function((validation, validation)))
    return TrainingConfig(function, 5, validation=scored, divided=function)


def check(chiefs, workers):
    chief = Chief()
    check_tasks_have_same_arrays(chiefs, chief)
    check_tasks_have_same_arrays(workers, Worker(chief))


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
