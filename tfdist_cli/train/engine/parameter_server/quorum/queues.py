"""The queues of a training with a quorum: reports to the chief, orders for updates, and assignments for workers.

A worker waits for an assignment before each of its steps. It has a queue of its own on each ps: the ps reads what the
worker needs as soon as the assignment has arrived there, without a round trip to the chief and the worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE
from tfdist_cli.train.engine.parameter_server.messages import (
    AssignmentOrder,
    PackedAssignment,
    UpdateOrder,
    has_assignment,
    pack_assignments,
)
from tfdist_cli.train.engine.parameter_server.quorum.policy import NO_MORE_STEPS, Assignment
from tfdist_cli.train.tf_compat.control_flow import unordered

_MAX_UNCOUNTED = 1000
"""After this many updates the count on the ps is reset."""
_keys = count()

Handles = dict[str, list[tf.Tensor]]
"""Queues as arguments of a function, by name: some are on the chief, others on each ps."""


class QuorumQueues:
    """The queues of one training.

    Args:
        devices: the ps.
        workers: how many workers there are.
        aggregate: gradients that make an update.
        state: how many numbers of state come with an update.
        report: how many numbers a step report is.

    Attributes:
        reports: on the chief, the messages of workers and of the function that applies updates, see `unpack_report`.
    """

    def __init__(self, devices: Sequence[str], workers: int, aggregate: int, state: int, report: int) -> None:
        self._workers, self._aggregate = workers, aggregate
        self._assignments, self._applied = [], []
        for device in devices:
            with tf.device(device):
                own = [tf.queue.FIFOQueue(-1, [tf.int64], [[PackedAssignment.SIZE]]) for _ in range(workers)]
                self._assignments.append(own)
                self._applied.append(tf.queue.FIFOQueue(-1, [tf.bool], [[]]))  # one element for each update
        with tf.device(CHIEF_DEVICE):
            self.reports = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[PackedAssignment.SIZE], [report]])
            size = UpdateOrder.size(aggregate, workers)
            self._updates = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[size], [state]])
            self._later = tf.queue.FIFOQueue(-1, [tf.int64], [[AssignmentOrder.size(workers)]])
        self._ordered = self._counted = 0
        self._last_update = [tf.zeros([size], tf.int64), tf.zeros([state], tf.float64)]
        self._last_assignments = [tf.zeros([AssignmentOrder.size(workers)], tf.int64)]

    @property
    def handles(self) -> Handles:
        """The arguments of the functions that apply updates and send assignments."""
        own = {f"assignments{n}": [queue.queue_ref for queue in each] for n, each in enumerate(self._assignments)}
        on_chief = {"reports": self.reports, "updates": self._updates, "later": self._later}
        own |= {name: [queue.queue_ref] for name, queue in on_chief.items()}
        return own | {"applied": [queue.queue_ref for queue in self._applied]}

    def of(self, worker: int) -> Handles:
        """The arguments of a worker's function: its queues of assignments, one on each ps, and the reports."""
        return {
            "assignments": [own[worker].queue_ref for own in self._assignments],
            "reports": [self.reports.queue_ref],
        }

    def order_update(
        self, keys: Sequence[int], state: np.ndarray, assignments: Iterable[Assignment], *, several: bool
    ) -> None:
        """Orders an update, and the assignments that follow it.

        Args:
            keys: the keys of its gradients.
            state: the model's new state, flat.
            assignments: sent by each ps when it has made its part of the update.
            several: whether it is the first of several that follow each other for sure.
        """
        self._ordered += 1
        order = UpdateOrder.pack(keys, pack_assignments(assignments, _keys, self._workers), several=several)
        self._updates.enqueue([tf.constant(order, tf.int64), tf.constant(state, tf.float64)])
        if self._ordered - self._counted >= _MAX_UNCOUNTED:
            self.assign([])

    def assign(self, assignments: Iterable[Assignment]) -> None:
        """Has assignments sent as soon as all updates that were ordered before are applied."""
        updates = self._ordered - self._counted
        order = AssignmentOrder.pack(updates, pack_assignments(assignments, _keys, self._workers))
        self._later.enqueue([tf.constant(order, tf.int64)])
        self._counted = self._ordered

    def end(self) -> None:
        """Ends the functions that take orders, after all orders."""
        self._later.enqueue(self._last_assignments)
        self._updates.enqueue(self._last_update)

    def dismiss(self, times: int) -> None:
        """Tells all workers to exit, those too that are lost and start their functions again. No run uses it again.

        Args:
            times: how many assignments a worker may take before it looks at one.
        """
        for _ in range(times):
            self.assign(Assignment(worker, NO_MORE_STEPS, several=False) for worker in range(self._workers))

    def abort(self, times: int) -> None:
        """Tells all workers to exit, and ends the function that sends assignments, after all ordered updates.

        Args:
            times: how many assignments a worker may take before it looks at one.
        """
        self.dismiss(times)
        self._later.enqueue(self._last_assignments)

    def close_updates(self) -> None:
        """Fails the function that waits for an order: there are no more."""
        self._updates.close()

    def close_applied(self) -> None:
        """Fails the function that waits for updates before it sends assignments: no more are applied."""
        for queue in self._applied:
            queue.close()


