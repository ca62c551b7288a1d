"""Marks of the rows of a table that have changed, for checkpoints that hold only these.

A row is marked after it was written. Whoever takes the marks clears them before it reads the rows. So a row that is
written meanwhile, by a worker that was held up for example, is read with its new value, or is marked again.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_cli.train.tf_compat.functions import function_kept_whole

MARK = "uint8"
"""The type of a mark: 1 for a changed row. On GPUs TensorFlow writes single elements of uint8, but none of bool."""


def keep_marks(shard: Any, marks: Any) -> None:
    """Has writers of a variable's rows mark them.

    Args:
        shard: TensorFlow's variable: a shard of a table, of one of its slots or of its index.
        marks: a variable of type `MARK` on the same device, an element for each row, in any shape of two dimensions.
    """
    shard.tfdist_marks = marks


def marks_of(shard: Any) -> Any:
    """Returns the marks of the rows of a variable; None if they are not kept."""
    return getattr(shard, "tfdist_marks", None)


def marked(shard: Any, rows: tf.Tensor, written: Any) -> Any:
    """Marks rows that were written, if the changes of the variable are recorded.

    Args:
        shard: TensorFlow's variable.
        rows: the numbers of the rows in it, shape (n,).
        written: the operation that writes them; None if it has run.

    Returns:
        The operation that ends last.
    """
    marks = marks_of(shard)
    if marks is None:
        return written
    width = int(marks.shape[1])
    places, marking = tf.stack([rows // width, rows % width], axis=1), tf.ones_like(rows, MARK)
    with tf.control_dependencies([written] if written is not None else []):
        return tf.raw_ops.ResourceScatterNdUpdate(ref=marks.handle, indices=places, updates=marking)


def mark_all(marks: Any) -> None:
    """Marks all rows."""
    marks.assign(tf.ones(marks.shape, MARK))


def take_marks(marks: Any) -> tf.Tensor:
    """Returns the numbers of the marked rows, int32, ascending, shape (n,), on their device; and clears their marks."""
    with tf.device(marks.device):
        return _taken(marks)


@function_kept_whole
def _taken(marks: Any) -> tf.Tensor:
    """Takes marks on the device that has them: only there can single ones be cleared."""
    places = tf.where(tf.convert_to_tensor(marks))
    cleared = tf.zeros(tf.shape(places)[:1], MARK)
    tf.raw_ops.ResourceScatterNdUpdate(ref=marks.handle, indices=places, updates=cleared)
    return tf.cast(places[:, 0] * int(marks.shape[1]) + places[:, 1], tf.int32)
