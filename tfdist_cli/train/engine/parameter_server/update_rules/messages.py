"""How the chief, workers and ps speak while synchronous training goes on: messages, orders for updates, and answers.

A worker waits for the chief's answer before each of its steps. An answer names the step and the key to leave its
gradient under. It waits on each ps, in a queue of its own for each worker, so that what the worker wants of a ps is
read there as soon as that ps has the answer: there is no way from the ps to the chief, to the worker and back in
between.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE
from tfdist_cli.train.tf_compat.control_flow import unordered

NO_MORE = -1
"""In the place of a step: there are no more."""
_NOT_NOW = -2
"""In the place of a step: this worker is not answered now."""
STEP, KEY, SEVERAL, WORKER = range(4)
"""What stands where in an answer: the step's number, the key, whether others follow for sure, the worker's number."""
_SIZE = 4
_KEPT = 1000
"""So many updates are counted on the ps before the count is taken."""
_keys = count()

Answer = tuple[int, int, bool]
"""A worker, its step, whether others follow for sure."""
Handles = dict[str, list[tf.Tensor]]
"""Queues for a function to take: some are on the chief, others on each ps."""


class MessageChannels:
    """The queues of one training.

    Args:
        devices: the ps.
        workers: how many workers there are.
        aggregate: gradients that make an update.
        state: how many numbers of state come with an update.
        counted: how many numbers come with a message.

    Attributes:
        inbox: where on the chief messages arrive: an answer, with a word in the place of a step if it is none, and what
            was counted.
    """

    def __init__(self, devices: Sequence[str], workers: int, aggregate: int, state: int, counted: int) -> None:
        self._workers = workers
        self._answers, self._made = [], []
        for device in devices:
            with tf.device(device):
                self._answers.append([tf.queue.FIFOQueue(-1, [tf.int64], [[_SIZE]]) for _ in range(workers)])
                self._made.append(tf.queue.FIFOQueue(-1, [tf.bool], [[]]))  # one element for each update
        with tf.device(CHIEF_DEVICE):
            self.inbox = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[_SIZE], [counted]])
            size = 1 + aggregate + workers * _SIZE
            self._orders = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[size], [state]])
            self._later = tf.queue.FIFOQueue(-1, [tf.int64], [[1 + workers * _SIZE]])
        self._ordered = self._counted = 0
        self._last = [tf.zeros([size], tf.int64), tf.zeros([state], tf.float64)]

    @property
    def handles(self) -> Handles:
        """What the functions that make updates and give answers take."""
        own = {f"answers{place}": [queue.queue_ref for queue in each] for place, each in enumerate(self._answers)}
        chiefs = {"inbox": self.inbox, "orders": self._orders, "later": self._later}
        own |= {name: [queue.queue_ref] for name, queue in chiefs.items()}
        return own | {"made": [queue.queue_ref for queue in self._made]}

    def of(self, worker: int) -> Handles:
        """What a worker's function takes: its queues of answers, one of each ps, and the inbox."""
        return {"answers": [own[worker].queue_ref for own in self._answers], "inbox": [self.inbox.queue_ref]}

    def order(self, keys: Sequence[int], state: np.ndarray, answers: Iterable[Answer], *, several: bool) -> None:
        """Orders an update, and the answers that follow it.

        Args:
            keys: what its gradients have been left under.
            state: what it sets the model's state to, flat.
            answers: what the ps answer when they have done it.
            several: whether it is the first of several that follow each other for sure.
        """
        self._ordered += 1
        numbers = np.concatenate([[1 + several], keys, self._rows(answers)])
        self._orders.enqueue([tf.constant(numbers, tf.int64), tf.constant(state, tf.float64)])
        if self._ordered - self._counted >= _KEPT:
            self.answer([])

    def answer(self, answers: Iterable[Answer]) -> None:
        """Has answers given as soon as all updates have been made that were ordered before."""
        self._give(self._ordered - self._counted, answers)
        self._counted = self._ordered

    def close(self) -> None:
        """Orders the functions that take orders to end when they have done what was ordered."""
        self._later.enqueue([tf.zeros([1 + self._workers * _SIZE], tf.int64)])
        self._orders.enqueue(self._last)

    def break_off(self, times: int) -> None:
        """Tells all workers to leave, as soon as what was ordered has been done, and who gives answers to end.

        Args:
            times: how often a worker may ask before it hears it.
        """
        for _ in range(times):
            self.answer((worker, NO_MORE, False) for worker in range(self._workers))
        self._later.enqueue([tf.zeros([1 + self._workers * _SIZE], tf.int64)])

    def end_orders(self) -> None:
        """Has the function that takes orders fail that waits for one: there are no more."""
        self._orders.close()

    def end_waiting(self) -> None:
        """Has the function that gives answers fail that waits for updates: no more are made."""
        for queue in self._made:
            queue.close()

    def _give(self, updates: int, answers: Iterable[Answer]) -> None:
        numbers = np.concatenate([[1 + updates], self._rows(answers)])
        self._later.enqueue([tf.constant(numbers, tf.int64)])

    def _rows(self, answers: Iterable[Answer]) -> np.ndarray:
        rows = np.full([self._workers, _SIZE], _NOT_NOW, np.int64)
        for worker, step, several in answers:
            rows[worker] = step, next(_keys), several, worker
        return rows.reshape(-1)


