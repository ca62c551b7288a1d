"""Asynchronous updates: each worker's gradients are applied when they arrive, without waiting for other workers.

A worker's execution pulls the parameters from the ps, computes gradients, and has them applied where the variables are.
What has to be exact does not pass through shared variables: metrics are returned by the execution and summed on the
chief, `iterations` is an atomic addition, and seeds follow from the step's number.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.spec.sections.updates import Updates
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.base import Execution, Pause, WorkerReport
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext, raise_cause
from tfdist_cli.train.engine.parameter_server.local_steps import LocalSteps
from tfdist_cli.train.engine.parameter_server.transport import Pulled, dense
from tfdist_cli.train.engine.parameter_server.workers import FirstExecutions
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.embeddings import Lookup
from tfdist_cli.train.model.train_step import Tensors, values
from tfdist_cli.train.optimizers.apply import innermost, leaf_optimizers
from tfdist_cli.train.tf_compat.coordinator import error_of
from tfdist_cli.train.tf_compat.keras_optimizer import iterations

_RETRY_SECONDS = 0.05


class AsynchronousUpdates:
    """Schedules executions of a few steps on the worker that is free next.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        self._context = context
        self._updates = context.rules.updates
        self._pace = Pacing(len(context.workers))
        self._functions: dict[int, Any] = {}
        self._local_steps = self._new_local_steps() if self._updates.local_steps > 1 else None

    @classmethod
    def check(cls, updates: Updates, optimizer: keras.optimizers.Optimizer, workers: int) -> None:
        """See `UpdateRule.check`."""
        steps = max(inner.gradient_accumulation_steps or 0 for inner in leaf_optimizers(optimizer))
        if steps and workers > 1:
            raise TrainingError(
                f"gradient_accumulation_steps is {steps}, but asynchronous workers cannot accumulate together",
                code="accumulation-needs-synchronous-workers",
                hint="use larger batches, updates: {push_every: N}, or strategy: multi_worker_mirrored",
            )
        scales = optimizer is not innermost(optimizer) or optimizer.loss_scale_factor is not None
        if updates.delay_compensation and scales:
            raise TrainingError(
                "delay_compensation needs unscaled gradients, but the optimizer scales the loss (mixed_float16)",
                code="loss-scaling-unsupported",
                hint="use the mixed_bfloat16 policy, or remove delay_compensation or loss_scale_factor",
            )

    @classmethod
    def batches_per_update(cls, updates: Updates, workers: int) -> int:  # noqa: ARG003 whatever their number
        """See `UpdateRule.batches_per_update`."""
        return updates.push_every

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `UpdateRule.run`; if a pause is agreed, it finishes and yields the executions in flight."""
        left, start = steps, first
        in_flight: deque[tuple[int, int, Any]] = deque()
        joining = FirstExecutions()
        self._pace.begin()
        while True:
            if left and not pause.agreed():
                taken = self._take_workers(iterators, joining, start, left)
                left, start = left - taken, start + taken
            while left and len(in_flight) < self._pace.in_flight and not pause.agreed():
                count = self._count(self._pace.size(size) if adapts else size, left)
                in_flight.append((start, count, self._schedule(iterators, count, start)))
                left, start = left - count, start + count
            ended = joining.ended(wait=not in_flight)
            if ended and ended.is_lost:
                in_flight.append((ended.first, ended.count, self._schedule(iterators, ended.count, ended.first)))
                continue
            if not ended and not in_flight:
                return
            begun, count, remote = (ended.first, ended.count, ended.remote) if ended else in_flight.popleft()
            counted = self._raising_cause(partial(_fetched, remote))
            execution = self._execution(begun, count, counted, int(pause.wanted()))
            self._pace.done(len(execution.losses))
            yield execution

    def _take_workers(self, iterators: Any, joining: FirstExecutions, start: int, left: int) -> int:
        """Takes workers that have joined, and lets go of those that leave.

        Args:
            iterators: each worker's data.
            joining: receives the executions that new workers begin with: one of each size that is in use.
            start: the next step.
            left: how many steps are left.

        Returns:
            How many steps these executions take.
        """
        workers, taken = self._context.workers, 0
        for worker in workers.take_changes():
            for count in sorted(count for count in self._functions if count <= left):
                if taken + count <= left:
                    args = iterators, tf.constant(start + taken, tf.int64)
                    with self._context.coordinator.strategy.scope():  # as where it was traced
                        remote = self._context.run_on_worker(worker, self._functions[count], args)
                    joining.add(start + taken, count, remote)
                    taken += count
            workers.admit(worker)
        self._pace.workers = len(workers)
        return taken

    def _new_local_steps(self) -> LocalSteps:
        context = self._context
        step, tables = context.step, context.tables.parameter_indices
        return LocalSteps(step.model.optimizer, step.parameters, tables, context.transport, context.rate)

    def _rounds(self, count: int) -> list[int]:
        """Divides a number of steps into rounds, see `Updates.steps_per_round`; returns the steps of each round."""
        every = self._updates.steps_per_round
        return [min(every, count - begin) for begin in range(0, count, every)]

    def _count(self, wanted: int, left: int) -> int:
        """Steps in the next execution: whole rounds as long as there are steps for them."""
        every = self._updates.steps_per_round
        wanted += -wanted % every
        return wanted if left >= wanted else min(every, left)

    def _schedule(self, iterators: Any, count: int, start: int) -> Any:
        function = self._functions.get(count)
        if function is None:
            function = self._functions[count] = self._execution_function(count)
        coordinator, args = self._context.coordinator, (iterators, tf.constant(start, tf.int64))
        return self._raising_cause(lambda: coordinator.schedule(function, args=args))

    def _raising_cause(self, call: Callable[[], Any]) -> Any:
        """Calls a function; if an execution has failed, raises its error, not the cancellation of the others."""
        try:
            return call()
        except tf.errors.CancelledError:
            self._context.coordinator.join()  # raises the error that the others were cancelled for
            raise
        except Exception as error:  # noqa: BLE001 it is raised again, or its cause
            raise_cause(error)

    def _execution(self, first: int, count: int, counted: np.ndarray, votes: int) -> Execution:
        rounds = self._rounds(count)
        parts = np.split(counted, np.cumsum([count, self._context.totals.size, len(rounds), 2]))
        losses, metrics, staleness, (examples, worker), phases = parts
        name = f"worker:{int(worker)}"
        if self._local_steps:  # each of the round's steps is an update
            staleness = np.repeat(staleness, rounds)
        report = WorkerReport(float(np.sum(losses)), count, tuple(staleness.astype(int).tolist()))
        measured = {name: phases} if phases.size else {}
        return Execution(
            first, losses, metrics, {name: count}, {name: int(examples)}, votes, {name: report}, phases=measured
        )

    def _execution_function(self, count: int) -> Any:
        """`count` steps of one worker as one function, unrolled: a loop over several tasks' devices costs more."""
        context, rounds = self._context, self._rounds(count)
        update = self._update if self._local_steps is None else partial(self._take_local_steps, self._local_steps)

        @tf.function(autograph=False)
        def execute(iterator: Any, first: tf.Tensor) -> tf.Tensor:
            trace = _ExecutionTrace(context, iterator, first)
            staleness: Tensors = []
            current = trace.fetch(rounds[0])
            for following in [*rounds[1:], 0]:
                number, made, prefetched = update(trace, current, following)
                with trace.on_counter_device():
                    staleness.append(number - current.updates)
                    trace.updates = number + made
                if following:
                    current = prefetched or trace.fetch(following)
            context.assign_state(context.assigned_of(trace.state))
            worker = tf.distribute.coordinator.experimental_get_current_worker_index()
            with trace.on_counter_device():
                updates_behind = tf.stack(staleness)
            counted = [tf.stack(trace.losses), context.totals.pack(trace.metrics), updates_behind]
            counted += [tf.stack([trace.examples, tf.cast(worker, tf.int64)]), *trace.timer.totals()]
            # As one tensor: each would be fetched by a request of its own.
            return tf.concat([tf.cast(part, tf.float64) for part in counted], axis=0)

        return execute

    def _update(self, trace: _ExecutionTrace, current: _Round, following: int) -> tuple[tf.Tensor, int, _Round | None]:
        """Makes one update of the ps with the gradients of a round.

        Args:
            trace: the execution's.
            current: the round.
            following: batches of the next round; 0 if there is none.

        Returns:
            The number of updates applied before; the number made; and the next round, if it is prefetched.
        """
        context, updates = self._context, self._updates
        gradients = trace.compute(current)
        prefetched = trace.fetch(following) if updates.prefetch and following else None
        pushed = context.transport.push(gradients, current.pulled)
        trace.timer.end("push", pushed.packed)
        if updates.delay_compensation:
            pushed = context.transport.compensated(pushed, current.pulled, updates.delay_compensation)
        with trace.timer.during("update"):
            number = context.apply(context.transport.gradients([pushed]), [each is not None for each in gradients])
        return number, 1, prefetched

    def _take_local_steps(
        self, local_steps: LocalSteps, trace: _ExecutionTrace, current: _Round, _following: int
    ) -> tuple[tf.Tensor, int, None]:
        """Like `_update`, by local steps on the worker, each of which is an update."""
        copy, made = local_steps.copy(current.lookup, current.pulled), len(current.batches)
        trace.arrived(current, copy.slots.values)
        local_steps.update(copy, trace.gradients(current, copy.values), current.updates)
        trace.timer.end("compute", copy.values())
        trace.timer.add_bytes(lambda: local_steps.sizes(current.lookup))
        arrived, add = local_steps.send(copy)
        trace.timer.end("push", arrived)
        with trace.timer.during("update"):
            add()
            with trace.on_counter_device(), tf.control_dependencies(arrived[:1]):
                number = trace.counter.assign_add(made, read_value=True) - made
        return number, made, None


