"""The graph of a train or test step, traced for analysis and never run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.layers.dynamic_embedding import row_index_of
from tfdist_cli.train.model.trace.additivity import adds_up, dependents, retained
from tfdist_cli.train.model.trace.factors import factors_of
from tfdist_cli.train.model.trace.row_terms import rows_of_examples
from tfdist_cli.train.variables.sharding import parts

if TYPE_CHECKING:
    from tfdist_cli.train.model.train_step import ModelStep, Tensors


class StepTrace:
    """The graph of a step.

    Args:
        step: the model's step, built.
        element_spec: the `tf.TypeSpec`s of a batch.
        training: whether to trace the train step or the test step.

    Attributes:
        operation_count: the number of operations, those of nested functions included.
        assigned: the indices in the state of the variables that the step assigns.
        adds: for each of these, whether the step only adds a value to it that depends on nothing but the batch.
        retained: the part of its old value that remains in each of these, see `additivity.retained`.
        untrained: the indices in the parameters of those without a gradient.
        lookups: the indices in the parameters of those whose gradients have only the rows that the batch looks up, each
            with the number of these; None if it differs from batch to batch.
        repeating: those of them whose rows are values of the batch: an update may look up a row several times.
        factored: the indices in the parameters of those whose gradients have factors, each with the number of rows of
            these, see `factors`.
    """

    def __init__(self, step: ModelStep, element_spec: Any, *, training: bool = True) -> None:
        self.adds: list[bool] = []
        self.retained: list[float] = []
        self.assigned: tuple[int, ...] = ()
        self.untrained: list[int] = []
        self.lookups: dict[int, int | None] = {}
        self.repeating: set[int] = set()
        self.factored: dict[int, int] = {}
        self._before: Tensors = []
        self._after: Tensors = []
        self._others: Tensors = []

        def trace(*flat: tf.Tensor) -> list[Any]:
            parameters, state, metrics = (
                [placeholder_for(variable) for variable in group]
                for group in (step.parameters, step.state, step.metrics)
            )
            batch = tf.nest.pack_sequence_as(element_spec, flat, expand_composites=True)
            result = (step.train if training else step.evaluate)(parameters, state, metrics, batch)
            self._before, self._after, self._others = state, result.state, [*flat, *parameters, *metrics]
            self.assigned = tuple(
                index for index, (old, new) in enumerate(zip(state, result.state, strict=True)) if new is not old
            )
            changed = [[each[index] for index in self.assigned] for each in (state, result.state)]
            self.adds, self.retained = adds_up(*changed), retained(*changed)
            self.untrained = [index for index, gradient in enumerate(result.gradients) if gradient is None]
            self.lookups = {
                index: gradient.values.shape[0]
                for index, gradient in enumerate(result.gradients)
                if isinstance(gradient, tf.IndexedSlices)
            }
            factors = {index: factors_of(gradient) for index, gradient in enumerate(result.gradients)}
            self.factored = {index: int(own[0].shape[0]) for index, own in factors.items() if own}
            self.repeating = {
                index
                for index in self.lookups
                if row_index_of(step.parameters[index]) is not None
                or rows_of_examples(result.gradients[index].indices, flat)
            }
            return [result.loss, *result.state]

        self._function = tf.compat.v1.wrap_function(trace, tf.nest.flatten(element_spec, expand_composites=True))
        graph = self._function.graph
        functions = graph.as_graph_def().library.function
        self.operation_count = len(graph.get_operations()) + sum(len(function.node_def) for function in functions)

    @property
    def graph(self) -> tf.Graph:
        """The graph itself."""
        return self._function.graph

    def reads(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether the step reads any of some variables that are not those of the model."""
        captured = {id(each) for each in self.graph.external_captures}
        stored = [part for variable in variables for part in parts(variable)]
        replicas = [each for part in stored for each in getattr(part, "values", (part,))]
        return any(id(each.handle) in captured for each in replicas)

    def increments(self, state: Sequence[keras.Variable], indices: Sequence[int]) -> list[np.ndarray]:
        """See `ModelStep.increments`."""
        others = [old for index, old in enumerate(self._before) if index not in indices]
        varying = dependents([*self._others, *others])
        for index in indices:
            if self._after[index].op.name in varying:
                raise TrainingError(
                    f"the number of random values drawn from {state[index].path!r} depends on the batch",
                    code="draws-depend-on-batch",
                    hint="draw the same number of values in each step, and use some of them",
                )
        counters = [self._before[index] for index in indices]
        added = self._function.prune(counters, [tf.cast(self._after[index], tf.int64) for index in indices])
        return [counts.numpy() for counts in added(*(tf.zeros(each.shape, each.dtype) for each in counters))]


def placeholder_for(variable: keras.Variable) -> tf.Tensor:
    """Returns a placeholder that stands for a variable's value in a graph that is never run."""
    return tf.compat.v1.placeholder(variable.dtype, variable.shape)
