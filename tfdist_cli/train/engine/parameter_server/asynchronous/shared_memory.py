"""Asynchronous updates of tasks that share memory: parameters and gradients cross there, see `exchanges`.

Each ps runs a function for as long as a run lasts, in which it takes one worker's gradients after another. So a
worker's execution has operations of its own task alone, but for those at its begin and its end. The learning rate
crosses with the gradients, since callbacks may set it between executions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.exchange_operations import Exchanges
from tfdist_cli.train.cluster.shared_memory.exchanges import NotAnswered, Wanted
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.engine.parameter_server.asynchronous.executions import (
    Carried,
    ExecutionTrace,
    Round,
    WorkerExecutions,
    shaped_like,
)
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.transport import Pulled, PushedGradients
from tfdist_cli.train.engine.parameter_server.worker_functions import Threads, try_briefly
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.engine.step_timer import time_of
from tfdist_cli.train.model.rng.counters import numbers_after
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.optimizers.update_numbers import UpdateCounts
from tfdist_cli.train.tf_compat.control_flow import after
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit
from tfdist_cli.train.tf_compat.keras_optimizer import iterations


def suits(context: ParameterServerContext) -> bool:
    """Whether a training can take this way: all of its parameters cross whole, and each ps updates its own alone."""
    step, transport, updates = context.step, context.transport, context.rules.updates
    if not (transport.shared and context.workers.share_memory_now) or transport.has_tables or not transport.buckets:
        return False
    if len(context.workers) != context.workers.most or step.updates_within:
        return False
    if updates.local_steps > 1 or updates.prefetch or updates.delay_compensation:
        return False
    return context.updates_divide


def is_not_answered(error: Exception) -> bool:
    """Whether a worker has failed because a ps answers no more."""
    return NotAnswered.__name__ in str(getattr(error, "original_exception", None) or error)


@dataclass(frozen=True)
class Answer:
    """What the ps have answered.

    Args:
        before: how many updates there were before this one, int64, shape ().
        updates: how many there are.
        stopped: whether the execution is to end.
        values: the values of all ps, if they were wanted.
    """

    before: tf.Tensor
    updates: tf.Tensor
    stopped: tf.Tensor
    values: Tensors


class SharedExchanges:
    """What workers and ps do in exchanges.

    Args:
        context: the model on its cluster.
        counts: of the updates on each ps.
        stopped: the variable, on the leader, that tells executions to end.
    """

    def __init__(self, context: ParameterServerContext, counts: UpdateCounts, stopped: Any) -> None:
        self._context, self._counts, self._stopped = context, counts, stopped
        leader = iterations(context.step.optimizer).value.device
        found = dict.fromkeys(bucket.device for bucket in context.transport.buckets)
        self._devices = sorted(found, key=lambda device: device != leader)
        self._operations = Exchanges(self._devices, self._layout())
        self._present: list[bool] = []
        """Which parameters have a gradient; known when a worker's function has been traced."""
        self._functions: dict[str, Any] = {}
        """What each ps runs, by the name of a thread."""

    def _layout(self) -> Layout:
        values: dict[str, list[Array]] = {device: [] for device in self._devices}
        gradients: dict[str, list[Array]] = {device: [] for device in self._devices}
        for bucket in self._context.transport.buckets:
            dtype, shown, sent = self._context.transport.crossing(bucket)
            values[bucket.device].append(Array(np.dtype(dtype.as_numpy_dtype), shown))
            gradients[bucket.device].append(Array(np.dtype(dtype.as_numpy_dtype), sent))
        return Layout(list(values.values()), list(gradients.values()), Array(np.dtype(np.float64), 1))

    def rate(self) -> tf.Tensor:
        """What an execution sends of the learning rate, float64, shape (1,); called on a worker."""
        return tf.reshape(self._context.sent_rate(), [1])

    def begin(self, ready: Sequence[tf.Tensor]) -> tf.Tensor:
        """Begins the exchanges of an execution, once some tensors are there; returns their number."""
        with tf.control_dependencies(ready):
            return self._operations.borrow()

    def end(self, number: tf.Tensor, done: Sequence[tf.Tensor]) -> tf.Tensor:
        """Ends them when some tensors are there: then nothing reads what was pulled; returns the number."""
        return self._operations.give_back(after(number, done))

    def pull(self, number: tf.Tensor, rate: tf.Tensor) -> Answer:
        """Asks for the parameters.

        Args:
            number: of the exchanges.
            rate: see `rate`.
        """
        return self.answer(self._operations.request(number, Wanted.VALUES, rate, []))

    def push(
        self, number: tf.Tensor, rate: tf.Tensor, gradients: Sequence[Any], pulled: Pulled, *, pulls: bool
    ) -> tf.Tensor:
        """Sends gradients; returns the number when they are sent, for `answer`.

        Args:
            number: of the exchanges.
            rate: see `rate`.
            gradients: one per parameter, or None.
            pulled: the parameters that they are gradients of.
            pulls: whether the new parameters are wanted.
        """
        self._present = [gradient is not None for gradient in gradients]
        packed = self._context.transport.packed_gradients(gradients, pulled)
        wanted = Wanted.UPDATE | Wanted.VALUES if pulls else Wanted.UPDATE
        return self._operations.request(number, wanted, rate, self._by_device(packed))

    def answer(self, sent: tf.Tensor) -> Answer:
        """Waits for the answers to what was sent."""
        numbers, values = self._operations.await_answer(sent)
        before, now, stopped = tf.unstack(numbers)
        return Answer(before, now, stopped > 0, values)

    def _by_device(self, packed: Tensors) -> Tensors:
        buckets = self._context.transport.buckets
        return [
            each
            for device in self._devices
            for each, bucket in zip(packed, buckets, strict=True)
            if bucket.device == device
        ]

    def pulled(self, values: Tensors) -> Pulled:
        """The parameters of an answer."""
        buckets, left = self._context.transport.buckets, iter(values)
        of_device = {
            device: iter([next(left) for bucket in buckets if bucket.device == device]) for device in self._devices
        }
        return self._context.transport.seen([next(of_device[bucket.device]) for bucket in buckets])

    def _serving_function(self, number_of_ps: int) -> Any:
        device = self._devices[number_of_ps]
        buckets = self._context.transport.buckets

        def serve_next(_: tf.Tensor) -> tf.Tensor:
            wanted, report, arrays = self._operations.take(number_of_ps)
            updates = tf.bitwise.bitwise_and(wanted, int(Wanted.UPDATE)) > 0
            count = self._counts.on(device)
            number, now = tf.cond(
                updates, lambda: self._update(device, report[0], arrays), lambda: (count.read_value(),) * 2
            )
            with tf.control_dependencies([now]):
                stopped = tf.zeros([], tf.bool) if number_of_ps else self._stopped.read_value()
                shown = [self._context.transport.shown(bucket) for bucket in buckets if bucket.device == device]
            numbers = tf.stack([number, now, tf.cast(stopped, tf.int64)])
            answered = self._operations.answer(number_of_ps, numbers, shown)
            return after(wanted, [answered]) != int(Wanted.NOTHING)

        @tf.function(autograph=False)
        def serve() -> None:
            with tf.device(device):
                tf.while_loop(lambda goes_on: goes_on, serve_next, [tf.constant(True)], parallel_iterations=1)

        return serve

    def _update(self, device: str, rate: tf.Tensor, arrays: Tensors) -> tuple[tf.Tensor, tf.Tensor]:
        """Applies a worker's gradients on a ps; returns how many updates there were before, and how many there are."""
        left = iter(arrays)
        transport = self._context.transport
        packed = [next(left) if bucket.device == device else None for bucket in transport.buckets]
        arrived = [
            None if own is None else tf.cast(own, bucket.dtype)
            for own, bucket in zip(packed, transport.buckets, strict=True)
        ]
        gradients = transport.gradients([PushedGradients(arrived, [[] for _ in arrived])])
        number = self._context.apply_on(device, gradients, self._present, self._counts, rate)
        return number, number + 1

    def start(self) -> dict[str, Callable[[], None]]:
        """Traces what the ps run; returns it by names. A worker's function was traced before."""
        for number in range(len(self._devices)) if not self._functions else ():
            serve = self._serving_function(number).get_concrete_function()
            self._functions[f"exchanges:{number}"] = partial(self._run, serve)
        return self._functions

    def _run(self, serve: Callable[[], None]) -> None:
        try:
            serve()
        except Exception:
            self.close()
            raise

    def close(self) -> None:
        """Lets workers that wait know that there will be no answer, where no ps takes requests."""
        try_briefly(self._operations.close)

    def stop(self) -> None:
        """Ends what the ps run, when all exchanges are made."""
        self._operations.end()

    def abort(self, threads: Threads) -> None:
        """Ends what the ps run in threads, as far as they can be reached; workers that wait get no answer."""
        try_briefly(self._operations.abort)
        for thread in threads.values():
            thread.join(GRACE_SECONDS)
            if thread.is_alive():
                end_at_exit(partial(try_briefly, self._operations.abort), thread)


