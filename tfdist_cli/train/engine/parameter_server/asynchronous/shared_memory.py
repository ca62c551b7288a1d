"""Asynchronous updates of tasks that share memory: workers update the parameters where they are, see `parameters`.

A worker's execution has operations of its own task alone, but for those at its begin and its end. It applies its
gradients to variables of its own, whose values are in the memory of the ps. The learning rate is read at the begin of
an execution, since callbacks may set it between two of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.parameter_operations import SharedParameters
from tfdist_cli.train.cluster.shared_memory.parameters import UpdatesEnded
from tfdist_cli.train.engine.parameter_server.asynchronous.executions import (
    Carried,
    ExecutionTrace,
    Round,
    WorkerExecutions,
    shaped_like,
)
from tfdist_cli.train.engine.parameter_server.batches import ReadBatches
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Pulled
from tfdist_cli.train.engine.parameter_server.worker_functions import Threads, try_briefly
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.engine.step_timer import time_of
from tfdist_cli.train.model.rng.counters import numbers_after
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.apply import StoredParameter, stored_parameters
from tfdist_cli.train.optimizers.terms import SummedTerms, tensors_of
from tfdist_cli.train.tf_compat.control_flow import after, changes
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit
from tfdist_cli.train.tf_compat.functions import announced_calls
from tfdist_cli.train.tf_compat.keras_optimizer import iterations
from tfdist_cli.train.tf_compat.variables import used_outside_of_functions, variable_at
from tfdist_cli.train.variables.sharding import Gradient


def suits(context: ParameterServerContext) -> bool:
    """Whether a training can take this way: all of its parameters cross whole, and each ps updates its own alone."""
    step, transport, updates = context.step, context.transport, context.rules.updates
    if not (transport.shared and context.workers.share_memory_now) or transport.has_tables or not transport.buckets:
        return False
    if len(context.workers) != context.workers.most or step.updates_within:
        return False
    if updates.local_steps > 1 or updates.prefetch or updates.delay_compensation:
        return False
    # The variables of the ps stay as they are in a run, which a step that reads them would see.
    return context.updates_divide and not step.reads_optimizers(context.element_spec)


def is_ended(error: Exception) -> bool:
    """Whether a worker has failed because a ps takes no more updates."""
    return UpdatesEnded.__name__ in str(getattr(error, "original_exception", None) or error)


@dataclass(frozen=True)
class LocalParameters:
    """The parameters as an execution of a worker sees them.

    Args:
        number: of the worker's side of them, int64, shape ().
        parameters: the parameters, in the order of the model's, each with its slots.
        variables: what stores them, in the order of `SharedParameters.places`.
    """

    number: tf.Tensor
    parameters: Sequence[StoredParameter]
    variables: Sequence[Any]


@dataclass(frozen=True)
class Answer:
    """What a worker finds in the memory of the ps.

    Args:
        before: how many updates there were before the worker's own, int64, shape ().
        updates: how many there are.
        stopped: whether the execution is to end.
        values: the parameters, in the order of the model's.
    """

    before: tf.Tensor
    updates: tf.Tensor
    stopped: tf.Tensor
    values: Tensors


class SharedUpdates:
    """What workers and ps do.

    Args:
        context: the model on its cluster.
    """

    def __init__(self, context: ParameterServerContext) -> None:
        self._context = context
        self._stored = stored_parameters(context.step.optimizer, context.step.parameters)
        self._counter = iterations(context.step.optimizer).value
        of_device: dict[str, list[int]] = {self._counter.device: []}
        for number, each in enumerate(self._stored):
            of_device.setdefault(each.shards[0].device, []).append(number)
        self._devices, self._own = list(of_device), list(of_device.values())
        """The ps, the leader first, and the parameters on each of them, by their numbers."""
        parameters = [[_array(self._stored[number].shards[0]) for number in own] for own in self._own]
        slots = [[_array(slot) for number in own for (slot,) in self._stored[number].slots] for own in self._own]
        self._operations = SharedParameters(self._devices, Layout(parameters, slots))
        self._begin_run = tf.function(partial(self._publish, begins=True), autograph=False)
        self._publish_changes = tf.function(partial(self._publish, begins=False), autograph=False)
        self._read_all = tf.function(self._read, autograph=False)
        self._is_outdated = False
        """Whether workers have made updates since variables were read."""
        self._is_assigned = False
        """Whether variables were assigned since workers saw them."""
        self._expects_use = False
        """Whether callbacks may use variables now."""
        self._functions: dict[str, Any] = {}
        """What each ps runs, by the name of a thread."""

    def _variables(self, ps: int) -> list[Any]:
        """The variables on a ps: its parameters, then their slots."""
        own = [self._stored[number] for number in self._own[ps]]
        return [each.shards[0] for each in own] + [slot for each in own for (slot,) in each.slots]

    def begin(self) -> None:
        """Begins a run: writes the variables to the memory of the ps."""
        self._begin_run()

    @contextmanager
    def read_when_used(self) -> Iterator[None]:
        """Within the context, variables get what workers have made of them when they are used, see `outdate`."""
        used = [self._counter, *(each for ps in range(len(self._devices)) for each in self._variables(ps))]
        self._is_outdated = self._is_assigned = False
        by_statements = used_outside_of_functions(used, self.read_updates, self._note_assignment)
        with by_statements, announced_calls(self._before_function):
            yield
        self._is_outdated = self._is_assigned = self._expects_use = False

    def outdate(self) -> None:
        """Notes that workers have made updates since variables were read, and that callbacks may use them now."""
        self._is_outdated = self._expects_use = True

    def _before_function(self) -> None:
        """A function of a callback may use any variables."""
        if self._expects_use:
            self._expects_use = False  # not of the functions that this calls
            self.read_updates()
            self._is_assigned = self._expects_use = True

    def read_updates(self) -> None:
        """Lets variables have what workers have made of them in a run so far, unless they have it."""
        if self._is_outdated:
            self._is_outdated = False
            expects, self._expects_use = self._expects_use, False
            self._read_all()
            self._expects_use = expects

    def _note_assignment(self) -> None:
        self._is_assigned = True

    def share_changes(self) -> None:
        """Lets workers see what was assigned to variables in a run."""
        self._expects_use = False
        if self._is_assigned:
            self._is_assigned = False
            self._publish_changes()

    def _publish(self, *, begins: bool) -> None:
        updates = None
        for ps, device in enumerate(self._devices):
            with tf.device(device):
                self._operations.publish(ps, self._variables(ps))
                if begins:
                    updates = tf.identity(self._counter) if updates is None else updates
                    self._operations.begin(ps, updates)

    def _read(self) -> None:
        for ps, device in enumerate(self._devices):
            with tf.device(device):
                self._read_of(ps)

    def _read_of(self, ps: int) -> None:
        updates = self._operations.read(ps, self._variables(ps))
        if not ps:
            self._counter.assign(updates, read_value=False)

    def rate(self) -> tf.Tensor:
        """The learning rate of an execution, see `ParameterServerContext.sent_rate`; called on a worker."""
        return tf.identity(self._context.sent_rate())

    def open(self, ready: Sequence[tf.Tensor]) -> LocalParameters:
        """Begins the updates of an execution, once some tensors are there."""
        with tf.control_dependencies(ready):
            number = self._operations.borrow()
        places = iter(self._operations.places(number))
        found: dict[int, StoredParameter] = {}
        variables: list[Any] = []
        for ps, own in enumerate(self._own):
            begin = len(variables)
            for each in self._variables(ps):
                write = partial(self._operations.write, number, len(variables))
                variables.append(variable_at(next(places), each.shape, write))
            slots = iter(variables[begin + len(own) :])
            for parameter, shard in zip(own, variables[begin:], strict=False):
                stored = self._stored[parameter]
                found[parameter] = StoredParameter(stored.variable, [shard], [[next(slots)] for _ in stored.slots])
        return LocalParameters(number, [found[number] for number in range(len(found))], variables)

    def close_local(self, local: LocalParameters, done: Sequence[tf.Tensor]) -> tf.Tensor:
        """Ends the updates of an execution when some tensors are there."""
        with tf.control_dependencies(list(done)):
            values = [each.read_value() for each in local.variables]
        return self._operations.give_back(local.number, values)

    def pull(self, local: LocalParameters) -> Answer:
        """Reads the parameters."""
        return self._in_turn(local, [], lambda ps, number: self._operations.acquire(number, ps, counts=False))

    def update(self, local: LocalParameters, rate: tf.Tensor, gradients: Sequence[Any], pulled: Pulled) -> Answer:
        """Makes an update, and reads the parameters.

        Args:
            local: the variables.
            rate: see `rate`.
            gradients: one per parameter, or None.
            pulled: the parameters that they are gradients of.
        """
        whole = self._context.transport.whole_gradients(gradients, pulled)
        given = [_fitted(each, stored) for each, stored in zip(whole, local.parameters, strict=True)]
        arrived = tensors_of([part for each in given for part in each or ()])

        def make(ps: int, number: tf.Tensor) -> tf.Tensor:
            own = [each if parameter in self._own[ps] else None for parameter, each in enumerate(given)]
            before = self._operations.acquire(number, ps, counts=True)
            with changes() as made, tf.control_dependencies([before]):
                self._context.apply_to(local.parameters, own, before, rate)
            return after(before, made)

        # A ps may have no parameter with a gradient: its update is not counted before this one is computed, either.
        return self._in_turn(local, [*arrived, *pulled.values], make)

    def _in_turn(
        self, local: LocalParameters, ready: Sequence[tf.Tensor], make: Callable[[int, tf.Tensor], tf.Tensor]
    ) -> Answer:
        """Does something with one ps after another: a task never waits for a lock while it holds another one.

        Args:
            local: the variables.
            ready: what is awaited before the first lock is acquired.
            make: acquires the lock of a ps, given by its number and that of the worker's side → how many updates it
                had, when the lock may be released.
        """
        answers: list[tuple[tf.Tensor, tf.Tensor]] = []
        values: dict[int, tf.Tensor] = {}
        for ps, own in enumerate(self._own):
            before = make(ps, after(local.number, ready))
            numbers, arrived = self._operations.release(after(local.number, [before]), ps)
            ready = [numbers]
            answers.append((before, numbers))
            values |= dict(zip(own, arrived, strict=True))
        before, numbers = answers[0]
        shaped = [tf.reshape(values[number], each.shards[0].shape) for number, each in enumerate(self._stored)]
        return Answer(before, numbers[0], after(numbers[1], ready) > 0, shaped)

    def start(self) -> dict[str, Callable[[], None]]:
        """Traces what the ps run; returns it by names."""
        for ps in range(len(self._devices)) if not self._functions else ():
            wait = tf.function(partial(self._wait, ps), autograph=False).get_concrete_function()
            self._functions[f"parameters:{ps}"] = partial(self._run, wait)
        return self._functions

    def _wait(self, ps: int) -> None:
        with tf.device(self._devices[ps]):
            ended = self._operations.wait(ps)
            with tf.control_dependencies([ended]):
                self._read_of(ps)

    def _run(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        except Exception:
            self.close()
            raise

    def stop(self) -> None:
        """Lets executions end after the steps that they are taking."""
        self._operations.stop()

    def close(self) -> None:
        """Lets workers know that there are no more updates, where no ps waits."""
        try_briefly(self._operations.close)

    def end(self) -> None:
        """Ends what the ps run, when all updates are made."""
        self._operations.end()

    def abort(self, threads: Threads) -> None:
        """Ends what the ps run in threads, as far as they can be reached; workers make no more updates."""
        try_briefly(self._operations.close)
        for thread in threads.values():
            thread.join(GRACE_SECONDS)
            if thread.is_alive():
                end_at_exit(partial(try_briefly, self._operations.close), thread)


def _array(variable: Any) -> Array:
    return Array(np.dtype(variable.dtype.as_numpy_dtype), int(np.prod(variable.shape)))


def _fitted(gradient: Gradient | None, stored: StoredParameter) -> Gradient | None:
    """Gives a gradient the shape of a variable that has more values, see `variable_at`."""
    (shard,) = stored.shards
    if gradient is None or tuple(shard.shape) == tuple(stored.variable.shape):
        return gradient
    more = int(shard.shape[0]) - int(np.prod(stored.variable.shape))

    def fitted(values: tf.Tensor) -> tf.Tensor:
        return tf.pad(tf.reshape(values, [-1]), [[0, more]])

    (part,) = gradient
    if isinstance(part, SummedTerms):
        return [part.with_values(fitted(part.values), fitted(part.terms))]
    return [fitted(part)]


class SharedTrace(ExecutionTrace):
    """The trace of an execution that updates the parameters where they are.

    Args:
        arguments: see `ExecutionTrace`.
        updates: what workers and ps do.
        local: the parameters, if the execution has begun to update them.
        rate: see `SharedUpdates.rate`.
    """

    def __init__(
        self,
        *arguments: Any,
        updates: SharedUpdates,
        local: LocalParameters | None = None,
        rate: tf.Tensor | None = None,
    ) -> None:
        self._shared = updates
        self._own_rate = updates.rate() if rate is None else rate
        self._local: LocalParameters
        self._last: Answer
        if local is not None:
            self._local = local
        super().__init__(*arguments)

    def _read_numbers(self) -> tf.Tensor:
        """See `ExecutionTrace`; the rate is read before, and how many updates there were comes with the parameters."""
        return tf.zeros([], tf.int64)

    def on_counter_device(self) -> AbstractContextManager[Any]:
        """See `ExecutionTrace`: the count is on the worker."""
        return nullcontext()

    def fetch(self) -> Round:
        """See `ExecutionTrace`. Updates begin when there is a batch."""
        read = self._reader.next_round(self._next_batch)
        self._local = self._shared.open(tf.nest.flatten(read.batches)[:1])
        self._last = answer = self._shared.pull(self._local)
        return Round(read, Pulled.whole(answer.values), answer.updates)

    def exchange(self, current: Round, *, more: bool) -> tuple[tf.Tensor, Round | None]:
        """See `ExecutionTrace`."""
        self._last = answer = self._update(current)
        read = self._reader.next_round(self._next_batch) if more else None
        following = Round(read, Pulled.whole(answer.values), answer.updates) if read else None
        return answer.before, following

    def take_round(self, values: Tensors, updates: tf.Tensor) -> Answer:
        """Takes a round with parameters that are there already; returns what it leaves, with new ones.

        Args:
            values: see `Answer`.
            updates: the same.
        """
        return self._update(Round(self._reader.next_round(self._next_batch), Pulled.whole(values), updates))

    def end(self) -> None:
        """See `ExecutionTrace`."""
        read = tf.nest.flatten([self.losses, self.state, self.metrics, self.logs])
        self._shared.close_local(self._local, [self._last.stopped, *(each for each in read if tf.is_tensor(each))])

    def _sizes(self, read: ReadBatches) -> dict[str, Any]:  # noqa: ARG002 whatever it is
        """See `ExecutionTrace`: nothing crosses."""
        return {}

    def _update(self, current: Round) -> Answer:
        answer = self._shared.update(self._local, self._own_rate, self.compute(current), current.pulled)
        self.timer.end("update", answer.stopped)
        return answer


class SharedExecutions(WorkerExecutions):
    """The functions of workers that share memory with the ps, see `WorkerExecutions`.

    A loop costs no messages here, so it takes nearly all steps.

    Attributes:
        shared: what workers and ps do.
    """

    unrolls = False

    def __init__(self, context: ParameterServerContext) -> None:
        super().__init__(context)
        self.shared = SharedUpdates(context)

    def suit(self, workers: Workers) -> bool:
        """See `WorkerExecutions.suit`."""
        return workers.share_memory_now

    def stop(self) -> None:
        """See `WorkerExecutions.stop`."""
        if not self._is_stopped:
            self._is_stopped = True
            self.shared.stop()

    def begin(self) -> None:
        """See `WorkerExecutions.begin`."""
        self.shared.begin()
        self._is_stopped = False

    def _trace(self, *arguments: Any, **begun: Any) -> SharedTrace:
        return SharedTrace(self._context, *arguments, self._counts, updates=self.shared, **begun)

    def _loop_function(self) -> Any:
        every = self._updates.steps_per_round

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
            begun, start, rate = time_of(), self._start(), self.shared.rate()
            local = self.shared.open([])
            pulled = self.shared.pull(local)

            def goes_on(taken: tf.Tensor, stopped: tf.Tensor, *_: Any) -> tf.Tensor:
                return tf.logical_and(taken + every <= most, tf.logical_not(stopped))

            def take_round(
                taken: tf.Tensor, _: tf.Tensor, losses: Any, staleness: Any, updates: Any, values: Any, carried: Carried
            ) -> list[Any]:
                trace = self._trace(iterator, [every], numbers_after(numbers, taken), carried, local=local, rate=rate)
                answer = trace.take_round(values, updates)
                index = tf.cast(taken // every, tf.int32)
                losses = losses.write(index, tf.cast(tf.stack(trace.losses), tf.float64))
                staleness = staleness.write(index, answer.before - updates)
                left = shaped_like(trace.carried(), carried)
                return [taken + every, answer.stopped, losses, staleness, answer.updates, answer.values, left]

            rounds = tf.cast(most // every, tf.int32)
            losses = tf.TensorArray(tf.float64, size=rounds, element_shape=[every])
            staleness = tf.TensorArray(tf.int64, size=rounds, element_shape=[])
            zero = tf.zeros([], tf.int64)
            variables = [zero, pulled.stopped, losses, staleness, pulled.updates, pulled.values, start]
            left = tf.while_loop(goes_on, take_round, variables, parallel_iterations=1)
            taken, _, losses, staleness, updates, _, carried = left
            self._keep_state(taken, start, carried)
            self.shared.close_local(local, [updates, *tf.nest.flatten(carried)])
            done = taken // every
            return self._packed(
                begun, taken, carried, tf.reshape(losses.stack()[:done], [-1]), staleness.stack()[:done]
            )

        return execute


def new_executions(context: ParameterServerContext) -> WorkerExecutions:
    """Returns the functions of workers."""
    return SharedExecutions(context) if suits(context) else WorkerExecutions(context)
