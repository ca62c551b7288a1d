"""Scoring a model on data: the same function for every engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_cli.train.metrics import MetricTotals
from tfdist_cli.train.step import Given, ModelStep, Tensors, values

Reading = Callable[[Any], tuple[Tensors, Given]]
"""A batch → the parameters to score it with, and how the model is given them."""


def evaluation_function(
    step: ModelStep, totals: MetricTotals, read: Callable[[], Reading] | None = None, *, each_batch: bool = False
) -> Any:
    """A function of (iterator, limit) that scores batches until the iterator ends or `limit` are done.

    A limit below 0 is none. It returns what was counted, as `MetricTotals.pack` packs it.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        read: called once in the function; None reads all parameters at its begin.
        each_batch: whether to return what had been counted after each batch, shape (batches, size).
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor) -> tf.Tensor:
        parameters_for, state = (read or _read_once(step))(), values(step.state)

        def follows(optional: Any, *_: Any) -> tf.Tensor:
            return optional.has_value()

        def score(optional: Any, done: tf.Tensor, metrics: Any, *history: Any) -> list[Any]:
            batch = optional.get_value()
            parameters, given = parameters_for(batch)
            metrics = step.evaluate(parameters, state, list(metrics), batch, given).metrics
            history = tuple(kept.write(tf.cast(done, tf.int32), totals.pack(metrics)) for kept in history)
            done += 1
            more = tf.logical_or(limit < 0, done < limit)
            following = tf.cond(
                more, iterator.get_next_as_optional, lambda: tf.experimental.Optional.empty(iterator.element_spec)
            )
            return [following, done, metrics, *history]

        first = tf.cond(
            tf.equal(limit, 0),
            lambda: tf.experimental.Optional.empty(iterator.element_spec),
            iterator.get_next_as_optional,
        )
        start = [first, tf.zeros([], tf.int64), totals.start()]
        if each_batch:
            start.append(tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=[totals.size]))
        _, _, metrics, *history = tf.while_loop(follows, score, start, parallel_iterations=1)
        return history[0].stack() if each_batch else totals.pack(list(metrics))

    return evaluate


def batch_evaluation_function(step: ModelStep, totals: MetricTotals, element_spec: Any) -> Any:
    """A function of a batch that scores it, and returns what was counted.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        element_spec: the `tf.TypeSpec`s of a batch.
    """

    @tf.function(autograph=False, input_signature=[element_spec])
    def evaluate(batch: Any) -> tf.Tensor:
        metrics = step.evaluate(values(step.parameters), values(step.state), totals.start(), batch).metrics
        return totals.pack(metrics)

    return evaluate


def _read_once(step: ModelStep) -> Callable[[], Reading]:
    def read() -> Reading:
        parameters = values(step.parameters)
        return lambda _batch: (parameters, contextlib.nullcontext)

    return read
