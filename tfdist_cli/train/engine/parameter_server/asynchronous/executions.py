"""The functions that asynchronous workers execute: several steps each, and one report of them.

Short steps are unrolled: a loop over several tasks' devices costs messages in each iteration. Longer ones run in a
loop, which ends early when the training is to pause, and takes as many steps as it is told: one function for any
number. An execution reports how many steps it has taken and how long they took by the worker's own clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.protocol.phases import COLUMNS
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.asynchronous.local_steps import LocalSteps
from tfdist_cli.train.engine.parameter_server.asynchronous.state_merging import merge_state
from tfdist_cli.train.engine.parameter_server.asynchronous.unrolled import UnrolledFunctions
from tfdist_cli.train.engine.parameter_server.batches import BatchReader, ReadBatches
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Pulled, dense
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.engine.step_timer import StepTimer, time_of
from tfdist_cli.train.model.assignments import Assigned, Optimizer, Update
from tfdist_cli.train.model.rng.counters import numbers_after
from tfdist_cli.train.model.train_step import Tensors, values
from tfdist_cli.train.optimizers.apply import fixed_loss_scales, innermost, loss_scales, substituted
from tfdist_cli.train.optimizers.terms import joined
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.coordinator import ConcreteFunctions
from tfdist_cli.train.tf_compat.keras_optimizer import LEARNING_RATE, iterations, learning_rate
from tfdist_cli.train.tf_compat.variables import Read
from tfdist_cli.train.variables.placement import created_beside


@dataclass(frozen=True)
class ExecutionReport:
    """What a worker reports of an execution.

    Args:
        worker: its number.
        steps: how many steps it has taken.
        examples: the examples in their batches.
        seconds: how long it took, without the time that it waited to begin.
        metrics: the sums of the metrics, as `MetricTotals.pack` packs them.
        phases: the seconds of each phase and bytes, in the order of `COLUMNS`; empty if they are not measured.
        losses: the loss of each step.
        staleness: for each update how many others were applied since its parameters were read.
    """

    worker: int
    steps: int
    examples: int
    seconds: float
    metrics: np.ndarray
    phases: np.ndarray
    losses: np.ndarray
    staleness: np.ndarray


class WorkerExecutions:
    """The functions.

    Args:
        context: the model on its cluster.

    Attributes:
        unrolled: a number of steps → a function that takes them. Its arguments: the iterator and the first step's
            `SeedCounters.numbers`. It changes nothing if the iterator has no batch.
        compiled: those of them that workers have compiled.
        loop: the function that takes whole rounds (see `Updates.steps_per_round`) until it is stopped. Its arguments:
            as before, and the most steps that it takes.
        concrete: their concrete functions, once they have been called.
    """

    unrolls: ClassVar[bool] = True
    """Whether short steps are unrolled."""

    def __init__(self, context: ParameterServerContext) -> None:
        self._context = context
        self._updates = context.rules.updates
        self._local_steps = self._new_local_steps() if self._updates.local_steps > 1 else None
        self._counter = iterations(innermost(context.step.optimizer)).value
        self._stopped = created_beside(self._counter, False, tf.bool)
        self._is_stopped = False
        stored = (shard.variable for shards in context.transport.shards for shard in shards)
        self._counts = UpdateCounts(innermost(context.step.optimizer), stored)
        self.unrolled = cache(self._unrolled_function)
        self.compiled = UnrolledFunctions(context, self.unrolled)
        self.loop = self._loop_function()
        self.concrete = ConcreteFunctions(context.coordinator.strategy)

    def suit(self, workers: Workers) -> bool:  # noqa: ARG002 whichever they are
        """Whether all workers can take these executions, those included that are about to join."""
        return True

    def is_ready(self, count: int, iterators: Any) -> bool:
        """Whether workers have compiled the function of so many unrolled steps; if not, it will be."""
        return self.unrolls and self.compiled.is_ready(count, iterators)

    def stop(self) -> None:
        """Lets all loops end after the step that each of them is taking, until `allow`."""
        if not self._is_stopped:
            self._is_stopped = True
            self._stopped.assign(True)

    def begin(self) -> None:
        """Lets loops take steps, and each ps count updates from the optimizer's count on. None may be in flight."""
        self._counts.begin()
        if self._is_stopped:
            self._stopped.assign(False)
            self._is_stopped = False

    def report(self, packed: np.ndarray) -> ExecutionReport:
        """Returns what an execution has reported."""
        worker, steps, examples = (int(number) for number in packed[:3])
        phases = len(COLUMNS) if self._context.rules.phases else 0
        sizes = [4, self._context.totals.size, phases, steps]
        _, metrics, measured, losses, staleness = np.split(packed, np.cumsum(sizes))
        if self._local_steps:  # each of the round's steps is an update
            staleness = np.repeat(staleness, self._rounds(steps))
        return ExecutionReport(worker, steps, examples, float(packed[3]), metrics, measured, losses, staleness)

    def _new_local_steps(self) -> LocalSteps:
        context = self._context
        step, tables = context.step, context.tables.parameter_indices
        terms = context.terms()
        return LocalSteps(step.optimizer, step.parameters, tables, context.transport, context.rate, terms)

    def _rounds(self, count: int) -> list[int]:
        """Divides a number of steps into rounds, see `Updates.steps_per_round`; returns the steps of each round."""
        every = self._updates.steps_per_round
        return [min(every, count - begin) for begin in range(0, count, every)]

    def _unrolled_function(self, count: int) -> Any:
        rounds = self._rounds(count)

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor) -> tf.Tensor:
            begun = time_of()
            start = self._start()
            trace = self._trace(iterator, rounds, numbers, start)
            staleness: Tensors = []
            current = None
            for left in reversed(range(len(rounds))):
                with self.compiled.turn():
                    current = current or trace.fetch()
                    number, made, prefetched = self._update(trace, current, more=left > 0)
                with trace.on_counter_device():
                    staleness.append(number - current.updates)
                    trace.updates = number + made
                current = prefetched
            if self._context.assigned:
                merge_state(self._context, start["state"], trace.state, count, trace.losses[-1:])
            trace.end()
            with trace.on_counter_device():
                updates_behind = tf.stack(staleness)
            return self._packed(begun, count, trace.carried(), tf.stack(trace.losses), updates_behind)

        return execute

    def _loop_function(self) -> Any:
        every = self._updates.steps_per_round

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
            begun = time_of()

            def goes_on(taken: tf.Tensor, *_: Any) -> tf.Tensor:
                with tf.device(self._counter.device):
                    return tf.logical_and(taken + every <= most, tf.logical_not(self._stopped.read_value()))

            def take_round(taken: tf.Tensor, losses: Any, staleness: Any, carried: Carried) -> list[Any]:
                trace = self._trace(iterator, [every], numbers_after(numbers, taken), carried)
                current = trace.fetch()
                number, _, _ = self._update(trace, current, more=False)
                with trace.on_counter_device():
                    behind = number - current.updates
                index = tf.cast(taken // every, tf.int32)
                losses = losses.write(index, tf.cast(tf.stack(trace.losses), tf.float64))
                staleness = staleness.write(index, tf.cast(behind, tf.int64))
                # The next step is only taken after a look at whether the training is to pause.
                return [after(taken, trace.losses) + every, losses, staleness, shaped_like(trace.carried(), carried)]

            rounds = tf.cast(most // every, tf.int32)
            losses = tf.TensorArray(tf.float64, size=rounds, element_shape=[every])
            staleness = tf.TensorArray(tf.int64, size=rounds, element_shape=[])
            start = self._start()
            variables = [tf.zeros([], tf.int64), losses, staleness, start]
            taken, losses, staleness, carried = tf.while_loop(goes_on, take_round, variables, parallel_iterations=1)
            self._keep_state(taken, start, carried)
            done = taken // every
            return self._packed(
                begun, taken, carried, tf.reshape(losses.stack()[:done], [-1]), staleness.stack()[:done]
            )

        return execute

    def _trace(self, iterator: Any, rounds: list[int], numbers: tf.Tensor, start: Carried) -> ExecutionTrace:
        return ExecutionTrace(self._context, iterator, rounds, numbers, start, self._counts)

    def _keep_state(self, taken: tf.Tensor, start: Carried, carried: Carried) -> None:
        """Merges the state at the end of a loop, unless it has taken no step: others may have assigned it since."""
        if self._context.assigned:

            def keep() -> tf.Tensor:
                merge_state(self._context, start["state"], carried["state"], taken)
                return taken

            tf.cond(taken > 0, keep, lambda: taken)

    def _start(self) -> Carried:
        """What the first step of an execution receives."""
        timer = StepTimer(self._context.rules.phases)
        return {
            "state": values(self._context.step.state),
            "metrics": self._context.totals.initial_values(),
            "logs": [tf.zeros([]) for _ in self._context.step.logs_of_batch],
            "examples": tf.zeros([], tf.int64),
            "time": timer.last_time,
            "phases": [tf.zeros([len(COLUMNS)], tf.float64) for _ in timer.last_time],
        }

    def _packed(
        self, begun: tf.Tensor, taken: tf.Tensor | int, carried: Carried, losses: tf.Tensor, staleness: tf.Tensor
    ) -> tf.Tensor:
        """Packs the numbers of an `ExecutionReport` as one tensor: each would be fetched by a request of its own."""
        seconds = time_of(losses, staleness) - begun
        worker = tf.distribute.coordinator.experimental_get_current_worker_index()
        head = tf.stack([tf.cast(each, tf.float64) for each in (worker, taken, carried["examples"], seconds)])
        metrics = self._context.totals.pack(carried["metrics"], carried["logs"])
        counted = [head, metrics, *carried["phases"], losses, staleness]
        return tf.concat([tf.cast(part, tf.float64) for part in counted], axis=0)

    def _update(self, trace: ExecutionTrace, current: Round, *, more: bool) -> tuple[tf.Tensor, int, Round | None]:
        """Makes one update of the ps with the gradients of a round.

        Args:
            trace: the execution's.
            current: the round.
            more: whether another round follows.

        Returns:
            The number of updates applied before; the number made; and the next round, if its parameters are there.
        """
        if self._local_steps:
            return self._take_local_steps(self._local_steps, trace, current)
        optimizers = self._context.step.optimizers
        with fixed_loss_scales(optimizers, loss_scales(optimizers)):
            if self._context.step.updates_within:
                return self._update_within(trace, current)
            number, following = trace.exchange(current, more=more)
        return number, 1, following

    def _update_within(self, trace: ExecutionTrace, current: Round) -> tuple[tf.Tensor, int, None]:
        """Like `_update`, by a step that makes its updates itself: it reads what it has updated from the ps again."""
        counts: Tensors = []

        def update(
            optimizer: Optimizer | None, gradients: list[Any], variables: list[keras.Variable], _: Assigned
        ) -> Tensors:
            if optimizer is None:
                return []
            trace.timer.end("compute", gradients)
            with tf.device(None), trace.timer.during("update"):  # not on the worker's GPU
                number = self._context.apply_within(optimizer, gradients, variables)
            if optimizer is self._context.step.optimizer:
                counts.append(number)
            with tf.device(None):
                read = values(variables)
            trace.timer.end("pull", read)
            return read

        trace.arrived(current)
        for _ in trace.gradients(current, lambda: current.pulled.values, update):
            trace.timer.end("compute", trace.losses[-1])
        return counts[0], len(counts), None

    def _take_local_steps(
        self, local_steps: LocalSteps, trace: ExecutionTrace, current: Round
    ) -> tuple[tf.Tensor, int, None]:
        """Like `_update`, by local steps on the worker, each of which is an update."""
        copy, made = local_steps.copy(current.read.lookup, current.pulled), len(current.read.batches)
        trace.arrived(current, copy.slots.values)
        local_steps.update(copy, trace.gradients(current, copy.values), current.updates)
        trace.timer.end("compute", copy.values())
        trace.timer.add_bytes(lambda: local_steps.sizes(current.read.lookup))
        arrived, add = local_steps.send(copy)
        trace.timer.end("push", arrived)
        with trace.timer.during("update"):
            add()
            with trace.on_counter_device(), tf.control_dependencies(arrived[:1]):
                number = trace.counter.assign_add(made, read_value=True) - made
        return number, made, None


@dataclass(frozen=True)
class Round:
    """Batches, and the parameters that their gradients are computed with.

    Args:
        read: the batches, see `Updates.steps_per_round`.
        pulled: the parameters.
        updates: how many updates had been applied to these.
    """

    read: ReadBatches
    pulled: Pulled
    updates: tf.Tensor


Carried = dict[str, Any]
"""The state, the metrics, examples, and what is measured of the steps before, as tensors."""


class ExecutionTrace:
    """What the trace of an execution carries from one step to the next.

    Args:
        context: the model on its cluster.
        iterator: the worker's data.
        rounds: how many batches each round has.
        numbers: `SeedCounters.numbers` of the first step.
        start: what the steps before have left.
        counts: of the updates on each ps.
    """

    def __init__(
        self,
        context: ParameterServerContext,
        iterator: Any,
        rounds: list[int],
        numbers: tf.Tensor,
        start: Carried,
        counts: UpdateCounts,
    ) -> None:
        self._context = context
        self._reader, self._next_batch = BatchReader(context, rounds), partial(next_batch, iterator)
        self._numbers = numbers
        self._done = 0
        self._phases = start["phases"]
        self.timer = StepTimer(context.rules.phases, *start["time"])
        self.counter = iterations(innermost(context.step.optimizer)).value
        self.state, self.metrics, self.examples = start["state"], start["metrics"], start["examples"]
        self.logs = start["logs"]
        self.losses: Tensors = []
        self._counts = counts
        self.updates = self._read_numbers()

    def _read_numbers(self) -> tf.Tensor:
        """Reads what the updates need, once for all; returns how many there were before."""
        own = learning_rate(innermost(self._context.step.optimizer))
        self._rate: dict[str, Read] = {}
        if isinstance(own, keras.Variable):
            with tf.device(own.value.device):
                self._rate = {LEARNING_RATE: Read(tf.identity(own.value))}
        return tf.convert_to_tensor(self.counter)

    def carried(self) -> Carried:
        """What the next steps receive."""
        return {
            "state": self.state,
            "metrics": self.metrics,
            "logs": self.logs,
            "examples": self.examples,
            "time": self.timer.last_time,
            "phases": [own + total for own, total in zip(self._phases, self.timer.totals(), strict=True)],
        }

    def on_counter_device(self) -> AbstractContextManager[Any]:
        """Operations run on the ps that counts updates: the count need not cross the network for each of them."""
        return tf.device(self.counter.device)

    def fetch(self) -> Round:
        """Reads the next batches, and the current parameters."""
        read = self._reader.next_round(self._next_batch)
        # Nothing is computed, and no update made, before the batches are there.
        pulled = self._context.transport.pull(read.sent, received_after=tf.nest.flatten(read.batches)[:1])
        return Round(read, pulled, self.updates)

    def exchange(self, current: Round, *, more: bool) -> tuple[tf.Tensor, Round | None]:
        """Makes one update of the ps with the gradients of a round.

        Args:
            current: the round.
            more: whether another round follows.

        Returns:
            The number of updates applied before; and the next round, if its parameters are there already.
        """
        updates, transport = self._context.rules.updates, self._context.transport
        gradients = self.compute(current)
        prefetched = self.fetch() if updates.prefetch and more else None
        pushed = transport.push(gradients, current.pulled)
        self.timer.end("push", pushed.packed)
        if updates.delay_compensation:
            pushed = transport.compensated(pushed, current.pulled, updates.delay_compensation)
        present = [each is not None for each in gradients]
        optimizer = innermost(self._context.step.optimizer)
        with self.timer.during("update"), substituted(optimizer, self._rate):
            number = self._context.apply(transport.gradients([pushed]), present, self._counts)
        return number, prefetched

    def end(self) -> None:
        """Ends the execution, when all of its steps are taken."""

    def arrived(self, current: Round, *more: Any) -> None:
        """Measures when the batches of a round, its parameters and other tensors have arrived."""
        self.timer.end("data", current.read.batches)
        self.timer.end("pull", current.pulled.values, *more)

    def gradients(
        self, current: Round, parameters: Callable[[], Tensors], update: Update | None = None
    ) -> Iterator[list[Any]]:
        """Yields each batch's gradients.

        Args:
            current: the batches, and what they look up.
            parameters: returns the parameters to compute a batch's gradients with.
            update: makes the updates of a step with `updates_within`.
        """
        for batch, positions in zip(current.read.batches, current.read.lookup.positions, strict=True):
            scope = self._context.tables.parameter_scope(positions)
            state = self._context.seeds.state_for_step(self.state, numbers_after(self._numbers, self._done))
            result = self._context.step.train(parameters(), state, self.metrics, batch, scope, update)
            self.state, self.metrics, self.logs = result.state, result.metrics, result.logs
            self.losses.append(result.loss)
            self.examples += result.examples
            self._done += 1
            yield result.gradients

    def compute(self, current: Round) -> list[Any]:
        """Returns the mean of the batches' gradients."""
        self.arrived(current)
        gradients = list(self.gradients(current, lambda: current.pulled.values))
        mean = gradients[0] if len(gradients) == 1 else self._mean(gradients, current.pulled.values)
        self.timer.end("compute", mean)
        self.timer.add_bytes(lambda: self._sizes(current.read))
        return mean

    def _sizes(self, read: ReadBatches) -> dict[str, Any]:
        """The bytes that cross for a round, by the names of `TRAFFIC`."""
        return self._context.transport.sizes(read.lookup, ahead=read.is_sent)

    def _mean(self, gradients: list[list[Any]], parameters: Tensors) -> list[Any]:
        mean: list[Any] = []
        terms = self._context.transport.terms
        for index, (parts, parameter) in enumerate(zip(zip(*gradients, strict=True), parameters, strict=True)):
            if parts[0] is None:
                mean.append(None)
            else:
                with self._context.step.device_scope():
                    if index in terms and all(isinstance(part, tf.IndexedSlices) for part in parts):
                        mean.append(joined(parts))
                        continue
                    whole = [dense(part, parameter) for part in parts]
                    mean.append(tf.add_n(whole) / tf.cast(len(whole), whole[0].dtype))
        return mean


def shaped_like(tensors: Carried, like: Carried) -> Carried:
    """Tells a loop that its variables keep their shapes."""
    return tf.nest.map_structure(lambda tensor, other: tf.ensure_shape(tensor, other.shape), tensors, like)
