"""Applying gradients with the model's own optimizer, so that each update counts exactly once.

Keras counts `iterations` by reading, adding and writing back, which loses counts when workers update at the same time.
Here the count is one atomic addition. Its result is the update's own number, which the optimizer's formulas and its
learning-rate schedule then see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.kernels import fused


def apply(optimizer: keras.optimizers.Optimizer, gradients: list[Any], parameters: list[keras.Variable]) -> None:
    """Updates the parameters where they live.

    Args:
        optimizer: built for the parameters. One that scales the loss (`mixed_float16`) takes back its scale, and leaves
            an update out whose gradients are not finite.
        gradients: one per parameter; None where there is none.
        parameters: the variables to update.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        present = [tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None]
        finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in present])
        tf.cond(
            finite,
            lambda: _take_scaled(optimizer, gradients, parameters),
            lambda: _lower_scale(optimizer),
        )
        return
    number = optimizer._iterations.value.assign_add(1, read_value=True) - 1
    read = {"_iterations": _Read(number)}
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        read["_learning_rate"] = _Read(tf.convert_to_tensor(rate.value))  # once, not once for each parameter
    # Keras updates variables from within a replica only. There is one; strategy.run would trace it in a thread of its
    # own, which the scope doesn't reach.
    replica = tf.distribute.ReplicaContext(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
    with _in_place_of(optimizer, read), fused(optimizer), replica:
        optimizer.apply(gradients, parameters)


class _Read(keras.Variable):
    """A variable that has been read: formulas see the value, and what they write is counted elsewhere."""

    def __init__(self, value: tf.Tensor) -> None:  # Keras's own would create storage
        self._read, self._autocast = value, False
        self._dtype, self._shape, self._ndim = value.dtype.name, value.shape, value.shape.rank

    @property
    def value(self) -> tf.Tensor:
        return self._read

    def assign(self, _value: Any) -> None:
        """Leaves the count alone."""

    assign_add = assign_sub = assign


@contextlib.contextmanager
def _in_place_of(optimizer: keras.optimizers.Optimizer, read: dict[str, _Read]) -> Iterator[None]:
    kept = {name: vars(optimizer)[name] for name in read}
    vars(optimizer).update(read)  # setattr would make them the optimizer's own variables
    try:
        yield
    finally:
        vars(optimizer).update(kept)


def leave_sums_to_engine(optimizer: keras.optimizers.Optimizer) -> None:
    """Keeps Keras from summing gradients over replicas: engines hand it gradients that are summed already."""
    innermost(optimizer)._all_reduce_sum_gradients = lambda pairs: pairs


def innermost(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """The optimizer that updates; `mixed_float16` wraps it in one that scales the loss."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _take_scaled(
    optimizer: keras.optimizers.LossScaleOptimizer, gradients: list[Any], parameters: list[keras.Variable]
) -> tf.Tensor:
    scale = tf.convert_to_tensor(optimizer.dynamic_scale.value)
    plain = [None if gradient is None else gradient / tf.cast(scale, gradient.dtype) for gradient in gradients]
    apply(optimizer.inner_optimizer, plain, parameters)
    steps = tf.convert_to_tensor(optimizer.step_counter.value.assign_add(1, read_value=True))
    grown = steps >= optimizer.dynamic_growth_steps
    optimizer.dynamic_scale.value.assign(tf.where(grown, scale * 2.0, scale))
    optimizer.step_counter.value.assign(tf.where(grown, tf.zeros_like(steps), steps))
    return tf.constant(True)


def _lower_scale(optimizer: keras.optimizers.LossScaleOptimizer) -> tf.Tensor:
    optimizer.dynamic_scale.value.assign(tf.convert_to_tensor(optimizer.dynamic_scale.value) * 0.5)
    optimizer.step_counter.value.assign(0)
    return tf.constant(False)
