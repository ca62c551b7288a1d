"""Exact metrics: each execution counts from the initial state, and the chief sums the counts of all executions.

If two asynchronous workers updated the same metric variable, counts would be lost. So an execution carries the values
of metric variables as tensors that start from the metric's initial state. The differences are summed here in float64,
which is exact for counts below 2**53.

A `train_step` of the model's own may return numbers that do not follow from metrics. As in Keras, those of the last
step are reported: the mean over the workers whose batches make it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.own_step.logs import flat_logs
from tfdist_cli.train.model.train_step import ModelStep, Tensors
from tfdist_cli.train.variables.sharding import assign, parts


class MetricTotals:
    """The totals of all metric variables over executions.

    Args:
        step: the model's step, built.
        training: whether the totals are of train steps or of test steps.

    Attributes:
        size: how many numbers `pack` returns.
        summed: how many of them, the first ones, are added up; the others are replaced by those of the last step.

    Raises:
        TrainingError: a metric variable has another aggregation than `sum`.
    """

    def __init__(self, step: ModelStep, *, training: bool = True) -> None:
        self._model, self._step, self._training = step.model, step, training
        self._of_batch = step.logs_of_batch
        self._variables = step.metrics
        for variable in self._variables:
            if variable.aggregation != "sum":
                raise TrainingError(
                    f"the metric variable {variable.path!r} has aggregation {variable.aggregation!r}, so the values of "
                    "several workers cannot be added",
                    code="metric-not-a-sum",
                    hint="create it with add_weight() or add_variable(aggregation='sum'), and compute the metric from "
                    "sums",
                )
        with keras.StatelessScope() as scope:
            self._model.reset_metrics()
        starts = [scope.get_current_value(variable) for variable in self._variables]
        self.initial: list[np.ndarray] = [
            np.array(keras.ops.convert_to_numpy(variable.value if start is None else start))  # constants are not reset
            for variable, start in zip(self._variables, starts, strict=True)
        ]
        self._sizes = [array.size for array in self.initial]
        self._kept = np.repeat(np.array([start is None for start in starts], bool), np.array(self._sizes, int))
        """Which numbers `reset` keeps: those of variables that the metric's `reset_state` leaves as they are."""
        self.summed = sum(self._sizes)
        self.size = self.summed + (1 + len(self._of_batch) if self._of_batch else 0)
        self._sums = np.zeros(self.size, np.float64)

    def reset(self) -> None:
        """Sets the totals to 0 that the metrics reset at the start of an epoch."""
        before = self._sums[: self.summed]
        self._sums = np.zeros(self.size, np.float64)
        self._sums[: self.summed] = np.where(self._kept, before, 0.0)

    def add(self, counted: np.ndarray) -> None:
        """Adds the counts of an execution.

        Args:
            counted: the result of `pack`, float64, shape (size,).
        """
        self._sums = self.following(self._sums, counted)

    def following(self, before: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """Returns what some steps and the next ones have counted together, each float64 of shape (size,).

        Args:
            before: the counts of some steps; 0 before the first one.
            counted: those of the next ones; 0 if they have only reported gradients that were dropped.
        """
        if not np.ndim(counted):
            return np.asarray(before)
        before = np.broadcast_to(before, counted.shape)  # 0.0 before the first step
        last = counted if counted[-1:].any() else before  # the number of batches; 0 if no step was taken
        return np.concatenate([before[: self.summed] + counted[: self.summed], last[self.summed :]])

    def packed(self) -> list[float]:
        """Returns the totals as a list, for `add` after a restart."""
        return list(self._sums.tolist())

    def initial_values(self) -> Tensors:
        """Returns the values from which an execution counts."""
        return [tf.constant(array) for array in self.initial]

    def pack(self, values: Tensors, logs: Tensors | None = None) -> tf.Tensor:
        """Returns how much an execution added to all metric variables, float64, shape (size,).

        Args:
            values: the metric variables' values after the execution.
            logs: the logs of its last batch, see `StepResult.logs`; None for test steps.
        """
        counted = [
            tf.reshape(tf.cast(value, tf.float64) - array.astype(np.float64), [-1])
            for value, array in zip(values, self.initial, strict=True)
        ]
        if self._of_batch:
            last = [tf.cast(log, tf.float64) for log in [*logs, 1.0]] if logs else [0.0] * (self.size - self.summed)
            counted.append(tf.stack([tf.cast(each, tf.float64) for each in last]))
        return tf.concat(counted, axis=0) if counted else tf.zeros([0], tf.float64)

    def write(self) -> None:
        """Assigns the totals to the metric variables, where callbacks and programs read them, but no step does.

        Call it within the strategy's scope.
        """
        if len(self.initial) > 1 and isinstance(tf.distribute.get_strategy(), tf.distribute.ParameterServerStrategy):
            _assign_all(self._step, np.concatenate([value.reshape(-1).astype(np.float64) for value in self._values()]))
            return
        for variable, value in zip(self._variables, self._values(), strict=True):
            _assign(variable, value)

    def _values(self) -> list[np.ndarray]:
        """Returns the metric variables' values after all executions."""
        parts = np.split(self._sums[: self.summed], np.cumsum(self._sizes)[:-1]) if self._sizes else []
        return [
            (part.reshape(array.shape) + array).astype(array.dtype)
            for part, array in zip(parts, self.initial, strict=True)
        ]

    def logs(self) -> dict[str, Any]:
        """Returns the result of each metric under Keras's name, the loss first: a float, or an array."""
        totals = [tf.constant(value) for value in self._values()]
        with keras.StatelessScope(state_mapping=list(zip(self._variables, totals, strict=True))):
            # Read within the scope: a metric may return one of its variables.
            flat_results = flat_logs(self._model.get_metrics_result())
            results = {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in flat_results.items()}
        if self._training and self._of_batch:
            *sums, batches = self._sums[self.summed :]
            results |= {
                name: np.asarray(total / batches) for name, total in zip(self._of_batch, sums, strict=True) if batches
            }
        if (names := self._step.log_names.get(self._training)) is not None:
            results = {name: results[name] for name in names if name in results}
        flat = {name: value if value.ndim else float(value) for name, value in results.items()}
        return {"loss": flat.pop("loss"), **flat} if "loss" in flat else flat


_assignments: WeakKeyDictionary[ModelStep, tuple[list[keras.Variable], Callable[[tf.Tensor], object]]] = (
    WeakKeyDictionary()
)
"""Of the metric variables of each step, a function of all values."""


def _assign_all(step: ModelStep, values: np.ndarray) -> None:
    """Assigns all values, float64, to the metric variables, which are on ps.

    Outside of a function, each assignment is a request to a ps, and so is each value for it.
    """
    variables, assign_all = _assignments.get(step, ([], None))
    if assign_all is None or list(map(id, variables)) != list(map(id, step.metrics)):
        assign_all = _assignment(step.metrics, len(values))
        _assignments[step] = list(step.metrics), assign_all
    assign_all(tf.constant(values))


def _assignment(variables: Sequence[keras.Variable], size: int) -> Callable[[tf.Tensor], object]:
    def assign_all(values: tf.Tensor) -> None:
        end = 0
        for variable in variables:
            begin, end = end, end + math.prod(variable.shape)
            with tf.device(parts(variable)[0].device):
                assign(variable, tf.cast(tf.reshape(values[begin:end], variable.shape), variable.dtype))

    return tf.function(assign_all, autograph=False).get_concrete_function(tf.TensorSpec([size], tf.float64))


def _assign(variable: keras.Variable, value: np.ndarray) -> None:
    """Assigns the value of a metric variable, which TensorFlow may sum over the replicas of this task."""
    shards = parts(variable)
    if len(shards) > 1:
        assign(variable, value)
        return
    copies = [shards[0]]
    if shards[0].synchronization is tf.VariableSynchronization.ON_READ:
        copies = tf.distribute.get_strategy().experimental_local_results(shards[0])
    copies[0].assign(value)
    for copy in copies[1:]:
        copy.assign(np.zeros_like(value))
