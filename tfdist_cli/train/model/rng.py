"""Random numbers that no two workers share and that a resumed run draws again the same.

Keras keeps a counter per `SeedGenerator` in a variable. Asynchronous workers would read the same count and drop the
same units; so a step's counts are computed instead: step `s` of replica `r` among `n` starts where Keras's own counter
would stand after `s * n + r` steps. With one replica these are the very numbers that `keras.Model.fit` draws.

Scoring draws too, in layers that do so whether they train or not. While steps are under way, the variable of such a
counter holds where it would have begun; of all others that is known when a step is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.train_step import ModelStep, Tensors, values
from tfdist_cli.train.tf_compat.keras_model import layers_of, seed_generators


class Seeds:
    """The seed counters of a model.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        replicas: how many replicas take each step together.
    """

    def __init__(self, step: ModelStep, element_spec: Any, replicas: int = 1) -> None:
        generators = {id(state) for state in _states(step.model)}
        self._variables = [variable for variable in step.state if id(variable) in generators]
        self._positions = [n for n, variable in enumerate(step.state) if id(variable) in generators]
        self._replicas = replicas
        self._starts = [value.numpy() for value in values(self._variables)]
        self._first_step = 0
        self._draws = step.increments(element_spec, self._positions)
        self._draws_scored = step.increments(element_spec, self._positions, training=False)

    def begin(self, step: int) -> None:
        """Takes the counters as they stand now for those of global step `step`."""
        self._starts = [value.numpy() for value in values(self._variables)]
        self._first_step = step

    def put(self, state: Tensors, step: tf.Tensor | int, replica: tf.Tensor | int = 0) -> Tensors:
        """The state with its counters set for a replica's step; everything else as it was."""
        position = (tf.cast(step, tf.int64) - self._first_step) * self._replicas + tf.cast(replica, tf.int64)
        state = list(state)
        known = zip(self._positions, self._variables, self._starts, self._draws, self._draws_scored, strict=True)
        for place, variable, start, draws, scored in known:
            begun = values([variable])[0] if np.any(scored) else tf.constant(start)
            state[place] = begun + tf.cast(position * draws, start.dtype)
        return state

    def put_scored(self, state: Tensors, number: tf.Tensor) -> Tensors:
        """The state with its counters set for a batch to score, which so many others come before."""
        state = list(state)
        for place, draws in zip(self._positions, self._draws_scored, strict=True):
            state[place] += tf.cast(number * draws, state[place].dtype)
        return state

    def scored(self, batches: int) -> None:
        """Moves the counters on by what some batches have drawn that were scored."""
        for place, (variable, draws) in enumerate(zip(self._variables, self._draws_scored, strict=True)):
            moved = (batches * draws).astype(variable.dtype)
            self._starts[place] = self._starts[place] + moved
            if np.any(moved):
                variable.value.assign(values([variable])[0] + moved)

    def go_on(self) -> None:
        """Writes into its variable where a counter began that scoring moves: steps read it there."""
        for variable, start, scored in zip(self._variables, self._starts, self._draws_scored, strict=True):
            if np.any(scored):
                variable.value.assign(start)

    def settle(self, step: int) -> None:
        """Writes the counters of global step `step` into their variables, where a checkpoint finds them."""
        position = (step - self._first_step) * self._replicas
        for variable, start, draws in zip(self._variables, self._starts, self._draws, strict=True):
            variable.value.assign(start + (position * draws).astype(start.dtype))

    def without(self, places: Sequence[int]) -> tuple[int, ...]:
        """Of some places in the state those that are no counter's."""
        return tuple(place for place in places if place not in self._positions)


def _states(model: keras.Model) -> list[keras.Variable]:
    return [generator.state for layer in layers_of(model) for generator in seed_generators(layer)]
