"""A training step as a graph that is never run, to see what it consists of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.additivity import adds_up

if TYPE_CHECKING:
    from tfdist_cli.train.model.train_step import ModelStep, Tensors


class StepTrace:
    """The graph of a step.

    Args:
        step: the model's pure functions, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        training: whether the step trains, or only scores.

    Attributes:
        operations: how many there are.
        assigned: the places in the state of the variables that it assigns.
        adds: for each of these whether the step adds to it what follows from its batch alone.
        untrained: the places among the parameters of those that get no gradient.
    """

    def __init__(self, step: ModelStep, element_spec: Any, *, training: bool = True) -> None:
        self.adds: list[bool] = []
        self.assigned: tuple[int, ...] = ()
        self.untrained: list[int] = []
        self._before: Tensors = []
        self._after: Tensors = []
        self._others: Tensors = []

        def traced(*flat: tf.Tensor) -> list[Any]:
            parameters, state, metrics = (
                [unknown(variable) for variable in group] for group in (step.parameters, step.state, step.metrics)
            )
            batch = tf.nest.pack_sequence_as(element_spec, flat, expand_composites=True)
            result = (step.train if training else step.evaluate)(parameters, state, metrics, batch)
            self._before, self._after, self._others = state, result.state, [*flat, *parameters, *metrics]
            self.assigned = tuple(
                n for n, (old, new) in enumerate(zip(state, result.state, strict=True)) if new is not old
            )
            self.adds = adds_up(*([each[place] for place in self.assigned] for each in (state, result.state)))
            self.untrained = [place for place, gradient in enumerate(result.gradients) if gradient is None]
            return [result.loss, *result.state]

        self._function = tf.compat.v1.wrap_function(traced, tf.nest.flatten(element_spec, expand_composites=True))
        graph = self._function.graph
        functions = graph.as_graph_def().library.function
        self.operations = len(graph.get_operations()) + sum(len(function.node_def) for function in functions)

    def increments(self, state: Sequence[keras.Variable], places: Sequence[int]) -> list[np.ndarray]:
        """See `ModelStep.increments`."""
        graph = self._function.graph
        unsure = reached_from([*self._others, *(old for n, old in enumerate(self._before) if n not in places)], graph)
        for place in places:
            if self._after[place].op.name in unsure:
                raise TrainingError(
                    f"how many random numbers a step draws by {state[place].path!r} depends on its batch",
                    hint="draw the same number in each step, and use some of them",
                )
        counters = [self._before[place] for place in places]
        moved = self._function.prune(counters, [tf.cast(self._after[place], tf.int64) for place in places])
        return [counts.numpy() for counts in moved(*(tf.zeros(each.shape, each.dtype) for each in counters))]


def unknown(variable: keras.Variable) -> tf.Tensor:
    """A variable's value in a graph that is never run."""
    return tf.compat.v1.placeholder(variable.dtype, variable.shape)


def reached_from(tensors: Sequence[tf.Tensor], graph: tf.Graph) -> set[str]:
    """The names of the operations whose result may depend on any of `tensors`."""
    reached = {tensor.op.name for tensor in tensors if tensor.graph is graph}
    for operation in graph.get_operations():  # in the order they were made: inputs come first
        if any(tensor.op.name in reached for tensor in operation.inputs):
            reached.add(operation.name)
    return reached
