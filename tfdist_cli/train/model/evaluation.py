"""Scoring a model on data: the same function for every engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist_cli.train.model.evaluation_state import ScoredState
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, Tensors, values

Reading = Callable[[Any], tuple[Tensors, ParameterScope]]
"""A batch → the parameters to score it with, and how the model is given them."""


def evaluation_function(
    step: ModelStep,
    totals: MetricTotals,
    scored: ScoredState,
    read: Callable[[], Reading] | None = None,
    *,
    each_batch: bool = False,
) -> Any:
    """A function of (iterator, limit, shard) that scores batches until the iterator ends or `limit` are done.

    A limit below 0 is none; a shard is its index and how many there are. It returns what was counted, as
    `MetricTotals.pack` packs it, and behind it what has become of the state, as `ScoredState.pack` does.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        scored: packs the state.
        read: called once in the function; None reads all parameters at its begin.
        each_batch: whether to return what it came to after each batch, shape (batches, size).
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor, shard: tf.Tensor) -> tf.Tensor:
        parameters_for, state = (read or _read_once(step))(), values(step.state)

        def packed(done: tf.Tensor, metrics: Any, own: Any) -> tf.Tensor:
            return tf.concat([totals.pack(list(metrics)), scored.pack(state, list(own), done)], axis=0)

        def follows(optional: Any, *_: Any) -> tf.Tensor:
            return optional.has_value()

        def score(optional: Any, done: tf.Tensor, metrics: Any, own: Any, *history: Any) -> list[Any]:
            batch = optional.get_value()
            parameters, given = parameters_for(batch)
            before = scored.put(state, list(own), done, shard)
            result = step.evaluate(parameters, before, list(metrics), batch, given)
            place, done = tf.cast(done, tf.int32), done + 1
            metrics, own = result.metrics, scored.own(result.state)
            history = tuple(kept.write(place, packed(done, metrics, own)) for kept in history)
            more = tf.logical_or(limit < 0, done < limit)
            following = tf.cond(
                more, iterator.get_next_as_optional, lambda: tf.experimental.Optional.empty(iterator.element_spec)
            )
            return [following, done, metrics, own, *history]

        first = tf.cond(
            tf.equal(limit, 0),
            lambda: tf.experimental.Optional.empty(iterator.element_spec),
            iterator.get_next_as_optional,
        )
        start = [first, tf.zeros([], tf.int64), totals.initial_values(), scored.own(state)]
        if each_batch:
            shape = [totals.size + scored.size]
            start.append(tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=shape))
        _, done, metrics, own, *history = tf.while_loop(follows, score, start, parallel_iterations=1)
        return history[0].stack() if each_batch else packed(done, metrics, own)

    return evaluate


def batch_evaluation_function(step: ModelStep, totals: MetricTotals, scored: ScoredState, element_spec: Any) -> Any:
    """A function of (batch, shard) that scores one batch, and returns what `evaluation_function` does.

    Args:
        step: the model's pure functions.
        totals: packs the metrics.
        scored: packs the state.
        element_spec: the `tf.TypeSpec`s of a batch.
    """

    @tf.function(autograph=False, input_signature=[element_spec, tf.TensorSpec([2], tf.int64)])
    def evaluate(batch: Any, shard: tf.Tensor) -> tf.Tensor:
        state = values(step.state)
        before = scored.put(state, scored.own(state), tf.zeros([], tf.int64), shard)
        result = step.evaluate(values(step.parameters), before, totals.initial_values(), batch)
        changed = scored.pack(state, scored.own(result.state), tf.ones([], tf.int64))
        return tf.concat([totals.pack(result.metrics), changed], axis=0)

    return evaluate


def _read_once(step: ModelStep) -> Callable[[], Reading]:
    def read() -> Reading:
        parameters = values(step.parameters)
        return lambda _batch: (parameters, contextlib.nullcontext)

    return read
