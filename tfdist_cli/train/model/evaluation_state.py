"""State that layers assign while a model is scored, which stays assigned, as in Keras.

Workers score different batches side by side. What a batch adds to a variable is added up over all of them. What is
more than a sum over batches, a moving average for instance, changes by the mean over the batches. The counters of
random numbers move by the number of batches that were scored, each of which has drawn its own.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.rng import Seeds
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.variables.sharding import assign


class ScoredState:
    """What scoring changes of a model's state.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch that is scored.
        seeds: the model's counters of random numbers.
    """

    def __init__(self, step: ModelStep, element_spec: Any, seeds: Seeds) -> None:
        self._seeds = seeds
        adds = step.state_assigned_in_evaluation(element_spec)
        self._places = seeds.without(tuple(adds))
        self._adds = [adds[place] for place in self._places]
        self._variables = [step.state[place] for place in self._places]
        self._sizes = [int(np.prod(variable.shape)) for variable in self._variables]
        self.size = sum(self._sizes) + 1
        """How many numbers `pack` gives."""

    def own(self, state: Tensors) -> Tensors:
        """Of a model's state what scoring assigns, but for the seeds."""
        pairs = zip(self._places, self._variables, strict=True)
        return [tf.ensure_shape(state[place], variable.shape) for place, variable in pairs]

    def put(self, state: Tensors, own: Tensors, number: tf.Tensor, shard: tf.Tensor) -> Tensors:
        """The state that a batch is scored with.

        Args:
            state: what it was when scoring began.
            own: what scoring has made of it since.
            number: how many batches the worker has scored, int64, shape ().
            shard: the worker's index and how many there are, int64, shape (2,).
        """
        state = self._seeds.put_scored(state, number * shard[1] + shard[0])
        for place, value in zip(self._places, own, strict=True):
            state[place] = value
        return state

    def pack(self, before: Tensors, own: Tensors, batches: tf.Tensor) -> tf.Tensor:
        """What some batches have changed, float64, shape (size,): such tensors of all workers are added up."""
        count = tf.cast(batches, tf.float64)
        changed = [
            tf.reshape(tf.cast(new, tf.float64) - tf.cast(old, tf.float64), [-1]) * (1.0 if adds else count)
            for old, new, adds in zip(self.own(before), own, self._adds, strict=True)
        ]
        return tf.concat([*changed, count[None]], axis=0)

    def apply(self, packed: np.ndarray) -> None:
        """Changes the variables by what was packed; within the strategy's scope."""
        *changes, (batches,) = np.split(packed, np.cumsum(self._sizes))
        if not batches:
            return
        self._seeds.scored(int(batches))
        for variable, change, adds in zip(self._variables, changes, self._adds, strict=True):
            value = np.asarray(variable.numpy(), np.float64) + np.reshape(change, variable.shape) / (
                1.0 if adds else batches
            )
            assign(variable, value if tf.as_dtype(variable.dtype).is_floating else np.rint(value))
