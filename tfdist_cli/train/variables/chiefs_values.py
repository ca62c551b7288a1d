"""Copies the chief's values to the variables of the other tasks that run the same program.

A program may load its weights on one task alone, and callbacks run on the chief alone. Most tasks have equal values, so
only the fingerprints of all variables cross, and the values of those that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.variables.initial_values import carrier_of, converted

Sums = Callable[[tf.Tensor], tf.Tensor]
"""Sums a tensor over all tasks, which have to call it together."""


def differing(variables: Sequence[keras.Variable], sums: Sums, *, is_chief: bool) -> list[keras.Variable]:
    """Returns the variables of which a task has other values than the chief. All tasks have to call it.

    Values are compared by 64-bit fingerprints of their bytes (`tf.raw_ops.Fingerprint`, farmhash64).

    Args:
        variables: the same ones on all tasks.
        sums: sums int64 tensors.
        is_chief: whether this task is the chief.

    Returns:
        The same ones on all tasks.
    """
    if not variables:
        return []
    own = tf.stack([_fingerprint(tf.convert_to_tensor(variable.value)) for variable in variables])
    chiefs = sums(own if is_chief else tf.zeros_like(own))
    tasks = np.asarray(sums(tf.cast(own != chiefs, tf.int64)))
    return [variable for variable, number in zip(variables, tasks, strict=True) if number]


def copy_from_chief(
    variables: Sequence[keras.Variable],
    sums: Sums,
    scope: Callable[[], AbstractContextManager[Any]],
    *,
    is_chief: bool,
) -> None:
    """Copies the chief's values to every task. All tasks have to call it.

    Args:
        variables: the same ones on all tasks.
        sums: sums tensors of int64, and of the floating types that TensorFlow's collectives have.
        scope: the strategy's.
        is_chief: whether this task is the chief.
    """
    for name in dict.fromkeys(variable.dtype for variable in variables):
        group = [variable for variable in variables if variable.dtype == name]
        dtype = tf.as_dtype(name)
        carrier = (dtype.is_floating and carrier_of(dtype)) or tf.int64
        read = [tf.convert_to_tensor(variable.value) for variable in group]
        flat = tf.concat([tf.reshape(converted(value, carrier), [-1]) for value in read], axis=0)
        copied = sums(flat if is_chief else tf.zeros_like(flat))
        parts = tf.split(copied, [int(np.prod(variable.shape)) for variable in group])
        with scope():
            for variable, part in zip(group, parts, strict=True):
                variable.value.assign(converted(tf.reshape(part, variable.shape), dtype))


def _fingerprint(value: tf.Tensor) -> tf.Tensor:
    """The fingerprint of a tensor's bytes, int64, shape ()."""
    return tf.bitcast(tf.raw_ops.Fingerprint(data=tf.reshape(value, [1, -1]), method="farmhash64")[0], tf.int64)
