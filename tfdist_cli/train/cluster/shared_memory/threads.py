"""How many threads a task has for an operation, which others ask for in functions."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.data import call_registered, register_python
from tfdist_cli.train.tf_compat.functions import has_one_thread

_ONE_THREAD = "threads_one"


def register() -> None:
    """Lets this task answer."""
    register_python(_ONE_THREAD, lambda _: np.array(has_one_thread()))


def one_thread() -> tf.Tensor:
    """Whether the task on which this is called has a single thread for an operation, and no GPU; bool, shape ()."""
    return tf.reshape(call_registered(_ONE_THREAD, [tf.constant(0)], [tf.bool])[0], [])
