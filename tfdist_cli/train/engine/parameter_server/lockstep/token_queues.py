"""The queues of a training in lockstep: tokens, which each ps gives, and commits, which the leader takes.

A *sequence number* is the number of a run of the engine and of a step in one: it grows from step to step and from run
to run. A step that makes several updates has a sequence number for each. On each ps a worker waits for the *token* of
its step's sequence number, which tells whether there is such a step. A ps gives the token when it has made its part of
the update before. A worker that has stored its gradient on all ps *commits* it on the first of them, the leader, in one
message: before the commit nothing of the gradient counts, after it all of it does.

A worker that is restarted finds on the ps what it needs to go on: each ps keeps its last token, so that it does not
matter which ones the worker had received. It may commit a gradient for a sequence number twice: the first one counts.
So stale tokens and commits are skipped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE
from tfdist_cli.train.engine.parameter_server.messages import Commit, StepKind, Token
from tfdist_cli.train.model.train_step import Tensors

RUN = 1 << 40
"""Sequence numbers of a run: more than it has steps."""
_LAST = 1 << 62
"""A sequence number after all others."""

Handles = dict[str, list[tf.Tensor]]
"""Queues and variables as arguments of a function, by name."""


class Orders(ABC):
    """What chief, ps and workers of one training send each other; the queues between the chief and the leader.

    Args:
        bounds: how many numbers an order has for the division of the examples among the workers, see
            `BatchSizes.bounds`; 0 if they are not divided.
    """

    def __init__(self, bounds: int = 0) -> None:
        with tf.device(CHIEF_DEVICE):
            self._results = tf.queue.FIFOQueue(-1, [tf.float64])
            self._orders = tf.queue.FIFOQueue(-1, [tf.int64], [[1 + bounds]])

    @property
    def of_chief(self) -> Handles:
        """The queues as arguments of the function that applies updates."""
        return {"results": [self._results.queue_ref], "orders": [self._orders.queue_ref]}

    @property
    @abstractmethod
    def handles(self) -> Handles:
        """The arguments of the function that applies updates."""

    @property
    def numbers(self) -> Sequence[int]:
        """Further numbers for a worker's function: to send it another tensor takes another message."""
        return ()

    @abstractmethod
    def of(self, worker: int) -> Handles:
        """The arguments of a worker's function."""

    @abstractmethod
    def start(self, sequence: int) -> None:
        """Starts a run, before its workers start. Called within the strategy's scope.

        Args:
            sequence: the run's first sequence number.
        """

    def order(self, kind: StepKind, bounds: Sequence[int] = ()) -> None:
        """Orders a `SINGLE` update, a `CHUNK` of them, or the `END`.

        Args:
            kind: which of them.
            bounds: how the examples of these updates are divided among the workers, if they are.
        """
        self._orders.enqueue(tf.constant([kind, *bounds], tf.int64))

    def received(self) -> np.ndarray:
        """Waits on the chief for the step reports of the next applied chunk, or for `stop`.

        Returns:
            The reports, float64, shape (updates, workers, numbers); shape (0,) if no more are wanted.
        """
        found: np.ndarray = self._results.dequeue().numpy()
        return found

    def stop(self) -> None:
        """Tells the thread that waits in `received` that no more reports are wanted."""
        self._results.enqueue(tf.zeros([0], tf.float64))

    @abstractmethod
    def abort(self, times: int) -> None:
        """Tells all workers that there is no step.

        Args:
            times: how many tokens a worker may take before it looks at one.
        """

    @abstractmethod
    def close_commits(self) -> None:
        """Fails the function that waits for commits: there are no more."""


