"""Sums the gradients of the same row, which a batch may look up several times.

`tf.math.unsorted_segment_sum` has a cost for each lookup that exceeds that of its additions. The product of a sparse
matrix of ones and the gradients is the same sum, in the same order. TensorFlow computes it in a plain loop if rows have
less than 32 values. So wider rows are summed as several of 16 values.

Processor time for 3,300 lookups of 2,250 rows, in µs, by the width of rows:

| | 4 | 16 | 32 | 64 | 128 |
|---|---|---|---|---|---|
| segments | 89 | 128 | 199 | 311 | 555 |
| product | 62 | 59 | 133 | 204 | 357 |
| segments, sums and squares | 167 | 262 | 402 | 631 | 1160 |
| product, sums and squares | 80 | 82 | 175 | 298 | 543 |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

NARROW = 31
"""The largest width that the kernel's loop takes."""
LEAST = 2048
"""The lookups from which a product pays: its operations have a cost of their own. A two-tower model with 512 lookups in
a table needed 1.02 times the processor time with it (4 rounds), a wide & deep one with 3,328 on each ps 0.97 (3)."""
PART = 16
"""The width in which wider rows are summed, if it divides theirs."""


def row_sums(values: Sequence[tf.Tensor], rows: tf.Tensor, count: int | tf.Tensor) -> list[tf.Tensor]:
    """Returns the sum of each row, for some values of the same lookups.

    Args:
        values: tensors of one type and one shape, (lookups, …). If the trace does not know the number of lookups,
            segments are summed.
        rows: the row of each lookup, from 0 to `count` - 1, shape (lookups,).
        count: the number of rows.

    Returns:
        The sums, shape (count, …); 0 for a row without lookups.
    """
    width = _width(values[0])
    part = width if width <= NARROW else PART
    # One number in a row takes less time by segments. GPUs have no kernel whose order of additions is fixed.
    narrow = values[0].dtype in (tf.float32, tf.float64) and width > 1 and width % part == 0
    many = (values[0].shape[0] or rows.shape[0] or 0) >= LEAST
    if not (narrow and many) or tf.config.list_logical_devices("GPU"):
        return [tf.math.unsorted_segment_sum(each, rows, count) for each in values]
    parts = width // part
    if parts > 1:
        rows = tf.reshape(rows[:, None] * parts + tf.range(parts, dtype=rows.dtype), [-1])
    lookups = tf.size(rows)
    indices = tf.stack([rows, tf.range(lookups, dtype=rows.dtype)], axis=1)
    ones = tf.ones(tf.shape(rows), values[0].dtype)
    shape = tf.cast(tf.stack([count * parts, lookups]), tf.int64)
    products = [
        tf.raw_ops.SparseTensorDenseMatMul(
            a_indices=indices, a_values=ones, a_shape=shape, b=tf.reshape(each, [-1, part])
        )
        for each in values
    ]
    return [tf.reshape(each, [-1, *values[0].shape[1:]]) for each in products]


def _width(values: tf.Tensor) -> int:
    """The numbers in a row; 0 if they are not known, or none."""
    known = values.shape.rank is not None and values.shape[1:].is_fully_defined()
    return int(np.prod(values.shape[1:].as_list())) if known else 0