class SharedTrace(ExecutionTrace):
    """The trace of an execution that makes exchanges.

    Args:
        arguments: see `ExecutionTrace`.
        exchanges: what workers and ps do.
        number: of the execution's exchanges, if they have begun.
        rate: see `SharedExchanges.rate`.
    """

    def __init__(
        self,
        *arguments: Any,
        exchanges: SharedExchanges,
        number: tf.Tensor | None = None,
        rate: tf.Tensor | None = None,
    ) -> None:
        self._exchanges, self._number, self._sent_rate = exchanges, number, rate
        super().__init__(*arguments)

    def _read_numbers(self) -> tf.Tensor:
        """See `ExecutionTrace`; how many updates there were comes with the parameters."""
        if self._sent_rate is None:
            self._sent_rate = self._exchanges.rate()
        return tf.zeros([], tf.int64)

    def on_counter_device(self) -> AbstractContextManager[Any]:
        """See `ExecutionTrace`: the count is on the worker."""
        return nullcontext()

    def fetch(self) -> Round:
        """See `ExecutionTrace`. Exchanges begin when there is a batch."""
        read = self._reader.next_round(self._next_batch)
        self._number = self._exchanges.begin(tf.nest.flatten(read.batches)[:1])
        answer = self._exchanges.pull(self._number, self._sent_rate)
        return Round(read, self._exchanges.pulled(answer.values), answer.updates)

    def exchange(self, current: Round, *, more: bool) -> tuple[tf.Tensor, Round | None]:
        """See `ExecutionTrace`."""
        sent = self._send(current, pulls=more)
        read = self._reader.next_round(self._next_batch) if more else None
        answer = self._answer(sent)
        following = Round(read, self._exchanges.pulled(answer.values), answer.updates) if read else None
        return answer.before, following

    def take_round(self, values: Tensors, updates: tf.Tensor) -> Answer:
        """Takes a round with parameters that are there already; returns what the ps answer, with new ones.

        Args:
            values: see `Answer`.
            updates: the same.
        """
        read = self._reader.next_round(self._next_batch)
        return self._answer(self._send(Round(read, self._exchanges.pulled(values), updates), pulls=True))

    def end(self) -> None:
        """See `ExecutionTrace`."""
        read = tf.nest.flatten([self.losses, self.state, self.metrics, self.logs])
        self._exchanges.end(self._number, [each for each in read if tf.is_tensor(each)])

    def _send(self, current: Round, *, pulls: bool) -> tf.Tensor:
        gradients = self.compute(current)
        sent = self._exchanges.push(self._number, self._sent_rate, gradients, current.pulled, pulls=pulls)
        self.timer.end("push", sent)
        return sent

    def _answer(self, sent: tf.Tensor) -> Answer:
        answer = self._exchanges.answer(sent)
        self.timer.end("update", answer.before)
        self._number = after(sent, [answer.before])
        return answer