class TokenQueues(Orders):
    """The queues and variables of one training.

    Args:
        devices: the ps; the first one is the leader.
        workers: how many workers there are.
        report: how many numbers a step report is.
        divides: whether the examples of an update are divided among the workers, see `BatchSizes.bounds`.
    """

    def __init__(self, devices: Sequence[str], workers: int, report: int, *, divides: bool = False) -> None:
        super().__init__((workers + 1) * divides)
        self._tokens: list[list[tf.queue.FIFOQueue]] = []
        self._last = []
        for device in devices:
            with tf.device(device):
                self._tokens.append([tf.queue.FIFOQueue(-1, [tf.int64], [[Token.SIZE]]) for _ in range(workers)])
                self._last.append(tf.Variable([-1, StepKind.END], dtype=tf.int64, trainable=False))
        with tf.device(devices[0]):
            types, shapes = [tf.int64, tf.float64], [[Commit.SIZE], [report]]
            self._commits = [tf.queue.FIFOQueue(-1, types, shapes) for _ in range(workers)]
            bounds = [0] * (workers + 1)
            self._bounds = [tf.Variable(bounds, dtype=tf.int64, trainable=False)] if divides else []
            self._started = [tf.Variable(-1, dtype=tf.int64, trainable=False) for _ in range(workers)]

    @property
    def handles(self) -> Handles:
        """The arguments of the function that applies updates."""
        return {
            **{f"tokens{number}": [queue.queue_ref for queue in own] for number, own in enumerate(self._tokens)},
            "last": [variable.handle for variable in self._last],
            "commits": [queue.queue_ref for queue in self._commits],
            **self.of_chief,
            "bounds": [variable.handle for variable in self._bounds],
        }

    def of(self, worker: int) -> Handles:
        """The arguments of a worker's function: on each ps its tokens and the last token; and what the leader has."""
        return {
            "tokens": [own[worker].queue_ref for own in self._tokens],
            "last": [variable.handle for variable in self._last],
            "commits": [self._commits[worker].queue_ref],
            "started": [self._started[worker].handle],
            "bounds": [variable.handle for variable in self._bounds],
        }

    def start(self, sequence: int) -> None:
        """Starts a run, before its workers start: none of them may use the last token of an earlier run.

        Called within the strategy's scope.

        Args:
            sequence: the run's first sequence number.
        """
        _set_last_tokens([variable.handle for variable in self._last], tf.constant(sequence, tf.int64))

    def abort(self, times: int) -> None:
        """Tells all workers that there is no step.

        Args:
            times: how many tokens a worker may take before it looks at one.
        """
        end = tf.constant([_LAST, StepKind.END], tf.int64)
        for last, own in zip(self._last, self._tokens, strict=True):
            last.assign(end)
            for queue in own:
                queue.enqueue_many([tf.stack([end] * times)])

    def close_commits(self) -> None:
        """Fails the function that waits for commits: there are no more."""
        for queue in self._commits:
            queue.close()


@tf.function(autograph=False)
def _set_last_tokens(lasts: list[tf.Tensor], sequence: tf.Tensor) -> None:
    """A function, which is done when it returns; a single operation on another task may be done any time later."""
    for last in lasts:
        tf.raw_ops.AssignVariableOp(resource=last, value=Token.pack(sequence - 1, int(StepKind.SINGLE)))


def next_order(handles: Handles) -> tuple[tf.Tensor, Tensors]:
    """Waits on the chief for the next order.

    Returns:
        Its `StepKind`, int64, shape (); and how examples are divided among the workers, if they are.
    """
    with tf.device(CHIEF_DEVICE):
        (order,) = tf.raw_ops.QueueDequeueV2(handle=handles["orders"][0], component_types=[tf.int64])
        return tf.ensure_shape(order[:1], [1])[0], [order[1:]] if handles["bounds"] else []


def divide(bounds: tf.Tensor, value: tf.Tensor) -> Any:
    """Divides the examples of the next updates, on the leader, before it gives the token of the first one.

    Args:
        bounds: a variable, see `BatchSizes.bounds`.
        value: its new value.
    """
    return tf.raw_ops.AssignVariableOp(resource=bounds, value=value)


