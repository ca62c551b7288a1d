"""The engine of `ParameterServerStrategy`: the chief schedules steps, workers take them when they are ready.

A worker's execution pulls the parameters from the ps, computes gradients, and applies them where the variables live,
without waiting for the other workers; each way, what is of one ps crosses as one tensor. What has to be exact does not
go through shared variables: metrics come back with the execution and are summed here; `iterations` is an atomic
addition; seeds follow from the step's number.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import iterator_ops
from tensorflow.python.distribute.coordinator import values as coordinator_values

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data import DatasetFunction, Shard, checked
from tfdist_cli.train.engine import DEFAULT_RULES, Execution, Pause, Rules
from tfdist_cli.train.metrics import MetricTotals
from tfdist_cli.train.pace import Pace
from tfdist_cli.train.seeds import Seeds
from tfdist_cli.train.step import ModelStep, values
from tfdist_cli.train.update import apply, innermost, leave_sums_to_engine
from tfdist_cli.train.wire import Wire


class CoordinatedEngine:
    """Asynchronous training on parameter servers.

    Args:
        step: the model's pure functions, built under the strategy's scope.
        strategy: a `tf.distribute.ParameterServerStrategy`.
        element_spec: the `tf.TypeSpec`s of a batch.
        rules: how gradients become updates.
    """

    is_chief = True
    synchronous = False
    max_steps_per_execution = 20

    def __init__(
        self, step: ModelStep, strategy: tf.distribute.Strategy, element_spec: Any, rules: Rules = DEFAULT_RULES
    ) -> None:
        self._step = step
        self._rules = rules
        self._strategy = strategy
        self._element_spec = element_spec
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        # TensorFlow can create data on one worker alone only through its own list of workers.
        self._workers = self._coordinator._cluster.workers
        self.workers = len(self._workers)
        self._pace = Pace(self.workers)
        self._totals = MetricTotals(step)
        self._seeds = Seeds(step, element_spec)
        self._functions: dict[int, Any] = {}
        self._evaluation: Any = None
        self._iterators: Any = None
        leave_sums_to_engine(step.model.optimizer)
        self._check_accumulation()

    def scope(self) -> AbstractContextManager[Any]:
        """See `Engine.scope`."""
        return self._strategy.scope()

    def open(self, data: DatasetFunction, *, split: bool, step: int) -> None:
        """Creates each worker's iterator on the worker; a restarted worker creates its own again."""
        self._seeds.begin(step)
        done = step // self.workers
        count = self.workers if split else 1
        shards = [Shard(n if split else 0, count, n, done) for n in range(self.workers)]

        def opened(shard: Shard) -> Any:
            return iter(checked(data, shard))

        remotes = [
            self._on_worker(worker, partial(opened, shard), self._element_spec)
            for worker, shard in zip(self._workers, shards, strict=True)
        ]
        self._iterators = coordinator_values.PerWorkerValues(remotes)

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`; what is in flight when a pause is agreed is finished and yielded."""
        left, start = steps, first
        pending: deque[tuple[int, Any]] = deque()
        self._pace.begin()
        while True:
            while left and len(pending) < self._pace.in_flight and not pause.agreed():
                wanted = self._pace.size(size) if adapts else size
                count = wanted if left >= wanted else 1
                pending.append((start, self._schedule(count, start)))
                left, start = left - count, start + count
            if not pending:
                return
            begun, remote = pending.popleft()
            execution = self._execution(begun, self._fetch(remote), int(pause.wanted()))
            self._pace.done(len(execution.losses))
            yield execution

    def evaluate(self, data: DatasetFunction, *, steps: int | None) -> MetricTotals:
        """Every worker scores its own shard of the data, once."""
        function = self._evaluation_function(data)
        count = self.workers
        limits = [-1 if steps is None else steps // count + (n < steps % count) for n in range(count)]

        def score(shard: Shard, limit: int) -> Any:
            return function(iter(checked(data, shard)), tf.constant(limit, tf.int64))

        with self.scope():
            remotes = [
                self._on_worker(worker, partial(score, Shard(n, count, n), limits[n]))
                for n, worker in enumerate(self._workers)
            ]
        totals = MetricTotals(self._step)
        for remote in remotes:
            totals.add(self._fetch(remote))
        return totals

    def total(self, values: np.ndarray) -> np.ndarray:
        """Only the chief runs the loop."""
        return values

    def share_variables(self) -> None:
        """The variables are on the ps, where every task finds them."""

    def settle(self, step: int) -> None:
        """See `Engine.settle`."""
        with self.scope():
            self._seeds.settle(step)

    def _check_accumulation(self) -> None:
        """Refuses what would lose gradients: workers would add to one accumulator at the same time."""
        optimizer = innermost(self._step.model.optimizer)
        if optimizer.gradient_accumulation_steps and self.workers > 1:
            raise TrainingError(
                f"gradient_accumulation_steps is {optimizer.gradient_accumulation_steps}, which asynchronous workers "
                "cannot share",
                hint="take larger batches, or train with strategy: multi_worker_mirrored",
            )

    def _on_worker(self, worker: Any, function: Callable[[], Any], element_spec: Any = None) -> Any:
        remote = worker.create_resource(function)
        if element_spec is not None:
            remote._type_spec = iterator_ops.IteratorSpec(element_spec)
        return remote

    def _schedule(self, count: int, start: int) -> Any:
        function = self._functions.get(count)
        if function is None:
            function = self._functions[count] = self._execution_function(count)
        return self._raising_cause(
            lambda: self._coordinator.schedule(function, args=(self._iterators, tf.constant(start, tf.int64)))
        )

    def _fetch(self, remote: Any) -> Any:
        return self._raising_cause(remote.fetch)

    def _raising_cause(self, call: Callable[[], Any]) -> Any:
        """Calls; when an execution has failed, raises what it failed of, not what was cancelled along with it."""
        try:
            return call()
        except tf.errors.CancelledError:
            self._coordinator.join()  # raises the failure that the others were cancelled for
            raise
        except tf.errors.OutOfRangeError as error:
            raise _ended_early(error) from error
        except Exception as error:
            cause = getattr(error, "original_exception", None)
            if isinstance(cause, tf.errors.OutOfRangeError):
                raise _ended_early(cause) from error
            if isinstance(cause, Exception):
                raise cause from None
            raise

    def _execution(self, first: int, fetched: Any, votes: int) -> Execution:
        losses, metrics, examples, worker = fetched
        name = f"worker:{int(worker)}"
        return Execution(first, losses, metrics, {name: len(losses)}, {name: int(examples)}, votes)

    def _execution_function(self, count: int) -> Any:
        """`count` steps of one worker as one function, unrolled: a loop over several tasks' devices costs more."""
        step, totals, seeds = self._step, self._totals, self._seeds
        optimizer, wire = step.model.optimizer, Wire(step.parameters)

        @tf.function(autograph=False)
        def execute(iterator: Any, first: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
            state, metrics = values(step.state), totals.start()
            examples, losses = tf.zeros([], tf.int64), []
            for number in range(count):
                state = seeds.put(state, first + number)
                result = step.train(wire.pull(), state, metrics, next(iterator))
                apply(optimizer, wire.push(result.gradients), step.parameters)
                state, metrics = result.state, result.metrics
                examples += result.examples
                losses.append(result.loss)
            for place, (variable, value) in enumerate(zip(step.state, state, strict=True)):
                if place not in seeds:
                    variable.value.assign(tf.cast(value, variable.dtype))
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            return tf.stack(losses), totals.pack(metrics), examples, tf.cast(worker, tf.int64)

        return execute

    def _evaluation_function(self, data: DatasetFunction) -> Any:
        if self._evaluation is None:
            spec = checked(data, Shard()).element_spec
            with self.scope():
                function = evaluation_function(self._step, self._totals)
                limit = tf.TensorSpec([], tf.int64)
                self._evaluation = function.get_concrete_function(iterator_ops.IteratorSpec(spec), limit)
        return self._evaluation


def evaluation_function(step: ModelStep, totals: MetricTotals) -> Any:
    """A function of (iterator, limit) that scores batches until the iterator ends or `limit` are done.

    A limit below 0 is none. It returns what was counted, as `MetricTotals.pack` packs it.
    """

    @tf.function(autograph=False)
    def evaluate(iterator: Any, limit: tf.Tensor) -> tf.Tensor:
        parameters, state = values(step.parameters), values(step.state)

        def follows(optional: Any, _done: tf.Tensor, _metrics: Any) -> tf.Tensor:
            return optional.has_value()

        def score(optional: Any, done: tf.Tensor, metrics: Any) -> tuple[Any, tf.Tensor, Any]:
            metrics = step.evaluate(parameters, state, list(metrics), optional.get_value()).metrics
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


def _ended_early(error: Exception) -> TrainingError:
    found = re.search(r"/job:worker/(?:replica:\d+/)?task:(\d+)", str(error))
    where = f"worker:{found[1]}'s data" if found else "the data"
    return TrainingError(
        f"{where} ended before the training did",
        hint="let it start again (train.repeat: true in a recipe, .repeat() on a dataset), or train fewer steps",
    )
