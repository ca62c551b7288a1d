"""How far each worker has opened its data, so that one that is started again takes each step with the batch it is for.

The chief opens the data of such a worker after the steps that it knows of. Some more may be done by then. So a worker
keeps the number of the step whose batch its iterator yields next, and skips batches before its first step of a run.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.tf_compat.control_flow import after

_SHARED_NAME = "tfdist-data-position"


@tf.function(autograph=False)
def set_position(step: tf.Tensor) -> None:
    """Notes on a worker the step whose batch its iterator yields next.

    Args:
        step: int64, shape ().
    """
    tf.raw_ops.AssignVariableOp(resource=_position(), value=step)


def skip_to(iterator: Any, step: tf.Tensor, wanted: tf.Tensor) -> tf.Tensor:
    """Skips the batches of the steps before a step, in a worker's function.

    Args:
        iterator: the worker's.
        step: int64, shape ().
        wanted: whether to do so: otherwise no position is known. bool, shape ().

    Returns:
        What the first batch is read after.
    """

    def skipped() -> tf.Tensor:
        position = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=_position(), dtype=tf.int64), [])
        (reached,) = tf.while_loop(lambda number: number < step, skip, [position], parallel_iterations=1)
        return reached

    def skip(number: tf.Tensor) -> list[tf.Tensor]:
        return [after(number + 1, tf.nest.flatten(next_batch(iterator), expand_composites=True))]

    return tf.cond(wanted, skipped, lambda: step)


def advance_to(step: tf.Tensor, wanted: tf.Tensor) -> None:
    """Notes at the end of a worker's function which step comes next.

    Args:
        step: int64, shape ().
        wanted: whether the function has taken steps, and to do so. bool, shape ().
    """

    def advanced() -> tf.Tensor:
        with tf.control_dependencies([tf.raw_ops.AssignVariableOp(resource=_position(), value=step)]):
            return tf.identity(step)

    tf.cond(wanted, advanced, lambda: step)


def _position() -> tf.Tensor:
    return tf.raw_ops.VarHandleOp(dtype=tf.int64, shape=[], shared_name=_SHARED_NAME)