def bounds_of(bounds: tf.Tensor, worker: tf.Tensor, token: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns where a worker's examples begin and end among those of an update.

    Args:
        bounds: a variable on the leader.
        worker: the worker's number.
        token: the worker's token for the update, after which this is known.
    """
    with tf.control_dependencies([token]):
        known = tf.raw_ops.ReadVariableOp(resource=bounds, dtype=tf.int64)
    return known[worker], known[worker + 1]


def send_results(handles: Handles, reports: tf.Tensor) -> None:
    """Sends the step reports of an applied chunk to the chief."""
    with tf.device(CHIEF_DEVICE):
        tf.raw_ops.QueueEnqueueV2(handle=handles["results"][0], components=[reports])


def give_token(last: tf.Tensor, queues: Sequence[tf.Tensor], token: tf.Tensor) -> None:
    """Gives all workers a token on one ps, after those before it; called on it.

    Args:
        last: the ps's last token, a variable.
        queues: one for each worker.
        token: a packed `Token`.
    """
    kept = tf.raw_ops.AssignVariableOp(resource=last, value=token)
    with tf.control_dependencies([kept]):
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[token])


def last_token(last: tf.Tensor) -> tf.Tensor:
    """Returns the last token that one ps has given: int64, shape (2,)."""
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=last, dtype=tf.int64), [Token.SIZE])


def next_token(queue: tf.Tensor) -> tf.Tensor:
    """Waits for a worker's next token on one ps, whatever its sequence number: int64, shape (2,)."""
    (token,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    return tf.ensure_shape(token, [Token.SIZE])


def token_of(queue: tf.Tensor, known: tf.Tensor, sequence: tf.Tensor) -> tf.Tensor:
    """Skips stale tokens.

    Args:
        queue: a worker's tokens on one ps.
        known: a token that has been received; the next ones are taken if it is stale.
        sequence: a step's sequence number.

    Returns:
        The first token with this sequence number or a later one: int64, shape (2,).
    """

    def is_stale(token: tf.Tensor) -> tf.Tensor:
        return Token(token).sequence < sequence

    (token,) = tf.while_loop(is_stale, lambda _: [next_token(queue)], [known], parallel_iterations=1)
    return token


def restarts(started: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Notes on the leader that a worker starts a run; returns whether it has started it before.

    Args:
        started: the first sequence number of the last run that the worker has started, a variable.
        first: the run's first sequence number.
    """
    before = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=started, dtype=tf.int64), [])
    with tf.control_dependencies([before]):
        tf.raw_ops.AssignVariableOp(resource=started, value=tf.identity(first))
    return tf.equal(before, first)


def commit(queue: tf.Tensor, head: tf.Tensor, report: tf.Tensor) -> None:
    """Commits a gradient, on the leader, after those of the steps before.

    Args:
        queue: the worker's.
        head: a packed `Commit`.
        report: a packed `StepReport`.
    """
    tf.raw_ops.QueueEnqueueV2(handle=queue, components=[head, report])


def committed(queues: Sequence[tf.Tensor], sequence: tf.Tensor, report: int) -> tuple[Commit, tf.Tensor]:
    """Waits on the leader until all workers have committed a gradient for a sequence number; skips stale commits.

    There is one loop for all of them: a loop for each would cost as much again as the update's other operations.

    Args:
        queues: one for each worker.
        sequence: the update's.
        report: how many numbers a step report is.

    Returns:
        The commits, in the order of the workers, and the step reports, shape (workers, `report`).
    """

    def received(queue: tf.Tensor) -> list[tf.Tensor]:
        head, body = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64, tf.float64])
        return [tf.ensure_shape(head, [Commit.SIZE]), tf.ensure_shape(body, [report])]

    def stacked(each: Sequence[list[tf.Tensor]]) -> list[tf.Tensor]:
        return [tf.stack(own) for own in zip(*each, strict=True)]

    def some_are_stale(heads: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(Commit(heads).sequence < sequence)

    def skip_stale(heads: tf.Tensor, bodies: tf.Tensor) -> list[tf.Tensor]:
        following = []
        for queue, *own in zip(queues, tf.unstack(heads), tf.unstack(bodies), strict=True):
            again = partial(received, queue)
            following.append(tf.while_loop(is_stale, lambda *_, again=again: again(), own, parallel_iterations=1))
        return stacked(following)

    def is_stale(head: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return Commit(head).sequence < sequence

    first = stacked([received(queue) for queue in queues])
    heads, bodies = tf.while_loop(some_are_stale, skip_stale, first, parallel_iterations=1)
    return Commit(heads), bodies
