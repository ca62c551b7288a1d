"""A worker that takes steps in lockstep and updates its part of all values, as operations of a function of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfdist_cli.train.cluster.shared_memory.lockstep.step_operations import Places
from tfdist_cli.train.cluster.shared_memory.lockstep.worker import IS_OVER
from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.batches import BatchReader
from tfdist_cli.train.engine.parameter_server.gradient_store import StepNumbers
from tfdist_cli.train.engine.parameter_server.messages import Token
from tfdist_cli.train.engine.parameter_server.transport import Pulled
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, changes, in_rows
from tfdist_cli.train.tf_compat.functions import SINGLE_THREADED, copied, function_kept_whole, why_not_in_order

if TYPE_CHECKING:
    from tfdist_cli.train.engine.parameter_server.lockstep.worker_updates import WorkerUpdateFunctions

MOST_TOGETHER = 5
"""Steps in one function. With a single one, the MLP 784-500-500-10 at batch 64 takes 0.9 times as many. With more, the
function takes longer to compile."""


class UpdatingWorker:
    """A worker in a run.

    Args:
        functions: what it belongs to.
        iterator: its data.
        numbers: see `LockstepFunctions.work`.
        number: of the worker in the run.
        places: of all ps.
    """

    def __init__(
        self,
        functions: WorkerUpdateFunctions,
        iterator: Any,
        numbers: tf.Tensor,
        number: tf.Tensor,
        places: Sequence[Places],
    ) -> None:
        self._functions, self._iterator, self._numbers, self._number = functions, iterator, numbers, number
        self._context = functions.store.context
        self._parts = functions.local_parts(number, places)
        self._values, self._state = functions.in_order(places)
        self._rate = tf.identity(self._context.sent_rate())

    def leave(self, last: tf.Tensor) -> tf.Tensor:
        """Ends the worker's part in the run after the last token; returns what is awaited for that."""
        with tf.control_dependencies([last]):
            parts = [each for part in self._parts for each in (*part.shards, *(own for (own,) in part.slots))]
            values = [each.read_value() for each in parts]
        return self._functions.steps.leave(after(self._number, [last]), values)

    def steps(self, start: list[tf.Tensor], several: int) -> list[tf.Tensor]:
        """Takes steps until the run is over.

        Args:
            start: the arguments of `step` for the first one.
            several: how many steps are one function for the single-threaded executor, where so many may be taken.

        Returns:
            The same after the last step.
        """

        def own(*carried: tf.Tensor) -> list[Any]:
            return self.step(*map(tf.identity, carried))  # a copy cannot wait for an argument itself

        copy = copied(own, *start) if several > 1 else None
        step = copy or self.step
        row = copy and self._row(copy, several, start)
        if row is None:
            return list(tf.while_loop(goes_on, step, start, parallel_iterations=1))
        return in_rows(goes_on, lambda token, *_: Token(token).kind >= several, row, step, start)

    def _row(self, copy: Callable[..., Any], several: int, start: Sequence[tf.Tensor]) -> Callable[..., Any] | None:
        """Returns a function of several steps that the single-threaded executor runs; None if it cannot.

        Args:
            copy: adds a step to the function that is being traced.
            several: how many steps.
            start: arguments of a step.
        """

        def function_of(count: int) -> Any:
            def take(*carried: tf.Tensor) -> Sequence[tf.Tensor]:
                for _ in range(count):
                    carried = copy(*carried)
                return carried

            return function_kept_whole(take).get_concrete_function(*start)

        # Two steps have all that many have, and TensorFlow optimizes them in a fraction of the time.
        if refusal := why_not_in_order(function_of(2)):
            self._functions.takes_default_executor(refusal)
            return None
        function = function_of(several)

        def call(*carried: tf.Tensor) -> Any:
            with tf.experimental.function_executor_type(SINGLE_THREADED):
                return function(*carried)

        return call

    def step(self, token: tf.Tensor, *carried: tf.Tensor) -> list[Any]:
        """Takes a step.

        Args:
            token: of this step, packed.
            carried: the end of the last phase, and what was measured since the report of the step before.

        Returns:
            The same for the next one.
        """
        functions, context = self._functions, self._context
        start, before = carried[:1], list(carried[1:])
        timer = StepTimer(functions.store.measures_phases, *start)
        with changes() as made:
            read = BatchReader(context, [1], ahead=False).next_round(lambda: next_batch(self._iterator), [token])
            timer.end("data", read.batches)
            with context.transport.device_scope():
                pulled = Pulled.whole([after(each, [token]) for each in self._values])
            state = [after(each, [token]) for each in self._state]
            timer.end("pull", pulled.values)
            own = StepNumbers(self._numbers[0], functions.step_number(token), self._numbers[3:])
            result, report = functions.store.train(read, own, pulled.values, state, [token])
            sent = functions.sent(result.gradients, pulled)
            timer.end("compute", sent)
        # Whatever uses the values where they are has to have done so.
        report = after(tf.concat([report, *_sum(timer.totals(), before)], axis=0), made)
        following = StepTimer(functions.store.measures_phases, *timer.last_time)
        token = self._update(Token(token).sequence, report, sent, following)
        return [token, *following.last_time, *following.totals()]

    def replay(self, ready: tf.Tensor) -> tf.Tensor:
        """Makes the updates again that were lost with an earlier process; returns what is awaited for that."""

        def update(*numbers: tf.Tensor) -> list[tf.Tensor]:
            count, means = numbers[1], list(numbers[2:])
            made = self._apply(count, means)
            return following(after(self._number, made))

        def following(number: tf.Tensor) -> list[tf.Tensor]:
            count, found, means = self._functions.steps.replay(number)
            return [found, count, *means]

        start = following(after(self._number, [ready]))
        found, *_ = tf.while_loop(lambda found, *_: found, update, start, parallel_iterations=1)
        return found

    def _apply(self, count: tf.Tensor, means: Tensors) -> list[tf.Operation]:
        """Updates the worker's parts with the means of gradients; returns what does so."""
        with changes() as made, tf.control_dependencies([count]):
            self._context.apply_to(self._parts, [[each] for each in means], count, self._rate)
        return made

    def _update(self, sequence: tf.Tensor, report: tf.Tensor, sent: Tensors, timer: StepTimer) -> tf.Tensor:
        """Commits gradients, and updates the worker's part; returns the token of the next step."""
        steps = self._functions.steps
        if self._functions.store.measures_phases:
            committed = steps.commit(self._number, sequence, report, sent)
            timer.end("push", committed)
            count, means = steps.gradients(self._number, committed)
        else:
            count, means = steps.meet(self._number, sequence, report, sent)
        timer.end("wait", count)
        made = self._apply(count, means)
        timer.end("update", made)
        token = steps.finish(self._number, after(sequence, made))
        timer.end("wait", token)
        return token


def goes_on(token: tf.Tensor, *_: Any) -> tf.Tensor:
    """Whether there is a step with a packed `Token`."""
    return Token(token).kind != IS_OVER


def _sum(measured: Tensors, before: Tensors) -> Tensors:
    return [one + other for one, other in zip(measured, before, strict=True)]
