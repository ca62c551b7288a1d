"""The logs that a `train_step` or `test_step` of the model's own returns, and which of them are results of metrics.

Keras reports the results of the metrics if the logs have the same names, and otherwise the logs of the last step. Logs
that follow from metrics are computed from what all workers have counted. Other logs are numbers of one batch, and are
reported as the mean of the workers' last batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.model.assignments import Assignments
from tfdist_cli.train.model.trace.additivity import dependents


@dataclass(frozen=True)
class StepLogs:
    """The logs of a step.

    Args:
        names: the names to report, in their order.
        of_batch: those that do not follow from metrics: numbers of the batch, shape ().
        loss: what is reported of a step by itself, shape (): the log `loss`, or the first one.
    """

    names: list[str]
    of_batch: dict[str, tf.Tensor]
    loss: tf.Tensor


def step_logs(model: keras.Model, logs: Any, scope: Assignments, *, training: bool) -> StepLogs:
    """Returns the logs of a step.

    Args:
        model: the model.
        logs: what the step has returned.
        scope: the scope of the step, entered.
        training: whether it is a `train_step`.

    Raises:
        TrainingError: the logs are not numbers by name, or one of them follows from a metric, and has another name.
    """
    method = "train_step" if training else "test_step"
    if not isinstance(logs, dict):
        raise TrainingError(
            f"{method}() of {type(model).__name__} returns {type(logs).__name__}, not a dictionary of logs",
            code="logs-not-exact",
            hint="return {name: value}, for example self.get_metrics_result()",
        )
    logs, results = flat_logs(logs), flat_logs(model.get_metrics_result())
    if logs.keys() == results.keys():
        return StepLogs(list(results), {}, _of_step(model, scope, {}, list(results)))
    counted = set() if tf.executing_eagerly() else dependents(scope.metrics_before)
    of_batch = {}
    for name, value in logs.items():
        tensor = tf.convert_to_tensor(value)
        follows = tf.is_symbolic_tensor(tensor) and tensor.op.name in counted
        if follows and name in results:
            continue
        if follows or tensor.shape.rank != 0 or not training:
            raise TrainingError(
                f"{method}() of {type(model).__name__} returns {name!r}, which is no result of a metric of this name",
                code="logs-not-exact",
                hint="give the metric this name, and return its result(); a train_step may also return scalars of the "
                "batch that do not depend on a metric",
            )
        of_batch[name] = tf.cast(tf.stop_gradient(tensor), tf.float32)
    return StepLogs(list(logs), of_batch, _of_step(model, scope, of_batch, list(logs)))


def flat_logs(logs: dict[str, Any]) -> dict[str, Any]:
    """Returns logs without the dictionaries in them, as Keras reports them."""
    flat: dict[str, Any] = {}
    for name, value in logs.items():
        flat |= flat_logs(value) if isinstance(value, dict) else {name: value}
    return flat


def _of_step(
    model: keras.Model,
    scope: Assignments,
    of_batch: dict[str, tf.Tensor],
    names: list[str],
) -> tf.Tensor:
    """Returns the value of the first log, or of `loss`, that a metric would have after this step alone."""
    if not names:
        return tf.zeros([])
    name = "loss" if "loss" in names else names[0]
    if name in of_batch:
        return of_batch[name]
    variables = model.metrics_variables
    added = [new - old for new, old in zip(scope.current(variables), scope.metrics_before, strict=True)]
    with keras.StatelessScope(state_mapping=list(zip(variables, added, strict=True))):
        value = tf.convert_to_tensor(flat_logs(model.get_metrics_result())[name])
    return tf.cast(tf.reduce_mean(value), tf.float32)
