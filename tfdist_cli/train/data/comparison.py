"""Whether two tasks have the same arrays in memory: a few rows of each task's are compared."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.data import sliced_arrays

SAMPLES = 64
"""Rows that are compared, at equal distances."""
_TOLERANCE = 1e-5
"""What processors of different kinds may compute differently, as a part of the value."""


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
