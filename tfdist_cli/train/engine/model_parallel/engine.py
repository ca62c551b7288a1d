"""The engine of a model whose layers are on several workers: the chief reads the data and sends it through the stages.

Each step is one function that runs on all workers. TensorFlow sends activations and their gradients between them. A
batch is divided into micro-batches: while one is in a later stage, an earlier stage computes the next one (Huang et
al., GPipe, 2019). Each stage takes the micro-batches in their order. The gradients of all micro-batches make one
update, on the workers that hold the variables. Several replicas of the stages train on a batch each.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.data.length import count
from tfdist_cli.train.data.pipeline import Consumed, ended_early, next_batch
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.engine.base import DEFAULT_RULES, EvaluationWatch, Execution, Pause, Rules, Sharing
from tfdist_cli.train.engine.fallback import FirstExecution
from tfdist_cli.train.engine.model_parallel.gradient_sums import computed_alone, sum_gradients
from tfdist_cli.train.engine.model_parallel.micro_batches import MicroBatch, MicroBatches
from tfdist_cli.train.engine.table_rows import TableRows
from tfdist_cli.train.engine.unrolling import unrolled_steps
from tfdist_cli.train.layers.dynamic_tables import refuse_dynamic_tables
from tfdist_cli.train.model.evaluation import ParameterReader, Scorer
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters, numbers_after
from tfdist_cli.train.model.train_step import ModelStep, StepResult, Tensors, values
from tfdist_cli.train.optimizers.apply import apply, disable_gradient_reduction
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import kernels_disabled
from tfdist_cli.train.variables.micro_batch_order import MicroBatchOrder
from tfdist_cli.train.variables.stages import Stages

log = logging.getLogger("tfdist")
_ALL = (0, 1)
"""The shard with all data: its index, and the number of shards."""


class ModelParallelEngine:
    """Trains a model whose layers are on several workers.

    Args:
        step: the model's pure functions, built under the strategy's scope.
        strategy: the strategy of the chief's device.
        stages: the stages, with their layers.
        element_spec: the `tf.TypeSpec`s of a replica's batch.
        rules: how gradients become updates.
    """

    is_chief = synchronous = one_by_one = is_current = True
    max_steps_per_execution = 10
    workers = 1
    """Processes that run the loop, and read data."""

    def __init__(
        self,
        step: ModelStep,
        strategy: tf.distribute.Strategy,
        stages: Stages,
        element_spec: Any,
        rules: Rules = DEFAULT_RULES,
    ) -> None:
        refuse_dynamic_tables(step.model, "model parallelism")
        self._step, self._strategy, self._stages, self._rules = step, strategy, stages, rules
        self.sharers = stages.replicas
        self._micro = MicroBatches.of(element_spec, rules.micro_batches, self.sharers)
        self._parts = self.sharers * self._micro.count
        self._check_state()
        self._tables = self._table_rows()
        step.device_scope = stages.computing
        step.batches_per_update, step.sums_gradients = self._parts, True
        _log_unused(rules)
        self._rate = RateScaling(rules.learning_rate, self._parts // rules.micro_batches)
        self._seeds = SeedCounters(step, self._micro.element_spec, self._parts)
        self._check_updates()
        self._assigned = self._seeds.exclude(step.assigned_state(self._micro.element_spec))
        self._totals = MetricTotals(step)
        for optimizer in step.optimizers:
            disable_gradient_reduction(optimizer)
        self._operations = step.operation_count(self._micro.element_spec) * self._parts
        self._functions: dict[int, Any] = {}
        self._scorers: dict[str, Scorer] = {}
        """By the `tf.TypeSpec`s of their batches."""
        self._data: Callable[[], tf.data.Dataset] | None = None
        self._iterator: Any = None
        self._read = Consumed()
        self._taken = 0
        self._first_execution = FirstExecution(
            lambda: [*step.parameters, *step.state, *step.optimizer_variables],
            self.scope,
            self.total,
            self._take_standard_path,
        )

    def _table_rows(self) -> TableRows:
        """The tables of which only rows are read and updated, on the workers that hold them."""
        rules = replace(self._rules, jit=False)  # it has no effect
        return TableRows(self._step, self._micro.element_spec, rules, batches=self._parts)

    def _check_state(self) -> None:
        """Checks that the model keeps no state of examples from batch to batch if batches are divided.

        Raises:
            TrainingError: it does.
        """
        if self._parts > 1 and self._step.recurrent_state:
            raise TrainingError(
                "a recurrent layer with stateful=True continues from batch to batch, so batches cannot be divided",
                code="stateful-layer-divided",
                hint="remove micro_batches, and use one worker for each stage",
            )

    def _check_updates(self) -> None:
        """Checks that the engine makes the step's only update; known after the step is traced.

        Raises:
            TrainingError: the step makes updates itself.
        """
        if self._step.updates_within:
            raise TrainingError(
                f"{type(self._step.model).__name__} makes several updates in a step, or assigns weights, which "
                "model_parallel does not support",
                code="updates-within-step",
                hint="use strategy: parameter_server or single",
            )

    def begin_again(self) -> None:
        """Does nothing: no failure outlasts a call."""

    def scope(self) -> AbstractContextManager[Any]:
        """See `Engine.scope`."""
        return self._strategy.scope()

    def open(self, data: DatasetFunction, *, share: Sharing, step: int, batches: int) -> None:  # noqa: ARG002 the chief reads all of it
        """Opens the data in this process."""
        self._seeds.start_at(step)
        self._read = Consumed(data, batches)
        self._data = partial(checked, data, Shard(step=batches))
        self._iterator = iter(self._data())

    def resume_workers(self, taken: Mapping[str, int]) -> None:
        """Does nothing: all workers take each step."""

    @property
    def worker_steps(self) -> dict[str, int]:
        """See `Engine.worker_steps`."""
        return {}

    def begin_epoch(self) -> None:
        """Does nothing: the workers stay the same."""

    def begin_pass(self) -> None:
        """See `Engine.begin_pass`."""
        dataset = self._read.next_pass()
        if dataset is not None:
            self._iterator = iter(dataset)

    def change_workers(self, step: int) -> bool:  # noqa: ARG002 as above
        """Does nothing, see `begin_epoch`."""
        return False

    def close(self) -> None:
        """See `Engine.close`."""
        self._iterator = self._data = None
        self._read.close()
        self._read = Consumed()

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`."""

        def executions(taken: int, count: int) -> Iterator[Execution]:
            return self._executions(count, first + taken, size, pause, adapts=adapts)

        for execution in self._first_execution.run(executions, steps, attempt=size, pause=pause):
            self._read.count(len(execution.losses) * self.sharers)
            yield execution

    def _executions(self, steps: int, first: int, most: int, pause: Pause, *, adapts: bool) -> Iterator[Execution]:
        left, start = steps, first
        while left and not pause.agreed():
            grows = adapts and not self._rules.builds_first
            size = unrolled_steps(most, self._operations, self._taken) if grows else most
            count = size if left >= size and self._rules.optimized else 1
            vote = float(pause.wanted())
            if count not in self._functions:
                self._functions[count] = self._execution_function(count)
            with self.scope():
                try:
                    summary = self._functions[count](
                        self._iterator, tf.constant(self._seeds.numbers(start), tf.int64)
                    ).numpy()
                except tf.errors.OutOfRangeError as error:
                    raise ended_early("the data") from error
            self._taken += count
            losses, examples, metrics = np.split(summary, [count, count + 1])
            task = "chief:0"
            yield Execution(start, losses, metrics, {task: count}, {task: int(examples[0])}, int(vote))
            left, start = left - count, start + count

    def _take_standard_path(self) -> None:
        self._rules = replace(self._rules, optimized=False)
        self._tables = self._table_rows()
        self._functions.clear()
        if self._data:
            self._iterator = iter(self._data())

    def _execution_function(self, count: int) -> Any:
        """`count` steps of all replicas as one function."""
        step, totals = self._step, self._totals

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor) -> tf.Tensor:
            state, metrics = values(step.state), [totals.initial_values() for _ in range(self.sharers)]
            losses, examples, logs = [], [], []
            for number in range(count):
                batches = [self._micro.parts(next_batch(iterator)) for _ in range(self.sharers)]
                state, metrics, results = self._take_step(batches, numbers_after(numbers, number), state, metrics)
                losses.append(self._loss_of(results))
                examples += [each.examples for each in results]
                logs = results[-1].logs
            packed = [totals.pack(own, list(logs)) for own in metrics]
            return tf.concat([tf.stack(losses), [tf.cast(tf.add_n(examples), tf.float64)], tf.add_n(packed)], axis=0)

        return execute

    def _loss_of(self, results: Sequence[StepResult]) -> tf.Tensor:
        """The loss of a step, float64, shape ()."""
        each = [tf.cast(result.loss, tf.float64) for result in results]
        if self._micro.equal:
            return tf.add_n(each) / self._parts
        examples = [tf.cast(result.examples, tf.float64) for result in results]
        return tf.add_n([loss * own for loss, own in zip(each, examples, strict=True)]) / tf.add_n(examples)

    def _take_step(
        self, batches: Sequence[Sequence[MicroBatch]], numbers: tf.Tensor, state: Tensors, metrics: list[Tensors]
    ) -> tuple[Tensors, list[Tensors], list[StepResult]]:
        """Takes a step with its update.

        Args:
            batches: the micro-batches of each replica.
            numbers: `SeedCounters.numbers` of the step.
            state: the values of the model's state.
            metrics: the values of each replica's metrics.

        Returns:
            The new state and metrics, and the results of all micro-batches.
        """
        step, read = self._step, iter(self._tables.read([part.batch for parts in batches for part in parts]))
        weighted = self._weighting(batches)
        computed_in = [self._stages.stage_of(variable) for variable in step.parameters]
        results: list[list[StepResult]] = []
        for replica, parts in enumerate(batches):
            results.append([])
            order = MicroBatchOrder(self._stages.count)
            step.device_scope = partial(self._stages.computing, replica, order if len(parts) > 1 else None)
            own = state
            for index, part in enumerate(parts):
                own = self._seeds.state_for_step(own, numbers, replica * len(parts) + index)
                order.begin()
                parameters = next(read)
                result = weighted(part).train(parameters.values, own, metrics[replica], part.batch, parameters.scope)
                order.end(_awaited(computed_in, result.gradients))
                with self._stages.following():
                    gradients = parameters.gradients(result.gradients, summed=())
                    own = _where(part.counts, result.state, own)
                    metrics[replica] = _where(part.counts, result.metrics, metrics[replica])
                examples = result.examples if part.examples is None else part.examples
                results[-1].append(replace(result, gradients=gradients, state=own, examples=examples))
        step.device_scope = self._stages.computing
        each = [result for own_results in results for result in own_results]
        self._update([[result.gradients for result in own_results] for own_results in results])
        return self._assign_state([own_results[-1].state for own_results in results]), metrics, each

    def _weighting(self, batches: Sequence[Sequence[MicroBatch]]) -> Callable[[MicroBatch], ModelStep]:
        """Returns a function of a micro-batch that returns the step with its weight in the mean of all of them."""
        if self._micro.equal:
            return lambda _: self._step
        examples = tf.add_n([part.examples for parts in batches for part in parts])
        mean = tf.cast(examples, tf.float64) / self._parts
        return lambda part: self._step.weighted_by(mean, part.counts)

    def _update(self, gradients: list[list[list[Any]]]) -> None:
        """Sums the gradients of each replica where they are, then those of all replicas, and updates the variables."""
        given: list[Any] = []
        spec = self._micro.element_spec
        once = self._step.lookups(spec).keys() - self._step.looked_up_by_examples(spec)
        with self._stages.following(), nullcontext() if self._rules.optimized else kernels_disabled():
            for index in range(len(self._step.parameters)):
                found = [[part[index] for part in own if part[index] is not None] for own in gradients]
                sums = [sum_gradients(own, once=index in once) for own in found if own]
                given.append([sum_gradients(sums, once=index in once)] if sums else None)
            apply(self._step.optimizer, given, self._step.parameters, self._rate, self._tables.variables)

    def _assign_state(self, states: list[Tensors]) -> Tensors:
        """Assigns the mean of the replicas' state, and returns the state."""
        state = list(states[-1])
        for index in self._assigned:
            variable, values_of = self._step.state[index], [own[index] for own in states]
            if len(values_of) > 1:
                mean = tf.add_n([tf.cast(value, tf.float64) for value in values_of]) / len(values_of)
                state[index] = tf.cast(mean, variable.dtype)
            with tf.device(variable.value.device):
                variable.value.assign(state[index])
        return state

    def operations(self) -> int:
        """See `Engine.operations`."""
        return self._operations

    def evaluate(self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch) -> MetricTotals:
        """Scores the data on the workers of the first replica."""
        dataset = checked(data, Shard())
        with self.scope():
            scorer = self._scorer_of(dataset)
            limit = tf.constant(-1 if steps is None else steps, tf.int64)
            iterator, counts = iter(dataset), scorer.first_counts()
        complete = False
        while not complete:
            with self.scope():
                ended, counted, *counts = scorer.evaluate(iterator, limit, tf.constant(_ALL, tf.int64), counts)
            complete = bool(ended)
            if not complete:
                watch.between(int(counts[0]), int(watch.wanted()))
        totals = MetricTotals(self._step, training=False)
        totals.add(self._counts(scorer, counted.numpy()))
        return totals

    def test_steps(
        self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch
    ) -> Iterator[Callable[[], np.ndarray]]:
        """See `Engine.test_steps`."""
        dataset = checked(data, Shard())
        with self.scope():
            scorer = self._scorer_of(dataset)
            restore = scorer.state.snapshot()

        def score(batch: Any) -> np.ndarray:
            with self.scope():
                return self._counts(scorer, scorer.evaluate_batch(batch, tf.constant(_ALL, tf.int64)).numpy())

        for done, batch in enumerate(dataset if steps is None else dataset.take(steps)):
            try:
                watch.between(done, int(watch.wanted()))
            except Exception:
                with self.scope():
                    restore()  # the evaluation will begin again
                raise
            yield partial(score, batch)

    def _reader(self) -> ParameterReader:
        return self._tables.evaluation_reader()

    def _scorer_of(self, dataset: tf.data.Dataset) -> Scorer:
        spec = dataset.element_spec
        if repr(spec) not in self._scorers:
            self._scorers[repr(spec)] = Scorer(self._step, self._totals, spec, self._seeds, self._reader)
        return self._scorers[repr(spec)]

    def _counts(self, scorer: Scorer, counted: np.ndarray) -> np.ndarray:
        """What was counted; applies the changes to the state."""
        counted, changed = np.split(counted, [self._totals.size])
        with self.scope():
            scorer.state.apply(changed, changed)
        return counted

    def count(self, data: DatasetFunction, shards: Sequence[Shard]) -> np.ndarray:
        """See `Engine.count`."""
        return np.array([count(data, shard) for shard in shards], np.float64)

    def least(self, value: int) -> int:
        """See `Engine.least`."""
        return value

    def total(self, values: np.ndarray) -> np.ndarray:
        """Only the chief runs the loop."""
        return values

    def share_variables(self) -> None:
        """Does nothing: each variable is stored once."""

    def share_changes(self) -> None:
        """Does nothing, see `share_variables`."""

    def read_updates(self) -> None:
        """Does nothing: updates are made where the variables are."""

    def settle(self, step: int) -> None:
        """See `Engine.settle`."""
        with self.scope():
            self._seeds.write(step)


def _where(counts: tf.Tensor | None, new: Tensors, old: Tensors) -> Tensors:
    """Returns new values if a micro-batch counts, otherwise the old ones."""
    if counts is None:
        return new
    pairs = zip(new, old, strict=True)
    return [value if value is before else tf.where(counts, value, before) for value, before in pairs]


def _awaited(stages: Sequence[int], gradients: Sequence[Any]) -> list[tuple[int, tf.Tensor]]:
    """Returns what ends a micro-batch in each stage: of its gradients, what is computed before those of the others."""
    pairs = zip(stages, gradients, strict=True)
    return [(stage, computed_alone(gradient)) for stage, gradient in pairs if gradient is not None]


def _log_unused(rules: Rules) -> None:
    """Logs the rules that have no effect with this strategy."""
    unused = {
        "updates": rules.updates != Updates(),
        "wire": rules.wire != DEFAULT_RULES.wire,
        "jit": rules.jit is not False,
    }
    for key in (key for key, given in unused.items() if given):
        log.info("%s is ignored: it does not apply to model_parallel", key)
