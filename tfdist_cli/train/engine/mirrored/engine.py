"""The engine of one process, `MirroredStrategy` and `MultiWorkerMirroredStrategy`: replicas take each step together.

Each replica computes gradients of its own batch. All gradients of a step cross the network as one packed tensor, in the
wire's type, and are summed; those of large tables as rows. Each replica applies the same update to its own copy of the
variables. Losses, metrics, examples, moving statistics and votes for a pause are summed once at the end of an
execution, in float64.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.cluster.all_reduce import AllReduce
from tfdist_cli.train.data.divided import DividedBatches, part
from tfdist_cli.train.data.pipeline import Consumed, DatasetFunction, Shard, checked, ended_early, next_batch
from tfdist_cli.train.engine.base import DEFAULT_RULES, Execution, Pause, Rules, Sharing
from tfdist_cli.train.engine.batch_sizes import BatchSizes
from tfdist_cli.train.engine.fallback import FirstExecution, attempted, reason
from tfdist_cli.train.engine.mirrored.gradient_packing import GradientPacking
from tfdist_cli.train.engine.mirrored.row_packing import RowPacking, TableGradient, rows_are_cheaper
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.engine.unrolling import unrolled_steps
from tfdist_cli.train.layers.dynamic_tables import refuse_dynamic_tables, require_row_updates
from tfdist_cli.train.model.assignments import Assigned
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.evaluation import batch_evaluation_function, evaluation_function
from tfdist_cli.train.model.evaluation_state import EvaluationState
from tfdist_cli.train.model.jit import choose_xla, compiles, run_locally
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, values
from tfdist_cli.train.optimizers.apply import (
    changed_by_rows,
    disable_gradient_reduction,
    innermost,
    leaf_optimizers,
    learning_rate_at,
    substituted,
    supports_sparse_updates,
)
from tfdist_cli.train.optimizers.kernels import rows_of
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.optimizers.registry import fused
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.distribute import updates_apart
from tfdist_cli.train.tf_compat.functions import SINGLE_THREADED, may_run_in_order, rehearse
from tfdist_cli.train.tf_compat.keras_optimizer import LEARNING_RATE
from tfdist_cli.train.tf_compat.patching import original
from tfdist_cli.train.tf_compat.variables import Read
from tfdist_cli.train.variables.replicas import assigned_variables

log = logging.getLogger("tfdist")


@dataclass(frozen=True)
class Membership:
    """The tasks that train together, and the one that this process is.

    Args:
        tasks: their names in the order of their replicas, `("chief:0", "worker:0")`.
        index: this process's index among them; 0 is the chief.
        all_reduce: sums over them; None if TensorFlow's collectives do.
    """

    tasks: tuple[str, ...] = ("chief:0",)
    index: int = 0
    all_reduce: AllReduce | None = None


class MirroredEngine:
    """Synchronous data-parallel training.

    Args:
        step: the model's pure functions, built under the strategy's scope.
        strategy: `MultiWorkerMirroredStrategy`, `MirroredStrategy`, or TensorFlow's default strategy.
        element_spec: the `tf.TypeSpec`s of a replica's batch.
        membership: the tasks that train together.
        rules: how gradients become updates.
    """

    synchronous = one_by_one = True
    max_steps_per_execution = 10
    _iterator: Any = None
    _dataset: Any = None
    _read = Consumed()
    _evaluation: Any = None
    _batch_evaluation: Any = None

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
        self._replicas: int = strategy.num_replicas_in_sync
        self._check_tables()
        self._local = self._replicas // len(membership.tasks)
        self._sums_on_gpus = self._replicas > 1 and "GPU" in strategy.extended.worker_devices[0]
        if self._sums_on_gpus and rules.wire == "bfloat16":
            log.info("wire: values are rounded to bfloat16, but cross as float32 between GPUs; use float16 for less")
        self.is_chief = membership.index == 0
        self._divided, self._sizes = self._new_division(element_spec)
        if self._divided:
            element_spec, step.examples_per_batch = self._divided.element_spec, self._divided.batch
        self._element_spec = element_spec
        step.batches_per_update, step.sums_gradients = self._replicas, True
        self._rate = RateScaling(rules.learning_rate, self._replicas)
        self._measures_phases = rules.phases
        self.workers = len(membership.tasks)
        self.sharers = self._replicas
        self._totals = MetricTotals(step)
        self._seeds = SeedCounters(step, element_spec, self._replicas)
        self._own, self._averaged = self._assigned_state()
        self._functions: dict[int, tuple[Any, str]] = {}
        self._executor_logged = False
        self._scored_state: EvaluationState | None = None
        self._data: Callable[[], tf.data.Dataset] | None = None
        self._sum = membership.all_reduce.sum if membership.all_reduce else self._summing_function()
        for optimizer in step.optimizers:
            disable_gradient_reduction(optimizer)
        self._check_accumulation()
        step.jit, self._operations = self._chiefs_path()
        self._tables = self._tables_by_rows()
        self._updates_by_xla = self._updates_compile()
        self._taken = 0  # steps of this launch
        self._first_execution = FirstExecution(
            lambda: [*step.parameters, *step.state, *step.optimizer_variables],
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

    def change_workers(self, step: int) -> bool:  # noqa: ARG002 as above
        """Does nothing, see `begin_epoch`."""
        return False

    def close(self) -> None:
        """Does nothing, see `begin_epoch`."""

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`."""

        def executions(taken: int, count: int) -> Iterator[Execution]:
            return self._executions(count, first + taken, partial(self._size, size) if adapts else lambda: size, pause)

        for execution in self._first_execution.run(executions, steps, attempt=size, pause=pause):
            self._read.count(len(execution.losses) * self._replicas)
            yield execution

    def _executions(self, steps: int, first: int, wanted: Callable[[], int], pause: Pause) -> Iterator[Execution]:
        left, start = steps, first
        with self.scope(), self._assigned.paused():
            self._seeds.write_starts()
        while left and not pause.agreed():
            size = wanted()
            count = size if left >= size and self._rules.optimized else 1
            vote = tf.constant(float(pause.wanted()), tf.float64)
            with self.scope(), self._failures_named(), self._assigned.paused():
                try:
                    numbers = tf.constant(start, tf.int64), vote, *self._bounds()
                    summary = self._execute(count, self._iterator, *numbers).numpy()
                except tf.errors.OutOfRangeError as error:
                    raise ended_early(f"{self._members.tasks[self._members.index]}'s data") from error
            self._taken += count
            yield self._execution(start, count, summary)
            left, start = left - count, start + count

    def _bounds(self) -> list[tf.Tensor]:
        """Where the replicas' examples begin in those of a step, and the end; nothing if all batches are equal."""
        return [tf.constant(self._sizes.bounds, tf.int64)] if self._sizes else []

    def _chiefs_path(self) -> tuple[bool, int]:
        """Whether XLA compiles the train step, and the operations of a step; the chief's, since all take one path."""
        faster = choose_xla(self._step, self._element_spec, self._rules.jit, run_locally)
        operations = self._step.operation_count(self._element_spec)
        decided = self.total(np.array([faster, operations], np.float64) * self.is_chief)
        return bool(decided[0]), int(decided[1])

    def _updates_compile(self) -> bool:
        """Whether XLA compiles steps together with their updates: those of one replica, which no all-reduce parts.

        It takes far longer to sum the gradients of the same row than TensorFlow's own operations.
        """
        fast = self._replicas == 1 and self._rules.optimized and not self._measures_phases
        if not (self._step.jit and fast) or self._step.lookups(self._element_spec):
            return False
        numbers, step = tf.TensorSpec([], tf.int64), self._step
        with self.scope():
            return compiles(self._xla_steps(), [self._element_spec], numbers, step.state, self._totals.initial_values())

    def _tables_by_rows(self) -> EmbeddingTables:
        """The tables whose rows are read and updated where they are, without passing over the other rows."""
        step, spec = self._step, self._element_spec
        # XLA would compile each number of rows anew; a step of the model's own computes gradients of whole tables.
        whole = step.jit or step.own_step or step.updates_within or self._least_table is None
        lookups = {} if whole else step.lookups(spec)
        sent = [step.parameters[n] for n, count in lookups.items() if self._sends_rows(step.parameters[n], count)]
        changed = changed_by_rows(step.optimizer, sent) if sent else []
        return EmbeddingTables(step, spec, self._least_table if changed else None, among=changed)

    @property
    def _least_table(self) -> int | None:
        """The size in bytes from which a table's gradient may cross as rows; None if all cross whole."""
        gathers = self._members.all_reduce is not None and self._local == 1 and self._rules.optimized
        return self._rules.embeddings.min_bytes if self._rules.embeddings and gathers else None

    def _sends_rows(self, table: keras.Variable, lookups: int | None) -> bool:
        """Whether a gradient with the rows of some lookups crosses as rows."""
        if self._least_table is None or len(table.shape) < 2:
            return False
        size = int(np.prod(table.shape)) * tf.as_dtype(table.dtype).size
        return size >= self._least_table and rows_are_cheaper(int(table.shape[0]), lookups, self._replicas)

    def _size(self, wanted: int) -> int:
        """Steps in the next execution, the same on all tasks."""
        return unrolled_steps(wanted, self._operations, self._taken)

    def operations(self) -> int:
        """See `Engine.operations`."""
        return self._operations

    def evaluate(self, data: DatasetFunction, *, steps: int | None) -> MetricTotals:
        """Each task scores its own shard of the data, once."""
        dataset, limit = self._to_score(data, steps)
        with self.scope():
            scored = self._scoring(dataset)
            if self._evaluation is None:
                self._evaluation = evaluation_function(self._step, self._totals, scored)
            counted = self._evaluation(iter(dataset), tf.constant(limit, tf.int64), self._shard()).numpy()
        totals = MetricTotals(self._step, training=False)
        totals.add(self._summed_counts(counted))
        return totals

    def test_steps(self, data: DatasetFunction, *, steps: int | None) -> Iterator[Callable[[], np.ndarray]]:
        """See `Engine.test_steps`; a task that has no batch left adds zeros to the sums of the others."""
        dataset, left = self._to_score(data, steps)
        iterator = iter(dataset)
        with self.scope():
            scored = self._scoring(dataset)
        if self._batch_evaluation is None:
            spec = dataset.element_spec
            self._batch_evaluation = batch_evaluation_function(self._step, self._totals, scored, spec)
        while True:
            batch = iterator.get_next_as_optional() if left else None
            own = batch.get_value() if batch is not None and batch.has_value() else None
            if not self.total(np.array([float(own is not None)]))[0]:
                return
            yield partial(self._scored, own)
            left -= 1

    def total(self, values: np.ndarray) -> np.ndarray:
        """See `Engine.total`."""
        if self.workers == 1:
            return values
        return np.asarray(self._sum(tf.constant(values, tf.float64)))

    def share_variables(self) -> None:
        """See `Engine.share_variables`."""
        if self.workers > 1:
            self._share(self._variables())

    def share_changes(self) -> None:
        """See `Engine.share_changes`."""
        if self.workers == 1:
            return
        variables = self._variables()
        changed = self.total(np.array([self.is_chief and self._assigned.contains(variable) for variable in variables]))
        self._share([variable for variable, any_change in zip(variables, changed, strict=True) if any_change])

    def _variables(self) -> list[keras.Variable]:
        return self._step.parameters + self._step.state + self._step.optimizer_variables

    def _share(self, variables: list[keras.Variable]) -> None:
        """Copies some of the chief's variables to every task."""
        for dtype in dict.fromkeys(variable.dtype for variable in variables):
            group = [variable for variable in variables if variable.dtype == dtype]
            carrier = tf.as_dtype(dtype) if tf.as_dtype(dtype).is_floating else tf.int64
            flat = tf.concat([tf.reshape(tf.cast(value, carrier), [-1]) for value in values(group)], axis=0)
            shared = self._sum(flat if self.is_chief else tf.zeros_like(flat))
            parts = tf.split(shared, [int(np.prod(variable.shape)) for variable in group])
            with self.scope():
                for variable, part in zip(group, parts, strict=True):
                    variable.value.assign(tf.cast(tf.reshape(part, variable.shape), dtype))
        self._assigned.clear()

    def settle(self, step: int) -> None:
        """See `Engine.settle`."""
        with self.scope(), self._assigned.paused():
            self._seeds.write(step)

    def leave(self) -> None:
        """Waits until every task calls it: if one exited earlier, the others would fail."""
        self.total(np.zeros(1))

    def _to_score(self, data: DatasetFunction, steps: int | None) -> tuple[tf.data.Dataset, int]:
        """This task's shard of the data to score, and its number of batches; -1 for all."""
        index, count = self._members.index, self.workers
        limit = -1 if steps is None else steps // count + (index < steps % count)
        return checked(data, Shard(index, count, index)), limit

    def _scored(self, batch: Any) -> np.ndarray:
        """The sum over all tasks of what was counted in one batch of each; this task's batch may be None."""
        counted = np.zeros(self._totals.size + (self._scored_state.size if self._scored_state else 0))
        if batch is not None:
            with self.scope():
                counted = self._batch_evaluation(batch, self._shard()).numpy()
        return self._summed_counts(counted)

    def _scoring(self, dataset: tf.data.Dataset) -> EvaluationState:
        if self._scored_state is None:
            self._scored_state = EvaluationState(self._step, dataset.element_spec, self._seeds)
        return self._scored_state

    def _shard(self) -> tf.Tensor:
        return tf.constant([self._members.index, self.workers], tf.int64)

    def _summed_counts(self, counted: np.ndarray) -> np.ndarray:
        """The sum over all tasks of what was counted; applies the changes that they have made to the state."""
        own = counted[self._totals.size :]
        counted, changed = np.split(self.total(counted), [self._totals.size])
        with self.scope(), self._assigned.paused():
            if self._scored_state:
                self._scored_state.apply(changed, own)
        return counted

    def _take_standard_path(self) -> None:
        self._rules = replace(self._rules, optimized=False)
        self._step.jit, self._updates_by_xla = self._rules.jit is True, False
        self._tables = self._tables_by_rows()
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
        # Several replicas have to run at the same time, and TensorFlow's collectives would not survive a rehearsal.
        alone = self._local == 1 and (self._members.all_reduce or self.workers == 1) and self._rules.optimized
        if not alone:
            return False
        wanted = may_run_in_order(function, iterator, *args)
        attempt = partial(rehearse, function, self._dataset.take(0), *args) if wanted else lambda: None
        failure = attempted(attempt, self.total)
        if failure is not None and self.is_chief and not self._executor_logged:
            self._executor_logged = True
            log.info(
                "TensorFlow's default executor runs the operations, not the single-threaded one: %s", reason(failure)
            )
        return wanted and failure is None

    def _failures_named(self) -> AbstractContextManager[None]:
        """Raises a failed all-reduce as an error that names the task."""
        return self._members.all_reduce.errors_translated() if self._members.all_reduce else nullcontext()

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
        by_task = examples.reshape(self.workers, self._local).sum(axis=1)
        names = self._members.tasks
        steps = dict.fromkeys(names, count)
        consumed = {name: int(number) for name, number in zip(names, by_task, strict=True)}
        own = phases.reshape(self.workers, self._local, -1).mean(axis=1) if phases.size else ()
        return Execution(
            first, losses, metric_sums, steps, consumed, int(votes[0]), phases=dict(zip(names, own, strict=False))
        )

    def _execution_function(self, count: int) -> Any:
        """`count` steps of all replicas as one function."""
        step, totals, replicas = self._step, self._totals, self._replicas
        averaged, whole = self._averaged, self._weight_of_all
        together, take = count, self._take_steps
        if self._updates_by_xla:
            together, take = unrolled_steps(count, self._operations, 0), partial(_taken, self._xla_steps())

        def replica_steps(batches: Any, first: tf.Tensor, vote: tf.Tensor, *bounds: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
            weight, timer = self._weight(replica, bounds), StepTimer(self._measures_phases)
            taken = _Taken(values(step.state), totals.initial_values())
            for start in range(0, count, together):
                some = batches[start : start + together]
                taken += take(some, first + start, taken.state, taken.metrics, timer, bounds)
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
            return self._all_reduce(tf.concat(parts, axis=0), context)

        @tf.function(autograph=False)
        def execute(iterator: Any, first: tf.Tensor, vote: tf.Tensor, *bounds: tf.Tensor) -> tf.Tensor:
            batches = self._batches(iterator, count, *bounds)
            summed = self._run(_after_reading(replica_steps), (batches, first, vote, *bounds))
            summary = self._strategy.experimental_local_results(summed)[0]
            return self._state_kept(summary)

        return execute

    def _take_steps(
        self,
        batches: Sequence[Any],
        first: tf.Tensor,
        state: list[tf.Tensor],
        metrics: list[tf.Tensor],
        timer: StepTimer,
        bounds: Sequence[tf.Tensor],
    ) -> _Taken:
        """Takes a step of a replica with each batch, with its updates; `first` is the number of the first step."""
        step, context = self._step, tf.distribute.get_replica_context()
        replica = tf.cast(context.replica_id_in_sync_group, tf.int64)
        taken = _Taken(state, metrics)
        for number, batch in enumerate(batches):
            timer.end("data", batch)
            state = self._seeds.state_for_step(taken.state, first + number, replica)
            read = _Parameters.read(step, self._tables, batch)
            begun = [time_of(read.values, batch)] if bounds else []
            updates = _ReplicaUpdates(self, context, timer)
            result = step.train(
                read.values, state, taken.metrics, _used_after(batch, begun), read.scope, update=updates.update
            )
            result = replace(result, gradients=read.gradients(result.gradients))
            timer.end("compute", result.gradients)
            ended = [_time_of_one_number(result.gradients) for _ in begun]
            if not step.updates_within:
                updates.make(step.optimizer, _used_after(result.gradients, ended), step.parameters)
            seconds = [end - start for start, end in zip(begun, ended, strict=True)]
            taken += _Taken(
                result.state,
                result.metrics,
                [result.loss],
                [updates.overflow],
                seconds,
                result.examples,
                result.logs,
            )
        return taken

    def _xla_steps(self) -> Any:
        """`_take_steps` with all operations of the steps and of their updates in one program of XLA."""

        def take(batches: Any, first: tf.Tensor, state: Any, metrics: Any) -> Any:
            return vars(self._take_steps(batches, first, state, metrics, StepTimer(on=False), ()))

        return tf.function(take, jit_compile=True, autograph=False)

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
        first = self._members.index * self._local
        places = range(first, first + self._local)
        if bounds:
            wholes = [next_batch(iterator) for _ in range(count)]
            steps = [[part(whole, bounds[0][at], bounds[0][at + 1]) for at in places] for whole in wholes]
        else:
            steps = [[next_batch(iterator) for _ in places] for _ in range(count)]
        own = list(zip(*steps, strict=True))
        if self._local == 1:
            return own[0]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: own[int(tf.get_static_value(context.replica_id_in_sync_group)) - first]
        )

    def apply(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Updates the replica's own copies, with gradients that are the same on all replicas."""
        with ExitStack() as within:
            accumulates = False
            for inner in leaf_optimizers(optimizer):
                # Another local replica may have replaced the rate with the value that it has read.
                own = original(inner, LEARNING_RATE)
                rate = learning_rate_at(own, tf.convert_to_tensor(inner.iterations), self._rate)
                within.enter_context(substituted(inner, {LEARNING_RATE: Read(rate)}))
                accumulates = accumulates or bool(inner.gradient_accumulation_steps)
                if not accumulates and self._rules.optimized:
                    within.enter_context(fused(inner, by_rows=bool(self._tables.tables)))
            optimizer.apply(gradients, variables)

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

    def assign(
        self, variables: Sequence[keras.Variable], own: Sequence[tf.Tensor], context: Any, before: list[Any]
    ) -> list[tf.Tensor]:
        """Assigns the mean over all replicas to the replica's own copies of variables.

        Args:
            variables: the variables.
            own: the replica's values.
            context: the replica's context.
            before: awaited before.

        Returns:
            The means.
        """
        carrier = tf.float64 if any(value.dtype == tf.float64 for value in own) else tf.float32
        flat = tf.concat([tf.reshape(tf.cast(value, carrier), [-1]) for value in own], axis=0)
        means = self._all_reduce(after(flat, before), context) / self._replicas
        pieces = tf.split(means, [int(np.prod(variable.shape)) for variable in variables])
        for variable, piece in zip(variables, pieces, strict=True):
            value = tf.cast(tf.reshape(piece, variable.shape), variable.dtype)
            tf.raw_ops.AssignVariableOp(resource=variable.value.handle, value=value)
        return pieces

    def summed(
        self, gradients: list[Any], variables: list[keras.Variable], context: Any, timer: StepTimer
    ) -> tuple[list[Any], tf.Tensor]:
        """The gradients summed over all replicas, and whether they exceed the range of the wire's type."""
        if self._replicas == 1:
            return gradients, tf.constant(False)
        tables = {
            n: TableGradient(each, tuple(variable.shape), distinct=self._is_looked_up(variable))
            for n, (each, variable) in enumerate(zip(gradients, variables, strict=True))
            if isinstance(each, tf.IndexedSlices) and self._sends_rows(variable, each.values.shape[0])
        }
        dense = [None if n in tables else each for n, each in enumerate(gradients)]
        shapes = [variable.shape for variable in variables]
        packing = GradientPacking(shapes, self._rules.wire, packed=self._rules.optimized)
        summed, overflow = packing.sums(dense, lambda value: self._all_reduce(value, context))
        sent: Any = packing.size(dense)
        if tables and self._members.all_reduce:
            rows = RowPacking(self._rules.wire, self._members.all_reduce.gather)
            for n, own in zip(tables, rows.sums(list(tables.values())), strict=True):
                summed[n] = own if self._is_looked_up(variables[n]) else tf.convert_to_tensor(own)
            overflow |= rows.overflow
            sent += rows.bytes
        timer.add_bytes(lambda: {"reduced": sent})
        timer.end("all_reduce", summed)
        return summed, overflow

    def _is_looked_up(self, variable: keras.Variable) -> bool:
        """Whether steps read and update rows of a table, each once."""
        return any(table.variable is variable for table in self._tables.tables)

    def _all_reduce(self, value: tf.Tensor, context: Any) -> tf.Tensor:
        if self._replicas == 1:
            return value
        if all_reduce := self._members.all_reduce:
            return all_reduce.sum(value)
        dtype = value.dtype
        if self._sums_on_gpus and dtype == tf.bfloat16:
            value = tf.cast(value, tf.float32)  # NCCL supports bfloat16, but TensorFlow's use of it does not
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, value), dtype)

    def _summing_function(self) -> Callable[[tf.Tensor], tf.Tensor]:
        def once(value: tf.Tensor) -> tf.Tensor:
            context = tf.distribute.get_replica_context()
            first = tf.equal(tf.cast(context.replica_id_in_sync_group, tf.int64) % self._local, 0)
            return self._all_reduce(tf.where(first, value, tf.zeros_like(value)), context)

        @tf.function(autograph=False)
        def total(value: tf.Tensor) -> tf.Tensor:
            return self._strategy.experimental_local_results(self._strategy.run(once, args=(value,)))[0]

        return total


