"""Seed counters: each step of each replica draws other random values, and a resumed run draws the same ones again.

Keras's `SeedGenerator` keeps a counter in a variable. Asynchronous workers would read the same count, so they would
drop the same units. Instead, the count is computed from the step: step `s` of replica `r` of `n` starts where Keras's
counter would be after `s * n + r` steps. With one replica, the values are those that `keras.Model.fit` draws.

Where the counters start is an argument of the functions that take steps: another training by the same functions starts
elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.model.rng.unseeded import draws_between, state_after
from tfdist_cli.train.model.train_step import ModelStep, Tensors, values
from tfdist_cli.train.tf_compat.keras_model import layers_of, process_wide_seeds, seed_generators


class SeedCounters:
    """The seed counters of a model.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        replicas: the number of replicas that run each step together.

    Attributes:
        passed_over: how many numbers of steps were given out, but not used: the numbers of later steps are higher.
        replicas: the number of replicas.
    """

    def __init__(self, step: ModelStep, element_spec: Any, replicas: int = 1) -> None:
        step.plan_updates(element_spec)  # which finds draws without a seed
        self._unseeded = step.unseeded
        drawn = [self._unseeded.generator.state] if self._unseeded.generator else []
        generators = {id(state) for state in [*_states(step.model), *drawn]}
        self._variables = [variable for variable in step.state if id(variable) in generators]
        self._indices = [index for index, variable in enumerate(step.state) if id(variable) in generators]
        self.replicas, self._ahead = replicas, 0
        """The second one: by how many steps of one replica the counters are ahead of a training that always had so
        many."""
        self._starts = [value.numpy() for value in values(self._variables)]
        self._first_step = self.passed_over = 0
        self._draws = self._per_step(step.increments(element_spec, self._indices))
        self._evaluation_draws = self._per_step(step.increments(element_spec, self._indices, training=False))

    def start_at(self, step: int) -> None:
        """Takes the current values of the variables as the counters of a step.

        Args:
            step: the global step.
        """
        self._starts = [value.numpy() for value in values(self._variables)]
        self._first_step, self.passed_over, self._ahead = step, 0, 0

    def resize(self, step: int, replicas: int) -> None:
        """Changes the number of replicas from a step on, which begins where the one before has ended.

        Args:
            step: the global step.
            replicas: the number of replicas.
        """
        before, self.replicas = self.replicas, replicas
        self._ahead += (step + self.passed_over - self._first_step) * (before - replicas)

    def numbers(self, step: int) -> list[int]:
        """Returns the number of a step and where its counters start: an argument, int64, of functions that take steps.

        Args:
            step: the number.
        """
        starts = [int(number) for start in self._starts for number in start.ravel()]
        return [step, self.replicas, self._ahead - self._first_step * self.replicas, *starts]

    def state_for_step(self, state: Tensors, numbers: tf.Tensor, replica: tf.Tensor | int = 0) -> Tensors:
        """Returns the state with its counters set for a step.

        Args:
            state: the values of the model's state.
            numbers: `numbers` of the step.
            replica: the replica's index.
        """
        state = list(state)
        if not self._indices:
            return state
        steps = numbers[0] * numbers[1] + numbers[2] + tf.cast(replica, tf.int64)
        starts = tf.split(numbers[3:], [start.size for start in self._starts])
        for index, variable, start, draws in zip(self._indices, self._variables, starts, self._draws, strict=True):
            first = tf.cast(tf.reshape(start, variable.shape), variable.dtype)
            state[index] = self._later(variable, first, steps * draws)
        return state

    def state_for_evaluation(self, state: Tensors, number: tf.Tensor) -> Tensors:
        """Returns the state with its counters set for a batch of an evaluation.

        Args:
            state: the values of the model's state at the start of the evaluation.
            number: the number of batches evaluated before, int64, shape ().
        """
        state = list(state)
        for index, variable, draws in zip(self._indices, self._variables, self._evaluation_draws, strict=True):
            state[index] = self._later(variable, state[index], number * draws)
        return state

    def advance(self, batches: int) -> None:
        """Advances the counters by the draws of an evaluation.

        Args:
            batches: the number of evaluated batches.
        """
        for n, (variable, draws) in enumerate(zip(self._variables, self._evaluation_draws, strict=True)):
            if np.any(batches * draws):
                self._starts[n] = np.asarray(self._later(variable, tf.constant(self._starts[n]), batches * draws))
                variable.value.assign(self._later(variable, values([variable])[0], batches * draws))

    def snapshot(self) -> Callable[[], None]:
        """Returns a function that undoes what `advance` does from now on."""
        starts, counters = list(self._starts), [value.numpy() for value in values(self._variables)]

        def restore() -> None:
            self._starts = starts
            for variable, value in zip(self._variables, counters, strict=True):
                variable.value.assign(value)

        return restore

    def write(self, step: int) -> None:
        """Assigns the counters of a step to their variables, for checkpoints and for Keras.

        Args:
            step: the global step.
        """
        steps = (step + self.passed_over - self._first_step) * self.replicas + self._ahead
        for variable, start, draws in zip(self._variables, self._starts, self._draws, strict=True):
            variable.value.assign(self._later(variable, tf.constant(start), steps * draws))
        if self._unseeded.generator:
            process_wide_seeds().state.assign(keras.ops.convert_to_numpy(self._unseeded.generator.state))

    def _per_step(self, increments: Sequence[np.ndarray]) -> list[np.ndarray]:
        """What a step adds to each counter; for draws without a seed, their number."""
        return [
            np.array(draws_between(np.zeros_like(added), added)) if self._is_unseeded(variable) else added
            for variable, added in zip(self._variables, increments, strict=True)
        ]

    def _is_unseeded(self, variable: keras.Variable) -> bool:
        generator = self._unseeded.generator
        return generator is not None and variable is generator.state

    def _later(self, variable: keras.Variable, count: tf.Tensor, draws: Any) -> tf.Tensor:
        """Returns a counter after some draws from it."""
        if self._is_unseeded(variable):
            return state_after(count, tf.cast(draws, tf.int64))
        return count + tf.cast(draws, count.dtype)

    def exclude(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Returns those of some indices in the state that are not of seed counters."""
        return tuple(index for index in indices if index not in self._indices)


def numbers_after(numbers: tf.Tensor, steps: tf.Tensor | int) -> tf.Tensor:
    """Returns `SeedCounters.numbers` of a later step.

    Args:
        numbers: those of a step.
        steps: how many steps later.
    """
    return numbers + tf.one_hot(0, numbers.shape[0], dtype=tf.int64) * tf.cast(steps, tf.int64)


def _states(model: keras.Model) -> list[keras.Variable]:
    return [generator.state for layer in layers_of(model) for generator in seed_generators(layer)]