class SharedExecutions(WorkerExecutions):
    """The functions of workers that share memory with the ps, see `WorkerExecutions`.

    A loop costs no messages here, so it takes nearly all steps.

    Attributes:
        exchanges: what workers and ps do.
    """

    unrolls = False

    def __init__(self, context: ParameterServerContext) -> None:
        super().__init__(context)
        self.exchanges = SharedExchanges(context, self._counts, self._stopped)

    def suit(self, workers: Workers) -> bool:
        """See `WorkerExecutions.suit`."""
        return workers.share_memory_now

    def _trace(self, *arguments: Any, **begun: tf.Tensor) -> SharedTrace:
        return SharedTrace(self._context, *arguments, self._counts, exchanges=self.exchanges, **begun)

    def _loop_function(self) -> Any:
        every = self._updates.steps_per_round

        @tf.function(autograph=False)
        def execute(iterator: Any, numbers: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
            begun, start, rate = time_of(), self._start(), self.exchanges.rate()
            number = self.exchanges.begin([])
            pulled = self.exchanges.pull(number, rate)

            def goes_on(taken: tf.Tensor, stopped: tf.Tensor, *_: Any) -> tf.Tensor:
                return tf.logical_and(taken + every <= most, tf.logical_not(stopped))

            def take_round(
                taken: tf.Tensor, _: tf.Tensor, losses: Any, staleness: Any, updates: Any, values: Any, carried: Carried
            ) -> list[Any]:
                trace = self._trace(iterator, [every], numbers_after(numbers, taken), carried, number=number, rate=rate)
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
            self.exchanges.end(number, [updates, *tf.nest.flatten(carried)])
            done = taken // every
            return self._packed(
                begun, taken, carried, tf.reshape(losses.stack()[:done], [-1]), staleness.stack()[:done]
            )

        return execute


def new_executions(context: ParameterServerContext) -> WorkerExecutions:
    """Returns the functions of workers."""
    return SharedExecutions(context) if suits(context) else WorkerExecutions(context)