@dataclass(frozen=True)
class _Parameters:
    """The parameters as a step reads them: of some tables only the rows that its batch looks up.

    Args:
        values: the value of each parameter, or its rows.
        scope: the scope in which the model looks these rows up.
        rows: for each such table, by its index in the parameters, the numbers of its rows, each once, shape (n,).
    """

    values: list[tf.Tensor]
    scope: ParameterScope
    rows: dict[int, tf.Tensor]

    @classmethod
    def read(cls, step: ModelStep, tables: EmbeddingTables, batch: Any) -> _Parameters:
        """Reads the parameters."""
        if not tables.tables:
            return cls(values(step.parameters), nullcontext, {})
        lookup = tables.lookup([batch])
        rows = {n: own.numbers for n, own in zip(tables.parameter_indices, lookup.rows, strict=True)}
        read = [
            rows_of(variable.value, rows[n]) if n in rows else tf.convert_to_tensor(variable.value)
            for n, variable in enumerate(step.parameters)
        ]
        return cls(read, tables.parameter_scope(lookup.positions[0]), rows)

    def gradients(self, found: list[Any]) -> list[Any]:
        """Returns the gradients with respect to the parameters, given those with respect to `values`."""
        return [
            tf.IndexedSlices(tf.convert_to_tensor(each), self.rows[n]) if n in self.rows and each is not None else each
            for n, each in enumerate(found)
        ]


