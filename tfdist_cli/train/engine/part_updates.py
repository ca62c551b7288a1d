"""Updates that workers of one host make themselves, in memory that they share: each updates a part of all values.

See `cluster/shared_memory/lockstep` for the memory. It needs an optimizer that updates each value by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.lockstep import words
from tfdist_cli.train.cluster.shared_memory.lockstep.factors import Factors
from tfdist_cli.train.cluster.shared_memory.lockstep.step_operations import Places, Steps
from tfdist_cli.train.model.trace.factors import factors_of
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.optimizers.apply import StoredParameter, is_elementwise, stored_parameters
from tfdist_cli.train.tf_compat.variables import flat_variable_at

_LEAST_BYTES = 1 << 12
"""Bytes of the smallest part: less than this is not worth to be divided."""


def suits(step: ModelStep, element_spec: Any) -> bool:
    """Whether workers can divide the updates of a training: one function updates all values.

    Args:
        step: the model's step, built; its parameters are not sharded.
        element_spec: the `tf.TypeSpec`s of a batch.
    """
    if not words.supported() or not is_elementwise(step.optimizer, step.parameters):
        return False
    if not step.trains_all(element_spec) or step.reads_optimizers(element_spec):
        return False  # only updates use the variables of the optimizer
    stored = stored_parameters(step.optimizer, step.parameters)
    variables = [variable for each in stored for variable in (*each.shards, *(own for (own,) in each.slots))]
    shaped = all(own.shape == each.shards[0].shape for each in stored for (own,) in each.slots)
    return shaped and {each.dtype for each in variables} in ({tf.float32}, {tf.float64})


def are_worth_it(bytes_of_parameters: int, workers: int) -> bool:
    """Whether the parameters in a memory are so large that workers divide their update."""
    return bytes_of_parameters >= _LEAST_BYTES * workers


class PartUpdates:
    """The parameters in shared memory, and the parts of them that workers update.

    Args:
        step: the model's step.
        element_spec: the `tf.TypeSpec`s of a batch.
        stored: the parameters, with their slots.
        own: the numbers of the parameters in each memory.
        workers: how many there are.

    Attributes:
        arrays: the parameters in each memory.
        factors: those of gradients that take their place, by the numbers of the memory and of the parameter there.
        slots: how many slots a parameter has.
    """

    def __init__(
        self,
        step: ModelStep,
        element_spec: Any,
        stored: Sequence[StoredParameter],
        own: Sequence[Sequence[int]],
        workers: int,
    ) -> None:
        self._stored, self._own = stored, own
        self.arrays = [[array_of(stored[number].shards[0]) for number in each] for each in own]
        self.slots = len(stored[0].slots)
        self.factors: dict[tuple[int, int], Factors] = {}
        self._with_factors: list[int] = []
        examples = step.factored(element_spec)
        for memory, numbers in enumerate(own):
            for place, number in enumerate(numbers):
                if number in examples:
                    shard = stored[number].shards[0]
                    rows, columns = shard.shape
                    factors = Factors(examples[number], rows, columns, workers, shard.dtype.size)
                    if factors.suit:
                        self.factors[memory, place] = factors
                        self._with_factors.append(number)

    def parts(self, steps: Steps, number: tf.Tensor, places: Sequence[Places]) -> list[StoredParameter]:
        """Returns the parts of a worker of the parameters in each memory: the kernel updates each like a parameter.

        Args:
            steps: the operations.
            number: of the worker, see `Steps.join`.
            places: see `Steps.places`.
        """
        found = []
        for memory, own in enumerate(places):
            variable = self._stored[self._own[memory][0]].variable
            for part, copies in enumerate(own.parts):
                begin = part * len(copies)
                flat, *slots = [
                    flat_variable_at(place, partial(steps.write, number, memory, begin + index))
                    for index, place in enumerate(copies)
                ]
                found.append(StoredParameter(variable, [flat], [[slot] for slot in slots]))
        return found

    def values(self, places: Sequence[Places]) -> Tensors:
        """Returns the parameters where they are, in the order of the model's."""
        found: dict[int, tf.Tensor] = {}
        for own, numbers in zip(places, self._own, strict=True):
            found |= dict(zip(numbers, own.parameters, strict=True))
        return [tf.reshape(found[number], each.shards[0].shape) for number, each in enumerate(self._stored)]

    def summed(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the parameters; None for those that are sent as factors."""
        return [None if number in self._with_factors else each for number, each in enumerate(gradients)]

    def sent(self, gradients: Sequence[Any], summed: Sequence[Any]) -> Tensors:
        """Returns what a worker sends of its gradients, see `WorkerSteps.commit`.

        Args:
            gradients: of the parameters.
            summed: what `summed` has returned, as tensors.
        """
        numbers = [number for own in self._own for number in own]
        return [summed[number] for number in numbers if number not in self._with_factors] + [
            factor for number in self._with_factors for factor in factors_of(gradients[number]) or ()
        ]


def array_of(variable: Any) -> Array:
    """Returns the array of a variable's values."""
    return Array(np.dtype(variable.dtype.as_numpy_dtype), int(np.prod(variable.shape)))
