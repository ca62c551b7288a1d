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


def evaluation_function(step: ModelStep, totals: MetricTotals, read: Callable[[], Reading] | None = None) -> Any:
    """A function of (iterator, limit) that scores batches until the iterator ends or `limit` are done.

    A limit below 0 is none. It returns what was counted, as `MetricTotals.pack` packs it.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        read: called once in the function; None reads all parameters at its begin.
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor) -> tf.Tensor:
        parameters_for, state = (read or _read_once(step))(), values(step.state)

        def follows(optional: Any, _done: tf.Tensor, _metrics: Any) -> tf.Tensor:
            return optional.has_value()

        def score(optional: Any, done: tf.Tensor, metrics: Any) -> tuple[Any, tf.Tensor, Any]:
            batch = optional.get_value()
            parameters, given = parameters_for(batch)
            metrics = step.evaluate(parameters, state, list(metrics), batch, given).metrics
            done += 1
            more = tf.logical_or(limit < 0, done < limit)
            following = tf.cond(
                more, iterator.get_next_as_optional, lambda: tf.experimental.Optional.empty(iterator.element_spec)
            )
            return following, done, metrics

        first = tf.cond(
            tf.equal(limit, 0),
            lambda: tf.experimental.Optional.empty(iterator.element_spec),
            iterator.get_next_as_optional,
        )
        _, _, metrics = tf.while_loop(
            follows, score, (first, tf.zeros([], tf.int64), totals.start()), parallel_iterations=1
        )
        return totals.pack(list(metrics))

    return evaluate


def _read_once(step: ModelStep) -> Callable[[], Reading]:
    def read() -> Reading:
        parameters = values(step.parameters)
        return lambda _batch: (parameters, contextlib.nullcontext)

    return read
