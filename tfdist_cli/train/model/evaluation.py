"""The evaluation loop: one `tf.function` that all engines use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfdist_cli.train.model.evaluation_state import EvaluationState
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, Tensors, values

ParameterReader = Callable[[Any], tuple[Tensors, ParameterScope]]
"""Takes a batch; returns the values of the parameters for it, and the scope in which the model uses them."""


def evaluation_function(
    step: ModelStep,
    totals: MetricTotals,
    evaluation_state: EvaluationState,
    make_reader: Callable[[], ParameterReader] | None = None,
    *,
    each_batch: bool = False,
) -> Any:
    """Returns a `tf.function` that evaluates batches until the iterator ends.

    Its arguments are the iterator; the largest number of batches, int64, shape (), negative for no limit; and the shard
    as its index and the number of shards, int64, shape (2,). Its result is the concatenation of `MetricTotals.pack` and
    `EvaluationState.pack`, float64, shape (size,).

    Args:
        step: the model's step.
        totals: packs the metrics.
        evaluation_state: packs the state.
        make_reader: called once within the function; None reads all parameters at its start.
        each_batch: whether to return the result after each batch, shape (batches, size).
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor, shard: tf.Tensor) -> tf.Tensor:
        read, state = (make_reader or _read_once(step))(), values(step.state)
        return _Loop(step, totals, evaluation_state, read, state).run(iterator, limit, shard, each_batch=each_batch)

    return evaluate


@dataclass(frozen=True)
class _Loop:
    """The loop over the batches of an iterator.

    Args:
        step: the model's step.
        totals: packs the metrics.
        evaluation_state: packs the state.
        read: returns the parameters for a batch.
        state: the model's state at the start of the evaluation.
    """

    step: ModelStep
    totals: MetricTotals
    evaluation_state: EvaluationState
    read: ParameterReader
    state: Tensors

    def run(self, iterator: Any, limit: tf.Tensor, shard: tf.Tensor, *, each_batch: bool) -> tf.Tensor:
        """See `evaluation_function`."""

        def has_batch(optional: Any, *_: Any) -> tf.Tensor:
            return optional.has_value()

        def evaluate_batch(optional: Any, done: tf.Tensor, metrics: Any, own: Any, *history: Any) -> list[Any]:
            metrics, own, index, done = self._evaluated(optional.get_value(), done, metrics, own, shard)
            history = tuple(results.write(index, self._packed(done, metrics, own)) for results in history)
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
        own = self.evaluation_state.select(self.state)
        start = [first, tf.zeros([], tf.int64), self.totals.initial_values(), own]
        if each_batch:
            shape = [self.totals.size + self.evaluation_state.size]
            start.append(tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=shape))
        _, done, metrics, own, *history = tf.while_loop(has_batch, evaluate_batch, start, parallel_iterations=1)
        return history[0].stack() if each_batch else self._packed(done, metrics, own)

    def _evaluated(
        self, batch: Any, done: tf.Tensor, metrics: Any, own: Any, shard: tf.Tensor
    ) -> tuple[Tensors, Tensors, tf.Tensor, tf.Tensor]:
        """Evaluates a batch; returns metrics, changed state, the batch's index, and the number of batches so far."""
        parameters, parameter_scope = self.read(batch)
        before = self.evaluation_state.insert(self.state, list(own), done, shard)
        result = self.step.evaluate(parameters, before, list(metrics), batch, parameter_scope)
        index, done = tf.cast(done, tf.int32), done + 1
        return result.metrics, self.evaluation_state.select(result.state), index, done

    def _packed(self, done: tf.Tensor, metrics: Any, own: Any) -> tf.Tensor:
        return tf.concat(
            [self.totals.pack(list(metrics)), self.evaluation_state.pack(self.state, list(own), done)], axis=0
        )


def batch_evaluation_function(
    step: ModelStep,
    totals: MetricTotals,
    evaluation_state: EvaluationState,
    element_spec: Any,
    make_reader: Callable[[], ParameterReader] | None = None,
) -> Any:
    """Returns a `tf.function` of a batch and a shard that evaluates one batch; see `evaluation_function`.

    Args:
        step: the model's step.
        totals: packs the metrics.
        evaluation_state: packs the state.
        element_spec: the `tf.TypeSpec`s of a batch.
        make_reader: see `evaluation_function`.
    """

    @tf.function(autograph=False, input_signature=[element_spec, tf.TensorSpec([2], tf.int64)])
    def evaluate(batch: Any, shard: tf.Tensor) -> tf.Tensor:
        state = values(step.state)
        before = evaluation_state.insert(state, evaluation_state.select(state), tf.zeros([], tf.int64), shard)
        parameters, scope = (make_reader or _read_once(step))()(batch)
        result = step.evaluate(parameters, before, totals.initial_values(), batch, scope)
        changed = evaluation_state.pack(state, evaluation_state.select(result.state), tf.ones([], tf.int64))
        return tf.concat([totals.pack(result.metrics), changed], axis=0)

    return evaluate


def _read_once(step: ModelStep) -> Callable[[], ParameterReader]:
    def make_reader() -> ParameterReader:
        parameters = values(step.parameters)
        return lambda _batch: (parameters, contextlib.nullcontext)

    return make_reader
