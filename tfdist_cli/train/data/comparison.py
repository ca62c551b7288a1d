"""Whether two tasks have the same arrays in memory: a few rows of each task's are compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.tf_compat.data import sliced_arrays

SAMPLES = 64
"""Rows that are compared, at equal distances."""
_TOLERANCE = 1e-5
"""What processors of different kinds may compute differently, as a part of the value."""


def check_same_arrays(
    data: Mapping[str, DatasetFunction | None], total: Callable[[np.ndarray], np.ndarray], *, is_chief: bool
) -> None:
    """Checks that tasks that divide arrays in memory have the same ones: each makes its own, and takes its shard.

    All of them call it. What is read from files or by Python code is not compared.

    Args:
        data: data by what it is for.
        total: returns the sum of float64 values over the tasks.
        is_chief: whether this task is the chief.

    Raises:
        TrainingError: a task's arrays differ from the chief's.
    """
    tasks = int(total(np.ones(1))[0])
    if tasks == 1:
        return
    for name, function in data.items():
        if function is None or isinstance(function, PythonData):
            continue
        own = sample(checked(function, Shard(count=tasks)))
        differs = not is_same(own, total(own * is_chief))
        if total(np.array([differs], np.float64))[0]:
            raise TrainingError(
                f"the tasks have different {name}: in another order, or made of other numbers, so their shards are not "
                "parts of the same data",
                code="arrays-differ",
                hint="give what draws it a seed: keras.utils.set_random_seed(1) before it is made, or "
                "train_test_split(..., random_state=1); data that each task is to have for itself needs share='copy'",
            )


def sample(dataset: tf.data.Dataset) -> np.ndarray:
    """Returns what is compared of a dataset: its numbers of arrays and rows, and the means of some rows.

    Args:
        dataset: any one; what it reads from files is no part of it.

    Returns:
        float64 of shape (`SAMPLES` + 2,); of each row the sum over all arrays, with another weight for each.
    """
    arrays = sliced_arrays(dataset)
    values = np.zeros(SAMPLES)
    for number, array in enumerate(arrays, 1):
        values += number * _row_means(array)
    return np.concatenate([[len(arrays), sum(len(array) for array in arrays)], values])


def is_same(sampled: np.ndarray, other: np.ndarray) -> bool:
    """Whether two samples are those of the same arrays."""
    return bool(np.allclose(sampled, other, rtol=_TOLERANCE, atol=_TOLERANCE * float(np.abs(sampled[2:]).mean())))


def _row_means(array: tf.Tensor) -> np.ndarray:
    """Returns the mean of each compared row; of texts, that of their checksums; 0 for what is not finite."""
    if not len(array):
        return np.zeros(SAMPLES)
    places = np.linspace(0, len(array) - 1, SAMPLES).astype(np.int64)
    rows: Any = tf.gather(array, places).numpy().reshape(SAMPLES, -1)
    if rows.dtype == object:
        rows = np.vectorize(zlib.crc32, otypes=[np.float64])(rows)
    return np.nan_to_num(rows.astype(np.float64), posinf=0, neginf=0).mean(axis=1) if rows.size else np.zeros(SAMPLES)
