"""Random numbers that no two workers share and that a resumed run draws again the same.

Keras keeps a counter per `SeedGenerator` in a variable. Asynchronous workers would read the same count and drop the
same units; so a step's counts are computed instead: step `s` of replica `r` among `n` starts where Keras's own counter
would stand after `s * n + r` steps. With one replica these are the very numbers that `keras.Model.fit` draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.train.step import ModelStep, Tensors, values


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

    def begin(self, step: int) -> None:
        """Takes the counters as they stand now for those of global step `step`."""
        self._starts = [value.numpy() for value in values(self._variables)]
        self._first_step = step

    def put(self, state: Tensors, step: tf.Tensor | int, replica: tf.Tensor | int = 0) -> Tensors:
        """The state with its counters set for a replica's step; everything else as it was."""
        position = (tf.cast(step, tf.int64) - self._first_step) * self._replicas + tf.cast(replica, tf.int64)
        state = list(state)
        for place, start, draws in zip(self._positions, self._starts, self._draws, strict=True):
            state[place] = tf.constant(start) + tf.cast(position * draws, start.dtype)
        return state

    def settle(self, step: int) -> None:
        """Writes the counters of global step `step` into their variables, where a checkpoint finds them."""
        position = (step - self._first_step) * self._replicas
        for variable, start, draws in zip(self._variables, self._starts, self._draws, strict=True):
            variable.value.assign(start + (position * draws).astype(start.dtype))

    def without(self, places: Sequence[int]) -> tuple[int, ...]:
        """Of some places in the state those that are no counter's."""
        return tuple(place for place in places if place not in self._positions)


def _states(model: keras.Model) -> list[keras.Variable]:
    return [generator.state for layer in model._flatten_layers() for generator in layer._seed_generators]
