"""State variables that layers assign during evaluation. As in Keras, they keep the new values.

Workers evaluate different batches in parallel. If a step only adds to a variable, the terms of all batches are summed.
Any other variable, for example a moving average, changes by the mean over all batches. The counters of seed generators
advance by the number of evaluated batches, each of which draws its own random values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.variables.sharding import assign


class EvaluationState:
    """The part of a model's state that evaluation changes.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch of the evaluation.
        seeds: the model's seed counters.
    """

    def __init__(self, step: ModelStep, element_spec: Any, seeds: SeedCounters) -> None:
        self._seeds = seeds
        adds = step.state_assigned_in_evaluation(element_spec)
        self._indices = seeds.exclude(tuple(adds))
        self._adds = [adds[index] for index in self._indices]
        self._variables = [step.state[index] for index in self._indices]
        own = {id(variable) for variable in step.recurrent_state} if seeds.replicas > 1 else set()
        self._own = [id(variable) in own for variable in self._variables]
        """Which of them are the states of recurrent layers: each replica has its own."""
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self.size = sum(self._sizes) + 1
        """The size of the result of `pack`."""

    def select(self, state: Tensors) -> Tensors:
        """Returns the values that evaluation changes, without the seed counters.

        Args:
            state: the values of the model's state.
        """
        pairs = zip(self._indices, self._variables, strict=True)
        return [tf.ensure_shape(state[index], variable.shape) for index, variable in pairs]

    def insert(self, state: Tensors, own: Tensors, number: tf.Tensor, shard: tf.Tensor) -> Tensors:
        """Returns the state with which a batch is evaluated.

        Args:
            state: the state at the start of the evaluation.
            own: the current values of what `select` returns.
            number: the number of batches that the worker has evaluated, int64, shape ().
            shard: the worker's index and the number of workers, int64, shape (2,).
        """
        state = self._seeds.state_for_evaluation(state, number * shard[1] + shard[0])
        for index, value in zip(self._indices, own, strict=True):
            state[index] = value
        return state

    def pack(self, before: Tensors, own: Tensors, batches: tf.Tensor) -> tf.Tensor:
        """Returns the changes by some batches, float64, shape (size,). The sum over all workers is passed to `apply`.

        Args:
            before: the state at the start of the evaluation.
            own: the current values of what `select` returns.
            batches: the number of batches, int64, shape ().
        """
        count = tf.cast(batches, tf.float64)
        changed = [
            tf.reshape(tf.cast(new, tf.float64) - tf.cast(old, tf.float64), [-1]) * (1.0 if adds else count)
            for old, new, adds in zip(self.select(before), own, self._adds, strict=True)
        ]
        return tf.concat([*changed, count[None]], axis=0)

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that undoes what `apply` does from now on. Call both within the strategy's scope."""
        before = [np.asarray(variable.numpy()) for variable in self._variables]
        restore_seeds = self._seeds.snapshot()

        def restore() -> None:
            restore_seeds()
            for variable, value in zip(self._variables, before, strict=True):
                assign(variable, value)

        return restore

    def apply(self, packed: np.ndarray, own: np.ndarray | None = None) -> None:
        """Applies the changes to the variables. Call it within the strategy's scope.

        Args:
            packed: the sum of `pack` over all workers.
            own: that of this worker; None if it is the sum.
        """
        *changes, (batches,) = np.split(packed, np.cumsum(self._sizes))
        if not batches:
            return
        *own_changes, (own_batches,) = np.split(packed if own is None else own, np.cumsum(self._sizes))
        self._seeds.advance(int(batches))
        for n, (variable, adds) in enumerate(zip(self._variables, self._adds, strict=True)):
            change, count = (own_changes[n], max(1.0, own_batches)) if self._own[n] else (changes[n], batches)
            value = np.asarray(variable.numpy(), np.float64) + np.reshape(change, variable.shape) / (
                1.0 if adds else count
            )
            assign(variable, value if tf.as_dtype(variable.dtype).is_floating else np.rint(value))