def next_assignment(devices: Sequence[str], queues: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Waits for a worker's next assignment on each ps: int64, shape (4,), see `PackedAssignment`.

    Args:
        devices: the ps.
        queues: its queues of assignments.
    """
    received = []
    for device, queue in zip(devices, queues, strict=True):
        with tf.device(device):
            (assignment,) = tf.raw_ops.QueueDequeueV2(handle=queue, component_types=[tf.int64])
            received.append(tf.ensure_shape(assignment, [PackedAssignment.SIZE]))
    return received


def next_update(handles: Handles, aggregate: int) -> list[tf.Tensor]:
    """Waits on the chief for the next ordered update: see `UpdateOrder`; and the state, float64, flat."""
    with tf.device(CHIEF_DEVICE):
        types = [tf.int64, tf.float64]
        order, state = tf.raw_ops.QueueDequeueV2(handle=handles["updates"][0], component_types=types)
        return [tf.ensure_shape(order, [UpdateOrder.size(aggregate, len(handles["assignments0"]))]), state]


def next_assignments(handles: Handles) -> list[tf.Tensor]:
    """Waits on the chief for the next assignments that follow no new update: see `AssignmentOrder`."""
    with tf.device(CHIEF_DEVICE):
        (order,) = tf.raw_ops.QueueDequeueV2(handle=handles["later"][0], component_types=[tf.int64])
        return [tf.ensure_shape(order, [AssignmentOrder.size(len(handles["assignments0"]))])]


def send_assignments(queues: Sequence[tf.Tensor], assignments: tf.Tensor) -> None:
    """Puts assignments into one ps's queues.

    Args:
        queues: one for each worker.
        assignments: a block of them, see `pack_assignments`.
    """
    rows = tf.reshape(assignments, [len(queues), PackedAssignment.SIZE])
    for worker, queue in enumerate(queues):
        some = tf.cast(has_assignment(rows, worker), tf.int32)
        assignment = rows[worker : worker + some]  # one, or none, which puts nothing
        unordered(tf.raw_ops.QueueEnqueueManyV2(handle=queue, components=[assignment]))


def count_update(applied: tf.Tensor, after: Sequence[tf.Operation]) -> None:
    """Counts an update that one ps has made its part of, when some operations are done."""
    one = tf.constant(True)
    with tf.control_dependencies(after):
        unordered(tf.raw_ops.QueueEnqueueV2(handle=applied, components=[one]))


def wait_for_updates(applied: tf.Tensor, number: tf.Tensor) -> tf.Operation:
    """Waits until one ps has made its part of this many more updates than were waited for before."""
    wanted = tf.cast(number, tf.int32)
    return tf.raw_ops.QueueDequeueManyV2(handle=applied, n=wanted, component_types=[tf.bool])[0].op