def receive(devices: Sequence[str], queues: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """A worker's next answer, on each ps: int64, shape (4,).

    Args:
        devices: the ps.
        queues: its answers in `MessageChannels.of`.
    """
    received = []
    for device, queue in zip(devices, queues, strict=True):
        with tf.device(device):
            (answer,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
            received.append(tf.ensure_shape(answer, [_SIZE]))
    return received


def next_order(handles: Handles, aggregate: int) -> list[tf.Tensor]:
    """The next order, on the chief: 0 for the end, 1, or 2 for several, the keys, the answers; and the state."""
    with tf.device(CHIEF_DEVICE):
        types = [tf.int64, tf.float64]
        order, state = tf.raw_ops.QueueDequeueV2(handle=handles["orders"][0], component_types=types)
        return [tf.ensure_shape(order, [1 + aggregate + len(handles["answers0"]) * _SIZE]), state]


def next_answers(handles: Handles) -> list[tf.Tensor]:
    """The next answers that follow no order, on the chief: 0 for the end, or 1 and how many updates to wait for."""
    with tf.device(CHIEF_DEVICE):
        (order,) = tf.raw_ops.QueueDequeueV2(handle=handles["later"][0], component_types=[tf.int64])
        return [tf.ensure_shape(order, [1 + len(handles["answers0"]) * _SIZE])]


def give(queues: Sequence[tf.Tensor], answers: tf.Tensor) -> None:
    """Puts answers into one ps's queues.

    Args:
        queues: one for each worker.
        answers: their answers, flat.
    """
    rows = tf.reshape(answers, [len(queues), _SIZE])
    for worker, queue in enumerate(queues):
        some = tf.cast(rows[worker, STEP] != _NOT_NOW, tf.int32)
        answer = rows[worker : worker + some]  # one, or none, which puts nothing
        unordered(tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[answer]))


def count_update(made: tf.Tensor, after: Sequence[tf.Operation]) -> None:
    """Counts an update that one ps has made its part of, when these operations are done."""
    one = tf.constant(True)
    with tf.control_dependencies(after):
        unordered(tf.raw_ops.QueueEnqueueV2(handle=made, components=[one]))


def updates_made(made: tf.Tensor, number: tf.Tensor) -> tf.Operation:
    """Waits until one ps has made its part of so many more updates than were waited for before."""
    wanted = tf.cast(number, tf.int32)
    return tf.raw_ops.QueueDequeueManyV2(handle=made, n=wanted, component_types=[tf.bool])[0].op
