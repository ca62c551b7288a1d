"""The functions that asynchronous workers execute where they update the parameters in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.asynchronous.executions import (
    Carried,
    ExecutionTrace,
    Round,
    WorkerExecutions,
    shaped_like,
)
from tfdist_cli.train.engine.parameter_server.asynchronous.shared_memory import (
    Answer,
    LocalParameters,
    SharedUpdates,
    suits,
)
from tfdist_cli.train.engine.parameter_server.batches import ReadBatches
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.step_rows import MOST_TOGETHER, Row, Step, StepRows
from tfdist_cli.train.engine.parameter_server.transport import Pulled
from tfdist_cli.train.engine.parameter_server.workers import Workers
from tfdist_cli.train.engine.step_timer import time_of
from tfdist_cli.train.model.rng.counters import numbers_after
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import in_rows


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
            updates: the same; the batches are read once it is there.
        """
        read = self._reader.next_round(self._next_batch, [updates])
        return self._update(Round(read, Pulled.whole(values), updates))

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
        self._rows = StepRows(context)
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
        def execute(iterator: Any, numbers: tf.Tensor, limits: tf.Tensor) -> tf.Tensor:
            most, unchecked = tf.unstack(limits)
            begun, start, rate = time_of(), self._start(), self.shared.rate()
            local = self.shared.open([])
            pulled = self.shared.pull(local)

            def take_round(
                taken: tf.Tensor, _: tf.Tensor, updates: tf.Tensor, values: Tensors, carried: Carried
            ) -> Any:
                trace = self._trace(iterator, [every], numbers_after(numbers, taken), carried, local=local, rate=rate)
                answer = trace.take_round(values, updates)
                left = shaped_like(trace.carried(), carried)
                told = [tf.cast(tf.stack(trace.losses), tf.float64), answer.before - updates]
                return [taken + every, answer.stopped, answer.updates, answer.values, left], told

            first = [tf.zeros([], tf.int64), pulled.stopped, pulled.updates, pulled.values, start]
            loop = RoundLoop(most, unchecked, every)
            left, losses, staleness = loop.run(take_round, first, self._rows)
            taken, _, updates, _, carried = left
            self._keep_state(taken, start, carried)
            self.shared.close_local(local, [updates, *tf.nest.flatten(carried)])
            return self._packed(begun, taken, carried, losses, staleness)

        return execute


class RoundLoop:
    """Takes rounds until as many steps are taken as are wanted, or the training is to pause.

    Args:
        most: how many steps it takes at most, int64, shape ().
        unchecked: how many steps it may take without a look at whether it is to stop.
        every: steps in a round.
    """

    def __init__(self, most: tf.Tensor, unchecked: tf.Tensor, every: int) -> None:
        self._most, self._unchecked, self._every = most, unchecked, every

    def run(self, take_round: Step, first: list[Any], rows: StepRows) -> tuple[list[Any], tf.Tensor, tf.Tensor]:
        """Runs the loop.

        Args:
            take_round: steps so far, whether it is to stop, and other tensors → the same after a round; and the losses
                of its steps, and the staleness of its update.
            first: the arguments for the first round.
            rows: unrolls rounds.

        Returns:
            The same after the last round, and the losses of all steps and the staleness of all updates.
        """
        several = rows.most(max(1, MOST_TOGETHER // self._every))
        unrolled = rows.unrolled(take_round, first, several)
        goes_on, single = partial(self._may_take, 1), partial(self._single, unrolled.single)
        rounds = tf.cast(self._most // self._every, tf.int32)
        losses = tf.TensorArray(tf.float64, size=rounds, element_shape=[self._every])
        staleness = tf.TensorArray(tf.int64, size=rounds, element_shape=[])
        variables = [*first, losses, staleness]
        if unrolled.row is None:
            left = tf.while_loop(goes_on, single, variables, parallel_iterations=1)
        else:
            row = partial(self._row, unrolled.row)
            left = in_rows(goes_on, partial(self._may_take, several), row, single, variables)
        *left, losses, staleness = left
        done = left[0] // self._every
        return left, tf.reshape(losses.stack()[:done], [-1]), staleness.stack()[:done]

    def _single(self, step: Step, *variables: Any) -> list[Any]:
        left, told = step(*variables[:-2])
        return self._with_told(variables, left, [told])

    def _row(self, row: Row, *variables: Any) -> list[Any]:
        return self._with_told(variables, *row(*variables[:-2]))

    def _may_take(self, rounds: int, taken: tf.Tensor, stopped: tf.Tensor, *_: Any) -> tf.Tensor:
        """Whether so many rounds may be taken at once."""
        steps = rounds * self._every
        may = tf.logical_and(taken + steps <= self._most, tf.logical_not(stopped))
        return may if rounds == 1 else tf.logical_and(may, self._unchecked >= steps)

    def _with_told(
        self, variables: Sequence[Any], left: Sequence[Any], told: Sequence[Sequence[tf.Tensor]]
    ) -> list[Any]:
        """Returns the variables of the loop after rounds, with what these tell of themselves."""
        losses, staleness = variables[-2:]
        begin = tf.cast(variables[0] // self._every, tf.int32)
        for number, (own_losses, behind) in enumerate(told):
            losses = losses.write(begin + number, own_losses)
            staleness = staleness.write(begin + number, behind)
        return [*left, losses, staleness]


def new_executions(context: ParameterServerContext) -> WorkerExecutions:
    """Returns the functions of workers."""
    return SharedExecutions(context) if suits(context) else WorkerExecutions(context)
