"""The engine of `ParameterServerStrategy`: the chief schedules steps, workers take them, variables are on the ps.

How gradients become updates is the business of an `UpdateRule`.
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
from tfdist_cli.train.cluster.membership import Membership, Refusal
from tfdist_cli.train.cluster.shared_memory.tensors import on_one_host
from tfdist_cli.train.data.divided import DividedBatches
from tfdist_cli.train.data.length import count, counting_function
from tfdist_cli.train.data.pipeline import Consumed
from tfdist_cli.train.data.python_data.dataset_function import PythonData
from tfdist_cli.train.data.shard import DatasetFunction, Shard, checked
from tfdist_cli.train.engine.base import DEFAULT_RULES, EvaluationWatch, Execution, Pause, Rules, Sharing
from tfdist_cli.train.engine.fallback import FirstExecution
from tfdist_cli.train.engine.parameter_server.context import (
    CHIEF_DEVICE,
    ParameterServerContext,
    Stream,
    raise_cause,
)
from tfdist_cli.train.engine.parameter_server.lockstep.data_position import set_position
from tfdist_cli.train.engine.parameter_server.transport import Transport
from tfdist_cli.train.engine.parameter_server.update_rule import UpdateRule, check_updates_within, rule_of
from tfdist_cli.train.engine.parameter_server.workers import WorkerData, Workers, places
from tfdist_cli.train.layers.dynamic_tables import require_row_updates
from tfdist_cli.train.model.compute_device import worker_device_scope
from tfdist_cli.train.model.embeddings import EmbeddingTables
from tfdist_cli.train.model.evaluation import evaluation_function, first_counts
from tfdist_cli.train.model.evaluation_state import EvaluationState
from tfdist_cli.train.model.jit import choose_xla
from tfdist_cli.train.model.metrics import MetricTotals
from tfdist_cli.train.model.model_checks import check_overwritten
from tfdist_cli.train.model.rng.counters import SeedCounters
from tfdist_cli.train.model.train_step import ModelStep, ParameterScope, Tensors
from tfdist_cli.train.optimizers.apply import disable_gradient_reduction, supports_sparse_updates, why_not_fused
from tfdist_cli.train.optimizers.learning_rate import RateScaling
from tfdist_cli.train.tf_compat.coordinator import (
    clear_failure,
    per_worker_iterators,
    reserve_function_table,
)
from tfdist_cli.train.tf_compat.data import calls_python
from tfdist_cli.train.tf_compat.distribute import ps_devices
from tfdist_cli.train.tf_compat.eager_context import cluster_addresses

_MAX_STEPS_TOGETHER = 5
"""Synchronous workers wait for each other in each step, not for the chief. 20 steps in a function instead of 5 saved no
processor time, and take four times as long to compile, which a worker that joins waits for."""
log = logging.getLogger("tfdist")


class ParameterServerEngine:
    """Trains on parameter servers.

    Args:
        step: the model's pure functions, built under the strategy's scope.
        strategy: a `tf.distribute.ParameterServerStrategy`.
        element_spec: the `tf.TypeSpec`s of a batch.
        rules: how gradients become updates.
        membership: which workers may join and leave; None if they stay as they are.
    """

    is_chief = True
    max_steps_per_execution = 20
    _done = 0
    """Global steps that are done."""
    _sharing: tuple[int, ...] = ()
    """The indices of the workers that the data is divided among."""
    _reopen: Callable[[], None] | None = None
    _divide: Callable[[], None] | None = None

    def __init__(
        self,
        step: ModelStep,
        strategy: tf.distribute.Strategy,
        element_spec: Any,
        rules: Rules = DEFAULT_RULES,
        membership: Membership | None = None,
    ) -> None:
        self._step = step
        self._strategy = strategy
        self._element_spec = element_spec
        coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        clear_failure(coordinator)
        self._workers = Workers(coordinator, membership)
        reserve_function_table(ps_devices(strategy), self._workers.most)
        self._choose_mode(rules.updates)
        self._rule = rule_of(rules.updates)
        for optimizer in step.optimizers:
            self._rule.check(rules.updates, optimizer, self.workers)
            disable_gradient_reduction(optimizer)
        check_updates_within(step, element_spec, rules)
        self._divided: DividedBatches | None = None
        if rules.updates.batch == "proportional" and self.workers > 1:
            self._divided = DividedBatches.of(element_spec, self.workers)
            self._element_spec, step.examples_per_batch = self._divided.element_spec, self._divided.batch
        step.batches_per_update = self._rule.batches_per_update(rules.updates, self.workers)
        check_overwritten(step)
        self._evaluations: dict[tuple[str, bool], tuple[Any, EvaluationState]] = {}
        """By the `tf.TypeSpec`s of batches, and whether each batch is counted."""
        self._iterators: Any = None
        optimizer, parameters = step.optimizer, step.parameters
        self._coordinator = coordinator
        self._resized: dict[tuple[int, bool], UpdateRule] = {}
        """Synchronous updates by the workers that they are made for, see `_size_of`."""
        self._size = 1
        """Steps in an execution."""
        self._read = Consumed()
        self._share: Sharing = "split"
        self._scope = worker_device_scope()
        self._context = self._new_context(rules, shared=self._share_memory())
        self._choose_jit()
        self._updates = self._rule(self._context)
        reason = None if step.updates_within else why_not_fused(optimizer, parameters)
        if reason:
            log.info("the updates use Keras's own operations, which take longer: %s", reason)
        self._first_execution = FirstExecution(
            lambda: [*step.parameters, *step.state, *step.optimizer_variables],
            self.scope,
            self.total,
            self._take_standard_path,
        )

    def _choose_mode(self, updates: Updates) -> None:
        self.synchronous = updates.synchronous
        if self.synchronous:
            self.max_steps_per_execution = min(self.max_steps_per_execution, _MAX_STEPS_TOGETHER)

    def _share_memory(self) -> bool:
        """Whether workers and ps share memory: all are on one host."""
        if self._scope is not nullcontext or not on_one_host(cluster_addresses()):
            return False
        with self.scope():
            return self._workers.share_memory(ps_devices(self._strategy))

    def _new_context(self, rules: Rules, *, shared: bool = False) -> ParameterServerContext:
        """The model on its cluster, on the path of execution that the rules choose."""
        step, element_spec = self._step, self._element_spec
        optimizer, parameters = step.optimizer, step.parameters
        # A step of the model's own computes gradients of whole tables.
        rows = not (step.own_step or step.updates_within) and supports_sparse_updates(optimizer, parameters)
        require_row_updates(step.model, possible=rows and rules.optimized)
        seeds = SeedCounters(step, element_spec, self.workers if self.synchronous else 1)
        retained = step.retained_state(element_spec)
        min_bytes = rules.embeddings.min_bytes if rows and rules.embeddings else None
        tables = EmbeddingTables(step, element_spec, min_bytes)
        own_terms = rules.updates.local_steps > 1 or rules.updates.delay_compensation or step.updates_within
        terms = {} if own_terms else step.terms(element_spec)
        transport = Transport(
            parameters,
            tables.parameter_indices,
            rules.wire,
            self._scope,
            packed=rules.optimized,
            terms=terms,
            shared=shared,
        )
        if transport.shares:
            log.info("large variables cross between workers and ps in memory that they share")
        context = ParameterServerContext(
            step,
            element_spec,
            self._coordinator,
            self._workers,
            rules,
            tables,
            transport,
            seeds,
            {index: retained[index] for index in seeds.exclude(tuple(retained))},
            MetricTotals(step),
            RateScaling(rules.learning_rate, step.batches_per_update),
            step.batches_per_update,
            self.workers,
            shared,
        )
        step.device_scope = self._scope
        return context

    def _take_standard_path(self) -> None:
        clear_failure(self._coordinator)
        rules = replace(self._context.rules, optimized=False, embeddings=None)
        self._step.jit = rules.jit is True
        self._updates.close()
        self._context = self._new_context(rules)
        self._updates = self._rule(self._context)
        self._resized.clear()
        self._evaluations.clear()
        if self._reopen:
            self._reopen()

    @property
    def is_current(self) -> bool:
        """See `Engine.is_current`."""
        return self._workers.are_current

    def begin_again(self) -> None:
        """See `Engine.begin_again`; another model may have failed meanwhile."""
        clear_failure(self._coordinator)

    def scope(self) -> AbstractContextManager[Any]:
        """See `Engine.scope`."""
        return self._strategy.scope()

    @property
    def workers(self) -> int:
        """See `Engine.workers`."""
        return len(self._workers)

    @property
    def sharers(self) -> int:
        """See `Engine.sharers`."""
        return len(self._workers)

    @property
    def one_by_one(self) -> bool:
        """See `Engine.one_by_one`."""
        return self.synchronous or self.workers == self._context.rules.updates.steps_per_round == 1

    def open(self, data: DatasetFunction, *, share: Sharing, step: int, batches: int) -> None:
        """Creates each worker's iterator on the worker; a restarted worker creates its own again."""
        self._share, self._done = share, step
        self._start(step)
        self._reopen = partial(self.open, data, share=share, step=step, batches=batches)
        self._context.seeds.start_at(step)
        self._read = Consumed(data, batches)
        self._divide = partial(self._divide_data, data, share)
        self._divide()

    def _start(self, step: int) -> None:
        """Lets go of workers that have left since the engine was made.

        Raises:
            TrainingError: the training cannot do without them.
        """
        before = self.workers
        self._workers.start()
        if self.workers == before:
            return
        if refusal := self._why_not(self.workers):
            raise TrainingError(refusal.reason, code=refusal.code, hint=refusal.hint)
        if self.synchronous:
            self._resize(step)

    def _divide_data(self, data: DatasetFunction, share: Sharing) -> None:
        """Divides the data that no worker has consumed yet among the workers of now."""
        self._sharing = self._workers.indices
        if share == "service" or (share == "coordinator" and not self.synchronous):
            iterators = _shared_iterator(data, self._read.batches)
            self._workers.divide(WorkerData(lambda _worker, _place, _count: None, iterators))
        else:
            spec = self._element_spec
            if self._divided:
                data, spec = self._divided.whole(data), self._divided.whole_spec

            create = partial(self._open_on_worker, data)
            remotes = {
                worker.worker_index: create(worker, place, count) for worker, place, count in places(self._workers)
            }
            iterators = per_worker_iterators(remotes, spec, self._workers.most)
            self._workers.divide(WorkerData(create, iterators))
        self._iterators = iterators

    def _open_on_worker(self, data: DatasetFunction, worker: Any, place: int, count: int) -> Any:
        """Opens a worker's data behind what is done; again so if the worker is started again."""
        before, step = self._read.batches, self._done

        def opened() -> Any:
            more = (self._read.batches - before) // count
            set_position(tf.constant(step + more, tf.int64))
            return _iterator(data, self._shard(worker.worker_index, place, count, before // count + more))

        return self._context.run_on_worker(worker, opened)

    def _shard(self, index: int, place: int, count: int, done: int) -> Shard:
        """The part of the data that one of several workers reads.

        Args:
            index: the worker's.
            place: its place among the workers.
            count: how many there are.
            done: the batches that each of them has consumed.
        """
        if self._divided:
            return Shard(step=done * count)
        if self._share == "coordinator":
            return Shard(place, count, place, done)
        if self._share == "split":
            return Shard(place, count, index if count > 1 else 0, done)  # the only worker has no copy of its own
        return Shard(0, 1, index, done)

    def resume_workers(self, taken: Mapping[str, int]) -> None:
        """See `Engine.resume_workers`."""
        self._workers.resume(taken)

    @property
    def worker_steps(self) -> dict[str, int]:
        """See `Engine.worker_steps`."""
        return self._workers.steps_taken

    def begin_epoch(self) -> None:
        """See `Engine.begin_epoch`."""
        if self._divide and self._sharing != self._workers.indices:
            self._divide()

    def begin_pass(self) -> None:
        """Does nothing: the data of workers, or the chief's, continues."""

    def change_workers(self, step: int) -> bool:
        """See `Engine.change_workers`. Asynchronous rules do this themselves, between two executions."""
        before = self._workers.indices
        if not (self.synchronous and self._workers.change):
            return False
        with self.scope():
            for worker in self._workers.take_changes():
                self._workers.admit(worker)
            apart = self._context.shares_memory and not self._workers.share_memory_among(self._workers)
            if self._workers.indices == before and not apart:
                return False
            self._read.batches += -self._read.batches % self.workers  # a step of theirs begins there
            self._resize(step)
        return True

    def _resize(self, step: int) -> None:
        """Goes on with the updates of as many workers as there are now."""
        self._resized[_size_of(self._context)] = self._updates
        self._context.seeds.resize(step, self.workers)
        self._context = self._context_for(self._workers)
        self._updates = self._resized.get(_size_of(self._context)) or self._updates.resized(self._context)

    def _context_for(self, workers: Sequence[Any]) -> ParameterServerContext:
        """The model on its cluster when it has other workers."""
        rules, count = self._context.rules, len(workers)
        batches = self._rule.batches_per_update(rules.updates, count)
        return replace(
            self._context,
            rate=RateScaling(rules.learning_rate, batches),
            batches_per_update=batches,
            worker_count=count,
            shares_memory=self._workers.share_memory_among(workers),
        )

    def _prepare(self, workers: Sequence[Any], iterators: Any) -> None:
        """Compiles what synchronous updates of another number of workers need, while the training goes on."""
        updates, context = self._updates, self._context_for(workers)
        try:
            resized = self._resized.get(_size_of(context)) or updates.resized(context)
            resized.rehearse(workers, iterators, self._size)
        except Exception as error:  # noqa: BLE001 a task is lost: the training will find out, and compiles it then
            log.info("the functions for %d workers are compiled later: %s", len(workers), error)
        else:
            self._resized[_size_of(context)] = resized

    def close(self) -> None:
        """See `Engine.close`."""
        self._updates.close()
        self._workers.end()
        self._read.close()
        self._read, self._iterators, self._reopen, self._divide = Consumed(), None, None, None

    def run(self, steps: int, *, first: int, size: int, adapts: bool, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`."""
        self._size = size if self._context.rules.optimized else 1

        def executions(taken: int, count: int) -> Iterator[Execution]:
            changes = self.synchronous and count > size  # one execution alone would never begin if this ended it
            ends = _ChangePause(pause, self._workers) if changes else pause
            return self._updates.run(
                self._iterators, count, first=first + taken, size=self._size, adapts=adapts, pause=ends
            )

        whole_updates = size + -size % self._context.rules.updates.steps_per_round
        attempt = 1 if self.synchronous else whole_updates * self.workers
        self._done = first
        for execution in self._first_execution.run(executions, steps, attempt=attempt, pause=pause):
            self._done += len(execution.losses)
            self._read.count(len(execution.losses) * (self.sharers if self.synchronous else 1))
            named = execution.renamed(self._workers.names) if self.synchronous else execution
            self._workers.begin(self._why_not, self._prepare if self.synchronous else None)
            self._workers.add_execution(named.steps, self._done)
            yield named

    def _why_not(self, workers: int) -> Refusal | None:
        """Returns why the training cannot continue with another number of workers."""
        try:
            for optimizer in self._step.optimizers:
                self._rule.check(self._context.rules.updates, optimizer, workers)
        except TrainingError as error:
            return Refusal(error.message, code="not-elastic", hint=error.hint or "")
        if self._share == "coordinator" and self.synchronous:
            return Refusal(
                "the chief reads the data, in parts for the workers of the start",
                code="not-elastic",
                hint="pass a function of a tfdist.Shard, whose data the workers read themselves",
            )
        if not self._divided:
            return None
        return Refusal(
            "batch: proportional divides each batch among the workers of the start",
            code="not-elastic",
            hint="restart the training with another number of workers: it resumes from its checkpoint",
        )

    def operations(self) -> int:
        """See `Engine.operations`."""
        return self._step.operation_count(self._element_spec)

    def evaluate(self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch) -> MetricTotals:
        """Every worker scores its own shard of the data; if it is lost meanwhile, another one continues the shard."""
        totals = MetricTotals(self._step, training=False)
        for counted in self._scored(data, steps, watch, each_batch=False):
            totals.add(counted[-1])
        return totals

    def test_steps(
        self, data: DatasetFunction, *, steps: int | None, watch: EvaluationWatch
    ) -> Iterator[Callable[[], np.ndarray]]:
        """See `Engine.test_steps`; yields the batches of one shard after the other."""
        for counted in self._scored(data, steps, watch, each_batch=True):
            for own in np.diff(counted, axis=0, prepend=0.0):
                yield partial(np.copy, own)

    def _scored(
        self, data: DatasetFunction, steps: int | None, watch: EvaluationWatch, *, each_batch: bool
    ) -> Iterator[np.ndarray]:
        """Yields what the evaluation of each shard has counted, as `evaluation_function` returns it."""
        function, state = self._evaluation_function(data, each_batch=each_batch)
        workers = self.workers
        once = data.buffered() if isinstance(data, PythonData) else None

        def shard_of(index: int) -> ShardEvaluation:
            limit = -1 if steps is None else steps // workers + (index < steps % workers)
            numbers = tf.constant(limit, tf.int64), tf.constant([index, workers], tf.int64)
            opened = partial(_iterator, once or data, Shard(index, workers, index), ends=steps is None)
            stream = Stream(
                self._workers,
                index,
                lambda done: opened(skip=done),
                lambda iterator, counts: function(iterator, *numbers, counts),
            )
            return ShardEvaluation(stream, counts)

        shards: list[ShardEvaluation] = []
        try:
            with self.scope():
                counts = first_counts(self._step, self._context.totals, state)
                shards += [shard_of(index) for index in range(workers)]
                while left := [each for each in shards if not each.complete]:
                    for each in left:
                        each.begin()
                    if once and once is not data:  # a generator is kept, for an evaluation after one that fails
                        once.forget(min(each.begun for each in shards) * workers)
                    for each in left:
                        each.take()
                    if not all(each.complete for each in left):
                        watch.between(sum(each.batches for each in shards), int(watch.wanted()))
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            _kept_open.append(shards)
            raise_cause(error)
        finally:
            if once and once is not data:
                once.close()
        whole = [np.concatenate(each.counted) if each_batch else each.counted[-1][None] for each in shards]
        self._apply_state_changes(state, whole)
        size = self._context.totals.size
        yield from (counted[:, :size] for counted in whole)

    def _apply_state_changes(self, state: EvaluationState, results: list[np.ndarray]) -> None:
        """Adds up the changes that workers have made to the state while they scored."""
        last = [counted[-1, self._context.totals.size :] for counted in results if len(counted)]
        if last:
            with self.scope():
                state.apply(np.sum(last, axis=0))

    def count(self, data: DatasetFunction, shards: Sequence[Shard]) -> np.ndarray:
        """See `Engine.count`; every worker counts its own shard, at the same time."""
        if len(shards) < len(self._workers):
            return np.array([count(data, shard) for shard in shards], np.float64)
        spec = checked(data, shards[0]).element_spec
        with self.scope():
            counted = counting_function().get_concrete_function(tf.data.IteratorSpec(spec))

        def count_on_worker(shard: Shard) -> Any:
            number = counted(_iterator(data, shard, ends=True))
            with tf.device(CHIEF_DEVICE):  # a worker that has counted its shard may fail
                return tf.identity(number)

        return np.array(self._on_workers([partial(count_on_worker, shard) for shard in shards]), np.float64)

    def least(self, value: int) -> int:
        """See `Engine.least`; only the chief runs the loop."""
        return value

    def _on_workers(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs a function on each worker, or on another one if it is lost; returns their results."""
        try:
            with self.scope():
                placed = zip(self._workers, calls, strict=True)
                remotes = [self._context.run_on_worker(worker, call) for worker, call in placed]
                remotes.reverse()
                return [self._context.result_of(remotes.pop(), call) for call in calls]
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            raise_cause(error)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Only the chief runs the loop."""
        return values

    def share_variables(self) -> None:
        """Does nothing: the variables are on the ps, where every task reads them."""

    def share_changes(self) -> None:
        """See `Engine.share_changes`: variables are on the ps, but workers may see them in memory that they share."""
        self._updates.share_changes()

    def read_updates(self) -> None:
        """See `Engine.read_updates`."""
        self._updates.read_updates()

    def settle(self, step: int) -> None:
        """See `Engine.settle`."""
        with self.scope():
            self._context.seeds.write(step)

    def _choose_jit(self) -> None:
        """Measures on the first worker whether XLA is faster, if it may be used."""
        wanted = self._context.rules.jit
        if wanted and self._context.tables.tables:
            log.info("jit: XLA is not used: it would compile again for each number of rows that a batch looks up")
            return

        def run(steps: Callable[[], tf.Tensor]) -> Any:
            try:
                return self._context.run_on_worker(self._workers[0], steps).fetch()
            except Exception as error:  # noqa: BLE001 it is raised again, or its cause
                raise_cause(error)

        self._step.jit = choose_xla(self._step, self._element_spec, wanted, run)

    def _evaluation_function(self, data: DatasetFunction, *, each_batch: bool) -> tuple[Any, EvaluationState]:
        spec = checked(data, Shard()).element_spec
        key = repr(spec), each_batch
        if key not in self._evaluations:
            with self.scope():
                scored = EvaluationState(self._step, spec, self._context.seeds)
                totals = self._context.totals
                function = evaluation_function(self._step, totals, scored, self._reading, each_batch=each_batch)
                counts = [tf.TensorSpec(each.shape, each.dtype) for each in first_counts(self._step, totals, scored)]
                specs = tf.data.IteratorSpec(spec), tf.TensorSpec([], tf.int64), tf.TensorSpec([2], tf.int64), counts
                self._evaluations[key] = function.get_concrete_function(*specs), scored
        return self._evaluations[key]

    def _reading(self) -> Callable[[Any], tuple[Tensors, ParameterScope]]:
        """Returns a function that reads the parameters of a batch; all but rows are read only once."""
        tables = self._context.tables
        # The stored values are scored, not those that the wire's type rounds them to.
        transport = Transport(self._step.parameters, tables.parameter_indices, device_scope=self._step.device_scope)
        held = transport.pull(tables.lookup_of_evaluation()).values

        def reading(batch: Any) -> tuple[Tensors, ParameterScope]:
            lookup = tables.lookup([batch], training=False)
            values = transport.pull(lookup, held).values
            for index in tables.evaluated_completely:
                values[index] = tf.ensure_shape(held[index], self._step.parameters[index].shape)
            return values, tables.parameter_scope(lookup.positions[0], training=False)

        return reading


def _size_of(context: ParameterServerContext) -> tuple[int, bool]:
    """What updates depend on that are made for other workers: their number, and whether they share memory."""
    return context.worker_count, context.shares_memory


class _ChangePause:
    """A pause that also ends a run when workers wait to be taken, or let go.

    Args:
        pause: the training loop's.
        workers: the workers.
    """

    def __init__(self, pause: Pause, workers: Workers) -> None:
        self._pause, self._workers = pause, workers

    def wanted(self) -> bool:
        return self._pause.wanted()

    def agreed(self) -> bool:
        return self._pause.agreed() or self._workers.change

    def ends(self) -> bool:
        return self._pause.ends()


# Iterators over data that calls Python code. A worker that closes one before its end calls that code in this process,
# while TensorFlow may hold the interpreter and wait for the worker. So they stay open until the process exits.
_kept_open: list[Any] = []


class ShardEvaluation:
    """The evaluation of a shard on one worker after the other, in executions.

    Args:
        stream: calls the function of `evaluation_function`.
        counts: with which the first execution begins, see `first_counts`.

    Attributes:
        complete: whether the shard is evaluated.
        begun: how many of its batches were evaluated before the last execution. Later ones may be read again.
        batches: how many of its batches are evaluated.
        counted: what each execution has counted.
    """

    def __init__(self, stream: Stream, counts: Tensors) -> None:
        self._stream, self._counts = stream, counts
        self.complete, self.begun, self.batches = False, 0, 0
        self.counted: list[np.ndarray] = []

    def begin(self) -> None:
        """Requests the next execution."""
        self.begun = self.batches
        self._stream.begin(self.batches, self._counts)

    def take(self) -> None:
        """Waits for the execution."""
        complete, counted, *self._counts = self._stream.take()
        self.complete, self.batches = bool(complete), int(self._counts[0])
        self.counted.append(np.asarray(counted))


def _iterator(data: DatasetFunction, shard: Shard, *, ends: bool = False, skip: int = 0) -> Any:
    """Creates a worker's iterator on its device, or on the chief if only the chief can read the data.

    Args:
        data: a shard → its batches.
        shard: the worker's.
        ends: whether it is read to its end.
        skip: the first batches, which are left out.
    """
    by_chief = isinstance(data, PythonData)
    with tf.device(CHIEF_DEVICE) if by_chief else nullcontext():
        dataset = checked(data, replace(shard, step=shard.step + skip) if by_chief else shard)
        iterator = iter(dataset.skip(skip) if skip and not by_chief else dataset)
    if not ends and calls_python(dataset):
        _kept_open.append(iterator)
    return iterator


def _shared_iterator(data: DatasetFunction, batches: int) -> Any:
    """One iterator for all workers, on the chief: the worker that asks first receives the next batch."""
    with tf.device(CHIEF_DEVICE):
        dataset = checked(data, Shard(step=batches))
        iterator = iter(dataset)
    if calls_python(dataset):
        _kept_open.append(iterator)
    return iterator
