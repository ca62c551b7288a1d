"""How workers and ps keep step with each other: turns, which each ps gives, and commits, which the leader takes.

A *place* is a run of the engine and a step's number in one: places grow from step to step and from run to run. On each
ps a worker waits for the *turn* of its step's place, which says whether there is such a step at all. The turn is given
when that ps has made its part of the update before it. When a worker has left its gradient on all ps, it *commits* it
on the first of them, the leader, in one message: before that nothing of it counts, after it all of it does.

A worker that is lost and comes back finds on the ps what it needs to go on: each ps knows its last turn, so that it
does not matter which ones the worker had received. It may commit a gradient for a place a second time: the first one
counts. So turns and commits of places that are past are passed over wherever one is awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE

RUN = 1 << 40
"""Places of a run: more than it has steps."""
PLACE, WHAT, KEY = 0, 1, 1
"""What stands where in a turn, its place and what it says, and at the head of a commit, its place and the key."""
END, WITHIN, ONE, ROW = -1, 0, 1, 2
"""What a turn says of the step: there is none; it is within a row, stands alone, or is the first of a row."""
_LAST = 1 << 62
"""A place after all others."""

Handles = dict[str, list[tf.Tensor]]
"""Queues and variables for a function to take, by what they are."""


class TokenQueues:
    """The queues and variables of one training.

    Args:
        devices: the ps; the first one is the leader.
        workers: how many workers there are.
        counted: how many numbers come with a gradient.

    Attributes:
        results: where on the chief is told what came of rows of updates: float64, of a shape that is theirs.
    """

    def __init__(self, devices: Sequence[str], workers: int, counted: int) -> None:
        self._turns: list[list[tf.queue.FIFOQueue]] = []
        self._last = []
        for device in devices:
            with tf.device(device):
                self._turns.append([tf.queue.FIFOQueue(-1, [tf.int64], [[2]]) for _ in range(workers)])
                self._last.append(tf.Variable([-1, END], dtype=tf.int64, trainable=False))
        with tf.device(devices[0]):
            self._commits = [tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[2], [counted]]) for _ in range(workers)]
            self._begun = [tf.Variable(-1, dtype=tf.int64, trainable=False) for _ in range(workers)]
        with tf.device(CHIEF_DEVICE):
            self.results = tf.queue.FIFOQueue(-1, [tf.float64])
            self._orders = tf.queue.FIFOQueue(-1, [tf.int64], [[]])

    @property
    def handles(self) -> Handles:
        """What the function that makes updates takes."""
        return {
            **{f"turns{number}": [queue.queue_ref for queue in own] for number, own in enumerate(self._turns)},
            "last": [variable.handle for variable in self._last],
            "commits": [queue.queue_ref for queue in self._commits],
            "results": [self.results.queue_ref],
            "orders": [self._orders.queue_ref],
        }

    def of(self, worker: int) -> Handles:
        """What a worker's function takes: of each ps the worker's turns and the last turn; and what the leader has."""
        return {
            "turns": [own[worker].queue_ref for own in self._turns],
            "last": [variable.handle for variable in self._last],
            "commits": [self._commits[worker].queue_ref],
            "begun": [self._begun[worker].handle],
        }

    def begin(self, place: int) -> None:
        """A run begins at a place: before its workers do, so that none takes an earlier run's last turn for its own.

        Called within the strategy's scope.
        """
        _begin([variable.handle for variable in self._last], tf.constant(place, tf.int64))

    def order(self, what: int) -> None:
        """Orders an update, `ONE`, a `ROW` of them, or the `END`."""
        self._orders.enqueue(tf.constant(what, tf.int64))

    def break_off(self, times: int) -> None:
        """Tells all workers that there is no step.

        Args:
            times: how many turns a worker may await before it looks at what one says.
        """
        end = tf.constant([_LAST, END], tf.int64)
        for last, own in zip(self._last, self._turns, strict=True):
            last.assign(end)
            for queue in own:
                queue.enqueue_many([tf.stack([end] * times)])

    def end_commits(self) -> None:
        """Has the function that makes updates fail that waits for gradients: there are no more."""
        for queue in self._commits:
            queue.close()


@tf.function(autograph=False)
def _begin(lasts: list[tf.Tensor], place: tf.Tensor) -> None:
    """A function, which is done when it returns; a single operation on another task may be done any time later."""
    for last in lasts:
        tf.raw_ops.AssignVariableOp(resource=last, value=tf.stack([place - 1, ONE]))


def next_order(handles: Handles) -> tf.Tensor:
    """The next order, on the chief: int64, shape ()."""
    with tf.device(CHIEF_DEVICE):
        (what,) = tf.raw_ops.QueueDequeueV2(handle=handles["orders"][0], component_types=[tf.int64])
        return tf.ensure_shape(what, [])


def tell(handles: Handles, what: tf.Tensor) -> None:
    """Tells the chief what came of a row."""
    with tf.device(CHIEF_DEVICE):
        tf.raw_ops.QueueEnqueueV2(handle=handles["results"][0], components=[what])


def give(last: tf.Tensor, queues: Sequence[tf.Tensor], turn: tf.Tensor) -> None:
    """Gives all workers a turn on one ps, after those before it; called on it.

    Args:
        last: the ps's last turn, a variable.
        queues: one for each worker.
        turn: its place, and what it says.
    """
    kept = tf.raw_ops.AssignVariableOp(resource=last, value=turn)
    with tf.control_dependencies([kept]):
        for queue in queues:
            tf.raw_ops.QueueEnqueueV2(handle=queue, components=[turn])


def last_turn(last: tf.Tensor) -> tf.Tensor:
    """The last turn that one ps has given: int64, shape (2,)."""
    return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=last, dtype=tf.int64), [2])


def next_turn(queue: tf.Tensor) -> tf.Tensor:
    """A worker's next turn on one ps, whatever its place: int64, shape (2,)."""
    (turn,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
    return tf.ensure_shape(turn, [2])


def turn_of(queue: tf.Tensor, known: tf.Tensor, place: tf.Tensor) -> tf.Tensor:
    """The first of a known turn and the next ones whose place is a certain one, or after it: int64, shape (2,)."""

    def awaits(turn: tf.Tensor) -> tf.Tensor:
        return turn[PLACE] < place

    (turn,) = tf.while_loop(awaits, lambda _: [next_turn(queue)], [known], parallel_iterations=1)
    return turn


def begins_anew(begun: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Notes on the leader that a worker begins a run; whether it has begun it before.

    Args:
        begun: the first place of the last run that the worker has begun, a variable.
        first: the run's first place.
    """
    before = tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=begun, dtype=tf.int64), [])
    with tf.control_dependencies([before]):
        tf.raw_ops.AssignVariableOp(resource=begun, value=tf.identity(first))
    return tf.equal(before, first)


def commit(queue: tf.Tensor, head: tf.Tensor, counted: tf.Tensor) -> None:
    """Commits a gradient, on the leader, after those of the steps before.

    Args:
        queue: the worker's.
        head: the step's place, and what the gradient has been left under: int64, shape (2,).
        counted: what comes with it.
    """
    tf.raw_ops.QueueEnqueueV2(handle=queue, components=[head, counted])


def committed(queues: Sequence[tf.Tensor], place: tf.Tensor, counted: int) -> tuple[tf.Tensor, tf.Tensor]:
    """What all workers have committed for a place, on the leader.

    One condition for all of them: a loop for each would cost as much again as the update's other operations.

    Args:
        queues: one for each worker.
        place: the update's.
        counted: how many numbers come with a gradient.

    Returns:
        What their gradients have been left under, shape (workers,), and what comes with them, (workers, `counted`).
    """

    def received(queue: tf.Tensor) -> list[tf.Tensor]:
        head, body = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64, tf.float64])
        return [tf.ensure_shape(head, [2]), tf.ensure_shape(body, [counted])]

    def stacked(each: Sequence[list[tf.Tensor]]) -> list[tf.Tensor]:
        return [tf.stack(own) for own in zip(*each, strict=True)]

    def some_are_past(heads: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return tf.reduce_any(heads[:, PLACE] < place)

    def pass_over(heads: tf.Tensor, bodies: tf.Tensor) -> list[tf.Tensor]:
        following = []
        for queue, *own in zip(queues, tf.unstack(heads), tf.unstack(bodies), strict=True):
            again = partial(received, queue)
            following.append(tf.while_loop(is_past, lambda *_, again=again: again(), own, parallel_iterations=1))
        return stacked(following)

    def is_past(head: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
        return head[PLACE] < place

    first = stacked([received(queue) for queue in queues])
    heads, bodies = tf.while_loop(some_are_past, pass_over, first, parallel_iterations=1)
    return heads[:, KEY], bodies
