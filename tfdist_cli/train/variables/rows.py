"""Some rows of a variable, read and assigned by TensorFlow's kernels.

`sparse_read` and `scatter_update` do the same, but a variable that a strategy mirrors has neither.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def rows_of(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns some rows of a variable.

    Args:
        variable: TensorFlow's variable, or a shard.
        rows: the numbers of the rows, of any shape.
    """
    return tf.raw_ops.ResourceGather(resource=variable.handle, indices=rows, dtype=variable.dtype)


def assign_rows(variable: Any, rows: tf.Tensor, values: tf.Tensor) -> Any:
    """Assigns values to some rows of a variable, and returns the operation.

    Args:
        variable: TensorFlow's variable, or a shard.
        rows: (n,), the numbers of the rows, each once.
        values: (n, …), their values.
    """
    return tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=rows, updates=values)
