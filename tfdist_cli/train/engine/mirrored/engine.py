"""The engine of one process, `MirroredStrategy` and `MultiWorkerMirroredStrategy`: replicas take each step together.

Each replica computes gradients of its own batch. All gradients of a step cross the network as one packed tensor, in the
wire's type, and are summed; those of large tables as rows. Each replica applies the same update to its own copy of the
variables (`replica_steps.py`). Losses, metrics, examples, moving statistics and votes for a pause are summed once at
the end of an execution, in float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.divided import DividedBatches, part
from tfdist_cli.train.data.length import count
from tfdist_cli.train.data.pipeline import Consumed, ended_early, next_batch
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.engine.base import DEFAULT_RULES, EvaluationWatch, Execution, Pause, Rules, Sharing
from tfdist_cli.train.engine.batch_sizes import BatchSizes
from tfdist_cli.train.engine.fallback import FirstExecution, attempted
from tfdist_cli.train.engine.mirrored import memory_updates
from tfdist_cli.train.engine.mirrored.collectives import Collectives, Membership
from tfdist_cli.train.engine.mirrored.memory_updates import MemoryUpdates
from tfdist_cli.train.engine.mirrored.replica_steps import ReplicaSteps, StepsTaken
from tfdist_cli.train.engine.mirrored.scoring import Scoring
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.engine.table_rows import TableRows
from tfdist_cli.train.engine.unrolling import unrolled_steps
from tfdist_cli.train.layers.dynamic_tables import refuse_dynamic_tables, require_row_updates
from tfdist_cli.train.model.jit import choose_xla, run_locally
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.model_checks import check_overwritten
from tfdist_cli.train.model.rng.counters import SeedCounters, numbers_after
from tfdist_cli.train.model.train_step import ModelStep, values
from tfdist_cli.train.optimizers.apply import (
    disable_gradient_reduction,
    innermost,
    leaf_optimizers,
    supports_sparse_updates,
)
from tfdist_cli.train.tf_compat.distribute import updates_apart
from tfdist_cli.train.tf_compat.functions import SINGLE_THREADED, may_run_in_order, rehearse
from tfdist_cli.train.tf_compat.op_errors import summary
from tfdist_cli.train.variables.chiefs_values import copy_from_chief, differing
from tfdist_cli.train.variables.replicas import assigned_variables

log = logging.getLogger("tfdist")


class MirroredEngine:
    """Synchronous data-parallel training.

    Args:
        step: the model's pure functions, built under the strategy's scope.
        strategy: `MultiWorkerMirroredStrategy`, `MirroredStrategy`, or TensorFlow's default strategy.
        element_spec: the `tf.TypeSpec`s of a replica's batch.
        membership: the tasks that train together.
        rules: how gradients become updates.
    """

    synchronous = one_by_one = is_current = True
    max_steps_per_execution = 10
    _iterator: Any = None
    _dataset: Any = None
    _read = Consumed()

    def __init__(
        self,
        step: ModelStep,
        strategy: tf.distribute.Strategy,
        element_spec: Any,
        membership: Membership,
        rules: Rules = DEFAULT_RULES,
    ) -> None:
        self._step = step
        self._rules = rules
        self._strategy = strategy
        self._assigned = assigned_variables(strategy)
        self._members = membership
        self._collectives = Collectives(strategy, membership)
        self._replicas = self._collectives.replicas
        self._check_tables()
        if self._collectives.on_gpus and rules.wire == "bfloat16":
            log.info("wire: values are rounded to bfloat16, but cross as float32 between GPUs; use float16 for less")
        self.is_chief = membership.index == 0
        self._divided, self._sizes = self._new_division(element_spec)
        if self._divided:
            element_spec, step.examples_per_batch = self._divided.element_spec, self._divided.batch
        self._element_spec = element_spec
        step.batches_per_update, step.sums_gradients = self._replicas, True
        check_overwritten(step)
        self.workers = len(membership.tasks)
        self.sharers = self._replicas
        self._totals = MetricTotals(step)
        self._seeds = SeedCounters(step, element_spec, self._replicas)
        self._own, self._averaged = self._assigned_state()
        self._functions: dict[int, tuple[Any, str]] = {}
        self._executor_logged = False
        self._scoring = Scoring(step, self._totals, self._seeds, self._collectives, self.scope, self._assigned)
        self._data: Callable[[], tf.data.Dataset] | None = None
        for optimizer in step.optimizers:
            disable_gradient_reduction(optimizer)
        self._check_accumulation()
        tables = self._table_rows()
        step.jit, self._operations = self._chiefs_path(tables)
        self._memory = self._memory_updates()
        self._replica_steps = self._steps_with(tables)
        with self.scope():
            self._updates_by_xla = self._replica_steps.updates_compile(element_spec, self._totals)
        self._taken = 0  # steps of this launch
        self._first_execution = FirstExecution(
            lambda: [*step.parameters, *step.saved_state, *step.optimizer_variables],
            self.scope,
            self.total,
            self._take_standard_path,
            logs=self.is_chief,
        )

    def _assigned_state(self) -> tuple[list[int], tuple[int, ...]]:
        """The indices of state variables of which each replica keeps its own, and of those that become the mean.

        Seeds are computed. Other integers are the same on all replicas, and so is their mean.
        """
        recurrent = {id(variable) for variable in self._step.recurrent_state} if self._replicas > 1 else set()
        own = [index for index, variable in enumerate(self._step.state) if id(variable) in recurrent]
        assigned = self._step.assigned_state(self._element_spec)
        return own, self._seeds.exclude([index for index in assigned if index not in own])

    def _check_tables(self) -> None:
        """Checks that dynamic tables, if the model has any, can be trained."""
        step = self._step
        if self._replicas > 1:
            refuse_dynamic_tables(step.model, "mirrored workers")
        possible = not step.updates_within and supports_sparse_updates(step.optimizer, step.parameters)
        require_row_updates(step.model, possible=possible)

    def _new_division(self, element_spec: Any) -> tuple[DividedBatches | None, BatchSizes | None]:
        """How the examples of a step are divided among the replicas, if by speed."""
        if self._rules.updates.batch != "proportional" or len(self._members.tasks) == 1:
            return None, None
        divided = DividedBatches.of(element_spec, self._replicas)
        return divided, BatchSizes(self._replicas, divided.batch, logs=self.is_chief)

    def begin_again(self) -> None:
        """Does nothing: no failure outlasts a call."""

    def scope(self) -> AbstractContextManager[Any]:
        """See `Engine.scope`."""
        return self._strategy.scope()

    def open(self, data: DatasetFunction, *, share: Sharing, step: int, batches: int) -> None:
        """Opens this task's part of the data."""
        self._seeds.start_at(step)
        self._read = Consumed(data, batches)
        index, count = self._members.index, self.workers
        done = batches // self.workers
        shard = Shard(index, count, index, done) if share == "split" else Shard(0, 1, index, done)
        self._data = partial(checked, data, shard)
        if self._divided:
            self._data = partial(self._divided.whole(data), Shard(step=batches))
        self._dataset = self._data()
        self._iterator = iter(self._dataset)

    def resume_workers(self, taken: Mapping[str, int]) -> None:
        """Does nothing: all workers take each step."""

    @property
    def worker_steps(self) -> dict[str, int]:
        """See `Engine.worker_steps`."""
        return {}

    def begin_epoch(self) -> None:
        """Does nothing: mirrored workers stay the same."""

    def begin_pass(self) -> None:
        """See `Engine.begin_pass`."""
        dataset = self._read.next_pass()
        if dataset is not None:
            self._dataset, self._iterator = dataset, iter(dataset)

    def change_workers(self, step: int) -> bool:  # noqa: ARG002 as above
        """Does nothing, see `begin_epoch`."""
        return False

    def close(self) -> None:
        """Ends the reading of the data: no thread of TensorFlow may call Python when the interpreter ends."""
        self._iterator = self._dataset = self._data = None
        self._read.close()
        self._read = Consumed()

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`."""

        def executions(taken: int, count: int) -> Iterator[Execution]:
            return self._executions(count, first + taken, partial(self._size, size) if adapts else lambda: size, pause)

        for execution in self._first_execution.run(executions, steps, attempt=size, pause=pause):
            self._read.count(len(execution.losses) * self._replicas)
            yield execution

    def _executions(self, steps: int, first: int, wanted: Callable[[], int], pause: Pause) -> Iterator[Execution]:
        with self.scope(), self._assigned.paused():
            if self._memory:
                self._memory.begin()
        yield from self._executions_in_turn(steps, first, wanted, pause)
        with self.scope(), self._assigned.paused():
            if self._memory:
                self._memory.end()

    def _executions_in_turn(
        self, steps: int, first: int, wanted: Callable[[], int], pause: Pause
    ) -> Iterator[Execution]:
        left, start = steps, first
        while left and not pause.agreed():
            size = wanted()
            count = size if left >= size and self._rules.optimized else 1
            vote = tf.constant(float(pause.wanted()), tf.float64)
            with self.scope(), self._collectives.failures_named(), self._assigned.paused():
                try:
                    numbers = tf.constant(self._seeds.numbers(start), tf.int64), vote, *self._bounds()
                    summary = self._execute(count, self._iterator, *numbers).numpy()
                except tf.errors.OutOfRangeError as error:
                    raise ended_early(f"{self._members.tasks[self._members.index]}'s data") from error
            self._taken += count
            yield self._execution(start, count, summary)
            left, start = left - count, start + count

    def _bounds(self) -> list[tf.Tensor]:
        """Where the replicas' examples begin in those of a step, and the end; nothing if all batches are equal."""
        return [tf.constant(self._sizes.bounds, tf.int64)] if self._sizes else []

    def _chiefs_path(self, tables: TableRows) -> tuple[bool, int]:
        """Whether XLA compiles the train step, and the operations of a step; the chief's, since all take one path."""
        wanted = self._rules.jit
        if wanted == "auto" and tables:
            log.info(
                "jit: training without XLA, which would compile again for each number of rows that a batch looks up"
            )
            wanted = False
        faster = choose_xla(self._step, self._element_spec, wanted, run_locally)
        operations = self._step.operation_count(self._element_spec)
        decided = self.total(np.array([faster, operations], np.float64) * self.is_chief)
        return bool(decided[0]), int(decided[1])

    def _table_rows(self) -> TableRows:
        gathers = self._replicas > 1
        rules = replace(self._rules, embeddings=None) if gathers and self._collectives.gather is None else self._rules
        return TableRows(self._step, self._element_spec, rules, batches=self._replicas, gathers=gathers)

    def _steps_with(self, tables: TableRows) -> ReplicaSteps:
        self._scoring.read_by(tables.evaluation_reader)
        return ReplicaSteps(self._step, self._rules, self._collectives, tables, self._seeds)

    def _memory_updates(self) -> MemoryUpdates | None:
        """The steps of replicas that update parts, in memory of their host; None if not all tasks take them."""
        step, spec, rules = self._step, self._element_spec, self._rules
        suit = memory_updates.suits(step, spec, rules, self._collectives)
        if self.total(np.array([float(suit)]))[0] < self.workers or self.workers == 1:
            return None
        made = MemoryUpdates(step, spec, rules, self._strategy, self._collectives, self._seeds)
        if not made.shared:
            return None
        step.sums_gradients = False  # they become means where they are updated
        return made

    def _size(self, wanted: int) -> int:
        """Steps in the next execution, the same on all tasks."""
        return wanted if self._rules.builds_first else unrolled_steps(wanted, self._operations, self._taken)

    def operations(self) -> int:
        """See `Engine.operations`."""
        return self._operations

    def evaluate(self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch) -> MetricTotals:
        """See `Engine.evaluate`; each task scores its own shard of the data, once."""
        return self._scoring.evaluate(data, steps=steps, watch=watch)

    def test_steps(
        self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch
    ) -> Iterator[Callable[[], np.ndarray]]:
        """See `Engine.test_steps`."""
        return self._scoring.test_steps(data, steps=steps, watch=watch)

    def count(self, data: DatasetFunction, shards: Sequence[Shard]) -> np.ndarray:
        """See `Engine.count`; each task counts its own shard, and the chief the one that all of them read."""
        index, counted = self._members.index, np.zeros(len(shards))
        if index < len(shards):
            counted[index] = count(data, shards[index])
        return self.total(counted)

    def least(self, value: int) -> int:
        """See `Engine.least`."""
        own = np.zeros(self.workers)
        own[self._members.index] = value
        return int(self.total(own).min())

    def total(self, values: np.ndarray) -> np.ndarray:
        """See `Engine.total`."""
        return self._collectives.total(values)

    def share_variables(self) -> None:
        """See `Engine.share_variables`."""
        if self.workers > 1:
            self._share(differing(self._variables(), self._collectives.sum, is_chief=self.is_chief))

    def share_changes(self) -> None:
        """See `Engine.share_changes`."""
        if self.workers == 1:
            return
        variables = self._variables()
        changed = self.total(np.array([self.is_chief and self._assigned.contains(variable) for variable in variables]))
        self._share([variable for variable, any_change in zip(variables, changed, strict=True) if any_change])

    def read_updates(self) -> None:
        """Does nothing: each task updates its variables."""

    def _variables(self) -> list[keras.Variable]:
        return self._step.parameters + self._step.state + self._step.optimizer_variables

    def _share(self, variables: list[keras.Variable]) -> None:
        copy_from_chief(variables, self._collectives.sum, self.scope, is_chief=self.is_chief)
        self._assigned.clear()

    def settle(self, step: int) -> None:
        """See `Engine.settle`."""
        with self.scope(), self._assigned.paused():
            self._seeds.write(step)

    def leave(self) -> None:
        """Waits until every task calls it: if one exited earlier, the others would fail."""
        self.total(np.zeros(1))

    def _take_standard_path(self) -> None:
        self._rules = replace(self._rules, optimized=False)
        self._step.jit, self._updates_by_xla = self._rules.jit is True, False
        self._memory, self._step.sums_gradients = None, True
        self._replica_steps = self._steps_with(self._table_rows())
        self._functions.clear()
        if self._data:
            self._iterator = iter(self._data())

    def _execute(self, count: int, *args: Any) -> tf.Tensor:
        if count not in self._functions:
            function = self._execution_function(count)
            self._functions[count] = function, SINGLE_THREADED if self._runs_in_order(function, *args) else ""
        function, executor = self._functions[count]
        with tf.experimental.function_executor_type(executor):
            return function(*args)

    def _runs_in_order(self, function: Any, iterator: Any, *args: Any) -> bool:
        """Whether this task, like all others, runs a function with TensorFlow's single-threaded executor."""
        if not (self._collectives.can_rehearse and self._rules.optimized):
            return False
        wanted = may_run_in_order(function, iterator, *args)
        attempt = partial(rehearse, function, self._dataset.take(0), *args) if wanted else lambda: None
        failure = attempted(attempt, self.total)
        if failure is not None and self.is_chief and not self._executor_logged:
            self._executor_logged = True
            log.info(
                "TensorFlow's default executor runs the operations, not the single-threaded one: %s", summary(failure)
            )
        return wanted and failure is None

    def _execution(self, first: int, count: int, summary: np.ndarray) -> Execution:
        metrics, replicas = self._totals.size, self._replicas
        timed = count * replicas if self._sizes else 0
        losses, overflows, metric_sums, examples, votes, seconds, phases = np.split(
            summary, np.cumsum([count, count, metrics, replicas, 1, timed])
        )
        if self._sizes:
            for each in seconds.reshape(-1, replicas).tolist():
                self._sizes.observe((examples / count).astype(int).tolist(), each)
        self._check_overflow(first, losses, overflows)
        by_task = examples.reshape(self.workers, self._collectives.local).sum(axis=1)
        names = self._members.tasks
        steps = dict.fromkeys(names, count)
        consumed = {name: int(number) for name, number in zip(names, by_task, strict=True)}
        own = phases.reshape(self.workers, self._collectives.local, -1).mean(axis=1) if phases.size else ()
        return Execution(
            first, losses, metric_sums, steps, consumed, int(votes[0]), phases=dict(zip(names, own, strict=False))
        )

    def _execution_function(self, count: int) -> Any:
        """`count` steps of all replicas as one function."""
        step, totals, replicas = self._step, self._totals, self._replicas
        averaged, whole = self._averaged, self._weight_of_all
        own_steps = self._memory or self._replica_steps
        together, take = count, own_steps.take
        if self._updates_by_xla:
            together, take = (
                unrolled_steps(count, self._operations, 0),
                partial(_compiled, self._replica_steps.compiled_by_xla()),
            )
        elif count > 1 and self._copies_steps:
            take = own_steps.take_copies

        def replica_steps(batches: Any, numbers: tf.Tensor, vote: tf.Tensor, *bounds: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
            weight, timer = self._weight(replica, bounds), StepTimer(self._rules.phases)
            taken = StepsTaken(values(step.state), totals.initial_values())
            for start in range(0, count, together):
                some = batches[start : start + together]
                taken += take(some, numbers_after(numbers, start), taken.state, taken.metrics, timer, bounds)
            for index in self._own:
                tf.raw_ops.AssignVariableOp(resource=step.state[index].value.handle, value=taken.state[index])
            own = tf.one_hot(replica, replicas, dtype=tf.float64)
            total = [tf.reshape(tf.cast(taken.state[index], tf.float64), [-1]) * weight for index in averaged]
            losses = tf.cast(tf.stack(taken.losses), tf.float64) * weight / whole
            # Every local replica votes for its task: any vote at all is one.
            counted = [tf.cast(tf.stack(taken.overflows), tf.float64), totals.pack(taken.metrics, list(taken.logs))]
            phases = [tf.reshape(own[:, None] * each, [-1]) for each in timer.totals()]
            times = [own * each for each in taken.seconds]
            parts = [losses, *counted, own * tf.cast(taken.examples, tf.float64), vote[None], *times, *phases, *total]
            return self._collectives.all_reduce(tf.concat(parts, axis=0), context)

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor, vote: tf.Tensor, *bounds: tf.Tensor) -> tf.Tensor:
            batches = self._batches(iterator, count, *bounds)
            summed = self._run(_after_reading(replica_steps), (batches, numbers, vote, *bounds))
            summary = self._strategy.experimental_local_results(summed)[0]
            return self._state_kept(summary)

        return execute

    @property
    def _copies_steps(self) -> bool:
        """Whether the steps of a function may be copies of one step: nothing is measured between them."""
        plain = not (self._rules.phases or self._sizes)
        return plain and self._rules.optimized and self._collectives.can_rehearse

    def _state_kept(self, summary: tf.Tensor) -> tf.Tensor:
        """Assigns the mean of the replicas' state, whose sum is at the end of a summary; returns what is before it."""
        averaged = [self._step.state[index] for index in self._averaged]
        sizes = [int(np.prod(variable.shape)) for variable in averaged]
        # All sizes are given: TensorFlow's kernel fails for a single part of size -1.
        counted, *sums = tf.split(summary, [int(summary.shape[0]) - sum(sizes), *sizes])
        for variable, own in zip(averaged, sums, strict=True):
            mean = own / self._weight_of_all  # divided after the sum: three thirds do not sum to one
            variable.value.assign(tf.cast(tf.reshape(mean, variable.shape), variable.dtype))
        return counted

    def _weight(self, replica: tf.Tensor, bounds: Sequence[tf.Tensor]) -> tf.Tensor:
        """What a replica's loss and state count in their mean: its examples in a step; 1 if batches are equal."""
        weights = [ends[replica + 1] - ends[replica] for ends in bounds]
        return tf.cast(weights[0], tf.float64) if weights else tf.constant(1.0, tf.float64)

    @property
    def _weight_of_all(self) -> int:
        return self._replicas * (self._divided.batch if self._divided else 1)

    def _batches(self, iterator: Any, count: int, *bounds: tf.Tensor) -> Any:
        """`count` batches for each local replica: the batches of a step follow each other in the data."""
        first, local = self._collectives.first, self._collectives.local
        places = range(first, first + local)
        if bounds:
            wholes = [next_batch(iterator) for _ in range(count)]
            steps = [[part(whole, bounds[0][at], bounds[0][at + 1]) for at in places] for whole in wholes]
        else:
            steps = [[next_batch(iterator) for _ in places] for _ in range(count)]
        own = list(zip(*steps, strict=True))
        if local == 1:
            return own[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: own[int(tf.get_static_value(context.replica_id_in_sync_group)) - first]
        )

    def _run(self, steps: Callable[..., tf.Tensor], args: tuple[Any, ...]) -> Any:
        """Runs a function on each local replica.

        Keras accumulates gradients, and overwrites parameters with their averages, inside a condition, where TensorFlow
        cannot synchronize replicas. It need not: each updates its own copies.
        """
        conditional = any(
            inner.gradient_accumulation_steps or (inner.use_ema and inner.ema_overwrite_frequency)
            for optimizer in self._step.optimizers
            for inner in leaf_optimizers(optimizer)
        )
        apart = conditional and tf.distribute.has_strategy()
        with updates_apart(self._strategy) if apart else nullcontext():
            return self._strategy.run(steps, args=args)

    def _check_accumulation(self) -> None:
        for optimizer in self._step.optimizers:
            inner = innermost(optimizer)
            if self._replicas > 1 and inner is not optimizer and inner.gradient_accumulation_steps:
                raise TrainingError(
                    "gradient_accumulation_steps and loss scaling (mixed_float16) cannot be combined on several "
                    "replicas",
                    code="loss-scaling-unsupported",
                    hint="use the mixed_bfloat16 policy, or larger batches",
                )

    def _check_overflow(self, first: int, losses: np.ndarray, overflows: np.ndarray) -> None:
        """Ends the training if a gradient is infinite because of the wire's type, not because the training diverges."""
        if any(isinstance(each, keras.optimizers.LossScaleOptimizer) for each in self._step.optimizers):
            return  # it skips such an update, and lowers its scale
        overflown = np.flatnonzero(overflows)
        if overflown.size and np.isfinite(losses[: overflown[0] + 1]).all():
            raise TrainingError(
                f"the gradients of step {first + overflown[0]} exceed the range of float16, the type of the wire",
                code="wire-overflow",
                hint="use wire: bfloat16, which has the range of float32, and continue from the last checkpoint",
            )


def _compiled(steps: Any, batches: Any, numbers: tf.Tensor, state: Any, metrics: Any, *_: Any) -> StepsTaken:
    """What steps compiled by XLA have resulted in."""
    return StepsTaken(**steps(batches, numbers, state, metrics))


def _after_reading(steps: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Delays all operations of steps until the batches have been read, also those that need none: counting updates."""

    def run(batches: Any, *args: Any) -> tf.Tensor:
        with tf.control_dependencies(tf.nest.flatten(batches, expand_composites=True)):
            return steps(batches, *args)

    return run
