"""Exact metrics: counted from nothing in each execution, summed on the chief, never shared between tasks that write.

A metric variable that two asynchronous workers read, add to and write back loses counts. So a metric's variables are
carried through an execution as values that start from the metric's initial state; what each execution counted is added
up here in float64, which is exact for every count below 2**53.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.train_step import ModelStep, Tensors


class MetricTotals:
    """The sum of what executions have counted.

    Args:
        step: the model's pure functions, built.

    Raises:
        TrainingError: a metric keeps a state that cannot be summed.
    """

    def __init__(self, step: ModelStep) -> None:
        self._model = step.model
        self._variables = step.metrics
        for variable in self._variables:
            if variable.aggregation != "sum":
                raise TrainingError(
                    f"the metric variable {variable.path!r} has aggregation {variable.aggregation!r}, so counts of "
                    "several workers cannot be added up",
                    hint="make it with add_weight() or add_variable(aggregation='sum'), and the metric from sums",
                )
        with keras.StatelessScope() as scope:
            self._model.reset_metrics()
        starts = [scope.get_current_value(variable) for variable in self._variables]
        self.initial: list[np.ndarray] = [
            np.zeros(variable.shape, variable.dtype) if start is None else np.asarray(start)
            for variable, start in zip(self._variables, starts, strict=True)
        ]
        self._sizes = [array.size for array in self.initial]
        self.size = sum(self._sizes)
        self.reset()

    def reset(self) -> None:
        """Starts from nothing."""
        self._sums = np.zeros(self.size, np.float64)

    def add(self, counted: np.ndarray) -> None:
        """Adds what an execution counted, as `pack` packs it."""
        self._sums += counted

    def packed(self) -> list[float]:
        """What has been counted, for another `add`."""
        return list(self._sums.tolist())

    def start(self) -> Tensors:
        """The values an execution starts from."""
        return [tf.constant(array) for array in self.initial]

    def pack(self, values: Tensors) -> tf.Tensor:
        """What an execution counted, as float64 of shape (size,)."""
        if not values:
            return tf.zeros([0], tf.float64)
        counted = [
            tf.reshape(tf.cast(value, tf.float64) - array.astype(np.float64), [-1])
            for value, array in zip(values, self.initial, strict=True)
        ]
        return tf.concat(counted, axis=0)

    def logs(self) -> dict[str, Any]:
        """Each metric's result, as Keras names them, the loss first: a float, or an array where it has several."""
        parts = np.split(self._sums, np.cumsum(self._sizes)[:-1]) if self._sizes else []
        totals = [
            tf.constant((part.reshape(array.shape) + array).astype(array.dtype))
            for part, array in zip(parts, self.initial, strict=True)
        ]
        with keras.StatelessScope(state_mapping=list(zip(self._variables, totals, strict=True))):
            # Read in here: a metric may return one of its variables.
            pairs = _flatten(self._model.get_metrics_result())
            results = {name: np.asarray(keras.ops.convert_to_numpy(value)) for name, value in pairs}
        flat = {name: value if value.ndim else float(value) for name, value in results.items()}
        return {"loss": flat.pop("loss"), **flat} if "loss" in flat else flat


def _flatten(results: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs = []
    for name, value in results.items():
        pairs += _flatten(value) if isinstance(value, dict) else [(name, value)]
    return pairs