def _fetched(remote: Any) -> Any:
    """Returns the result of an execution.

    The result is copied to the chief when it is fetched. If its worker fails in between, the result is lost, and
    TensorFlow gives the execution to another worker, whose result is fetched instead. An execution that fails just
    while its result is fetched returns None first, and raises its error after that.
    """
    pause = threading.Event()
    while True:
        try:
            fetched = remote.fetch()
        except tf.errors.OpError:
            if error_of(remote) is not None:
                raise  # the execution itself has failed
            pause.wait(_RETRY_SECONDS)  # TensorFlow has no event for an execution that has run again
        else:
            return remote.fetch() if fetched is None else fetched


@dataclass(frozen=True)
class _Round:
    """Batches, and the parameters that their gradients are computed with.

    Args:
        batches: those of one round, see `Updates.steps_per_round`.
        lookup: the rows of tables that they look up.
        pulled: the parameters.
        updates: how many updates had been applied to these.
    """

    batches: list[Any]
    lookup: Lookup
    pulled: Pulled
    updates: tf.Tensor


class _ExecutionTrace:
    """What the trace of an execution carries from one step to the next.

    Args:
        context: the model on its cluster.
        iterator: the worker's data.
        first: the number of the first step.
    """

    def __init__(self, context: ParameterServerContext, iterator: Any, first: tf.Tensor) -> None:
        self._context = context
        self._iterator = iterator
        self._first = first
        self._done = 0
        self.timer = StepTimer(context.rules.phases)
        self.counter = iterations(innermost(context.step.model.optimizer)).value
        self.updates = tf.convert_to_tensor(self.counter)
        self.state = values(context.step.state)
        self.metrics = context.totals.initial_values()
        self.losses: Tensors = []
        self.examples = tf.zeros([], tf.int64)

    def on_counter_device(self) -> AbstractContextManager[Any]:
        """Operations run on the ps that counts updates: the count need not cross the network for each of them."""
        return tf.device(self.counter.device)

    def fetch(self, count: int) -> _Round:
        """Reads the next batches, and the current parameters."""
        batches = [next_batch(self._iterator) for _ in range(count)]
        lookup = self._context.tables.lookup(batches)
        return _Round(batches, lookup, self._context.transport.pull(lookup), self.updates)

    def arrived(self, current: _Round, *more: Any) -> None:
        """Measures when the batches of a round, its parameters and other tensors have arrived."""
        self.timer.end("data", current.batches)
        self.timer.end("pull", current.pulled.values, *more)

    def gradients(self, current: _Round, parameters: Callable[[], Tensors]) -> Iterator[list[Any]]:
        """Yields each batch's gradients.

        Args:
            current: the batches, and what they look up.
            parameters: returns the parameters to compute a batch's gradients with.
        """
        for batch, positions in zip(current.batches, current.lookup.positions, strict=True):
            scope = self._context.tables.parameter_scope(positions)
            state = self._context.seeds.state_for_step(self.state, self._first + self._done)
            result = self._context.step.train(parameters(), state, self.metrics, batch, scope)
            self.state, self.metrics = result.state, result.metrics
            self.losses.append(result.loss)
            self.examples += result.examples
            self._done += 1
            yield result.gradients

    def compute(self, current: _Round) -> list[Any]:
        """Returns the mean of the batches' gradients."""
        self.arrived(current)
        gradients = list(self.gradients(current, lambda: current.pulled.values))
        mean = gradients[0] if len(gradients) == 1 else self._mean(gradients, current.pulled.values)
        self.timer.end("compute", mean)
        self.timer.add_bytes(lambda: self._context.transport.sizes(current.lookup))
        return mean

    def _mean(self, gradients: list[list[Any]], parameters: Tensors) -> list[Any]:
        mean: list[Any] = []
        for parts, parameter in zip(zip(*gradients, strict=True), parameters, strict=True):
            if parts[0] is None:
                mean.append(None)
            else:
                with self._context.step.device_scope():
                    whole = [dense(part, parameter) for part in parts]
                    mean.append(tf.add_n(whole) / tf.cast(len(whole), whole[0].dtype))
        return mean
