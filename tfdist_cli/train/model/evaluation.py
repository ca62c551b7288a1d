"""The evaluation loop: one `tf.function` that all engines use.

A long evaluation is several executions of it, one after the other. Between them a task reports its progress, and acts
on SIGTERM. What an execution has counted is the start of the next one, so that their number changes no result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.model.evaluation_state import EvaluationState
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, Tensors, values
from tfdist_cli.train.tf_compat.data import clock

ParameterReader = Callable[[Any], tuple[Tensors, ParameterScope]]
"""Takes a batch; returns the values of the parameters for it, and the scope in which the model uses them."""
EXECUTION_SECONDS = 3.0
"""Seconds after which an execution of the evaluation begins no more batches."""


def evaluation_function(
    step: ModelStep,
    totals: MetricTotals,
    evaluation_state: EvaluationState,
    make_reader: Callable[[], ParameterReader] | None = None,
    *,
    each_batch: bool = False,
) -> Any:
    """Returns a `tf.function` that evaluates batches until the iterator ends, or for `EXECUTION_SECONDS`.

    Its arguments are the iterator; the largest number of batches, int64, shape (), negative for no limit; the shard as
    its index and the number of shards, int64, shape (2,); and a list of what is counted so far: `first_counts`, or the
    last part of the result of the execution before. Its result is a list: whether the evaluation is complete, bool,
    shape (); the concatenation of `MetricTotals.pack` and `EvaluationState.pack`, float64, shape (size,), of all
    batches so far; and the arguments of the next execution, which begin with the number of batches, int64, shape ().

    Args:
        step: the model's step.
        totals: packs the metrics.
        evaluation_state: packs the state.
        make_reader: called once within the function; None reads all parameters at its start.
        each_batch: whether to return the counts after each batch of this execution, shape (batches, size).
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor, shard: tf.Tensor, counts: Tensors) -> list[tf.Tensor]:
        read, state = (make_reader or _read_once(step))(), values(step.state)
        loop = _Loop(step, totals, evaluation_state, read, state)
        return loop.run(iterator, limit, shard, counts, each_batch=each_batch)

    return evaluate


def first_counts(step: ModelStep, totals: MetricTotals, evaluation_state: EvaluationState) -> Tensors:
    """Returns the counts with which the first execution begins. Call it within the strategy's scope.

    Returns:
        The number of batches, int64, shape (); the values of metrics; those of the state that evaluation changes.
    """
    own = evaluation_state.select(values(step.state))
    return [tf.zeros([], tf.int64), *totals.initial_values(), *own]


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

    def run(
        self, iterator: Any, limit: tf.Tensor, shard: tf.Tensor, counts: Tensors, *, each_batch: bool
    ) -> list[tf.Tensor]:
        """See `evaluation_function`."""
        before, *counted = counts
        begun = clock()

        def next_if(wanted: tf.Tensor) -> Any:
            none = partial(tf.experimental.Optional.empty, iterator.element_spec)
            return tf.cond(wanted, iterator.get_next_as_optional, none)

        def has_batch(optional: Any, *_: Any) -> tf.Tensor:
            return optional.has_value()

        def evaluate_batch(
            optional: Any, _: tf.Tensor, done: tf.Tensor, metrics: Any, own: Any, *history: Any
        ) -> list[Any]:
            metrics, own, done = self._evaluated(optional.get_value(), done, metrics, own, shard)
            index = tf.cast(done - before - 1, tf.int32)
            history = tuple(results.write(index, self._packed(done, metrics, own)) for results in history)
            with tf.control_dependencies([done, *metrics]):
                in_time = clock() < begun + EXECUTION_SECONDS
            following = next_if(tf.logical_and(in_time, tf.logical_or(limit < 0, done < limit)))
            return [following, in_time, done, metrics, own, *history]

        metrics, own = counted[: len(self.totals.initial)], counted[len(self.totals.initial) :]
        start = [next_if(tf.not_equal(limit, before)), tf.constant(True), before, metrics, own]
        if each_batch:
            shape = [self.totals.size + self.evaluation_state.size]
            start.append(tf.TensorArray(tf.float64, size=0, dynamic_size=True, element_shape=shape))
        _, complete, done, metrics, own, *history = tf.while_loop(
            has_batch, evaluate_batch, start, parallel_iterations=1
        )
        packed = history[0].stack() if each_batch else self._packed(done, metrics, own)
        return [complete, packed, done, *metrics, *own]

    def _evaluated(
        self, batch: Any, done: tf.Tensor, metrics: Any, own: Any, shard: tf.Tensor
    ) -> tuple[Tensors, Tensors, tf.Tensor]:
        """Evaluates a batch; returns the metrics, the changed state, and the number of batches so far."""
        parameters, parameter_scope = self.read(batch)
        before = self.evaluation_state.insert(self.state, list(own), done, shard)
        result = self.step.evaluate(parameters, before, list(metrics), batch, parameter_scope)
        return result.metrics, self.evaluation_state.select(result.state), done + 1

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


class Scorer:
    """Evaluates batches of one type in one process, by functions that are traced once.

    Args:
        step: the model's step.
        totals: packs the metrics.
        element_spec: the `tf.TypeSpec`s of a batch.
        seeds: the model's seed counters.
        make_reader: see `evaluation_function`.

    Attributes:
        state: the state that evaluation changes.
    """

    def __init__(
        self,
        step: ModelStep,
        totals: MetricTotals,
        element_spec: Any,
        seeds: SeedCounters,
        make_reader: Callable[[], ParameterReader] | None = None,
    ) -> None:
        self._step, self._totals, self._element_spec, self._make_reader = step, totals, element_spec, make_reader
        self.state = EvaluationState(step, element_spec, seeds)

    def first_counts(self) -> Tensors:
        """See the function of this name."""
        return first_counts(self._step, self._totals, self.state)

    @cached_property
    def evaluate(self) -> Any:
        """See `evaluation_function`."""
        return evaluation_function(self._step, self._totals, self.state, self._make_reader)

    @cached_property
    def evaluate_batch(self) -> Any:
        """See `batch_evaluation_function`."""
        spec = self._element_spec
        return batch_evaluation_function(self._step, self._totals, self.state, spec, self._make_reader)


def _read_once(step: ModelStep) -> Callable[[], ParameterReader]:
    def make_reader() -> ParameterReader:
        parameters = values(step.parameters)
        return lambda _batch: (parameters, contextlib.nullcontext)

    return make_reader