@dataclass(frozen=True)
class _Taken:
    """What a replica's steps have resulted in.

    Attributes:
        state: the values of the model's state.
        metrics: the values of the metrics' variables.
        losses: of each step, shape ().
        overflows: of each step, whether gradients exceed the range of the wire's type.
        seconds: of each step, if measured.
        examples: the examples of all steps.
        logs: see `StepResult`; of the last step.
    """

    state: list[tf.Tensor]
    metrics: list[tf.Tensor]
    losses: Sequence[tf.Tensor] = ()
    overflows: Sequence[tf.Tensor] = ()
    seconds: Sequence[tf.Tensor] = ()
    examples: tf.Tensor | int = 0
    logs: Sequence[tf.Tensor] = ()

    def __add__(self, later: _Taken) -> _Taken:
        return _Taken(
            later.state,
            later.metrics,
            (*self.losses, *later.losses),
            (*self.overflows, *later.overflows),
            (*self.seconds, *later.seconds),
            self.examples + later.examples,
            later.logs,
        )


def _taken(compiled: Any, batches: Any, first: tf.Tensor, state: Any, metrics: Any, *_: Any) -> _Taken:
    """What steps compiled by XLA have resulted in."""
    return _Taken(**compiled(batches, first, state, metrics))


class _ReplicaUpdates:
    """Makes the updates of one step on one replica.

    Args:
        engine: the engine.
        context: the replica's context.
        timer: measures the phases.

    Attributes:
        overflow: whether gradients exceed the range of the wire's type.
    """

    def __init__(self, engine: MirroredEngine, context: Any, timer: StepTimer) -> None:
        self._engine, self._context, self._timer = engine, context, timer
        self._before: list[Any] = []
        self.overflow = tf.constant(False)

    def make(
        self, optimizer: keras.optimizers.Optimizer, gradients: list[Any], variables: list[keras.Variable]
    ) -> None:
        """Sums the gradients over all replicas, and makes an update."""
        # All replicas sum in the same order, although two updates of a step may not depend on each other.
        gradients = _used_after(gradients, self._before)
        summed, overflow = self._engine.summed(gradients, variables, self._context, self._timer)
        self._before = [each for each in summed if each is not None]
        self.overflow |= overflow
        with self._timer.during("update"):
            self._engine.apply(optimizer, summed, variables)

    def update(
        self,
        optimizer: keras.optimizers.Optimizer | None,
        gradients: list[Any],
        variables: list[keras.Variable],
        assigned: Assigned,
    ) -> list[tf.Tensor]:
        """Makes an update within the step, see `assignments.Update`."""
        self._timer.end("compute", gradients, [value for _, value in assigned])
        if assigned:
            own, given = zip(*assigned, strict=True)
            self._before = self._engine.assign(own, given, self._context, self._before)
            self._timer.end("all_reduce", self._before)
        if optimizer is not None:
            self.make(optimizer, gradients, variables)
        return values(variables)


def _used_after(tensors: Any, times: list[tf.Tensor]) -> Any:
    """Lets tensors be used after a time was taken, if it was: an executor with one thread may take it at the end."""
    if not times:
        return tensors
    return tf.nest.map_structure(
        lambda tensor: None if tensor is None else after(tensor, times), tensors, expand_composites=True
    )


def _time_of_one_number(gradients: list[Any]) -> tf.Tensor:
    """The time when a number of each gradient is on the processor: an accelerator ends later than it seems to."""
    present = [getattr(each, "values", each) for each in gradients if each is not None]
    last = tf.add_n([tf.reduce_sum(tf.cast(tf.reshape(each, [-1])[:1], tf.float32)) for each in present])
    with tf.device("CPU"):
        return time_of(tf.identity(last))


def _after_reading(steps: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Delays all operations of steps until the batches have been read, also those that need none: counting updates."""

    def run(batches: Any, *args: Any) -> tf.Tensor:
        with tf.control_dependencies(tf.nest.flatten(batches, expand_composites=True)):
            return steps(batches, *args)

    return run
