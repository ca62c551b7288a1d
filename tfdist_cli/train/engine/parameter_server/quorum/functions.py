"""The functions of updates with a quorum, which workers, ps and chief run together.

One goes on from step to step on each worker, another applies updates, and a third sends assignments to workers that
wait for no update. All of them run for as long as the training: to call a function takes longer than a step of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.data.pipeline import next_batch
from tfdist_cli.train.engine.parameter_server.batches import BatchReader, ReadBatches
from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, ParameterServerContext
from tfdist_cli.train.engine.parameter_server.gradient_store import GradientStore, StepNumbers
from tfdist_cli.train.engine.parameter_server.messages import (
    AssignmentOrder,
    PackedAssignment,
    ReportKind,
    UpdateOrder,
    pack_report,
)
from tfdist_cli.train.engine.parameter_server.quorum.queues import (
    Handles,
    count_update,
    next_assignment,
    next_assignments,
    next_update,
    send_assignments,
    wait_for_updates,
)
from tfdist_cli.train.engine.step_timer import StepTimer
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, in_rows


class QuorumFunctions:
    """The functions.

    Args:
        context: the model on its cluster.
        before: the functions of another number of workers: those that run on workers stay the same if they can.

    Attributes:
        store: the stored gradients.
        all_take_part: whether each update takes a gradient of every worker.
        devices: the ps.
        layout: how step reports are packed.
        work: for a number of steps in a row a worker's function. Its arguments: the iterator; the worker's number, the
            function's serial number, and `ParameterServerContext.counts`; `QuorumQueues.of`.
        updates: for a number of updates in a row the function that applies them until the end is ordered:
            `QuorumQueues.handles`.
        assignments: the function that sends assignments that follow no new update: `QuorumQueues.handles`.
        discard: the function that drops a stored gradient: its key, an int64 scalar.
    """

    def __init__(self, context: ParameterServerContext, before: QuorumFunctions | None = None) -> None:
        self._aggregate = context.batches_per_update
        self.all_take_part = self._aggregate == context.worker_count
        self.store: GradientStore = before.store.resized(context) if before else GradientStore(context)
        self.devices, self.layout = self.store.devices, self.store.layout
        same = before is not None and before.all_take_part == self.all_take_part
        self.work: Callable[[int], Any] = before.work if before and same else cache(self._worker_function)
        self.updates = cache(self._update_function)
        self.assignments = self._assignment_function()
        self.discard = self._discard_function()

    def _worker_function(self, size: int) -> Any:
        """Steps of one worker, until it is told that there are no more.

        If steps are not promised, some are unrolled nevertheless, each with a condition: another turn of a loop costs
        more.
        """

        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            (worker, serial), counts = tf.unstack(numbers[:2]), numbers[2:]
            queues, [reports] = handles["assignments"], handles["reports"]

            def steps(count: int, assigned: list[tf.Tensor], *start: tf.Tensor) -> list[Any]:
                before: Tensors = []
                reader = BatchReader(self.store.context, [1] * count)
                for _ in range(count):
                    timer = StepTimer(self.store.measures_phases, *start)
                    read = reader.next_round(partial(next_batch, iterator), before)
                    before = self._step(read, worker, counts, reports, assigned, timer)
                    start = tuple(timer.last_time)
                    assigned = next_assignment(self.devices, queues)
                return [assigned, *start]

            def some(assigned: list[tf.Tensor], *start: tf.Tensor) -> list[Any]:
                carried = steps(1, assigned, *start)
                for _ in range(size - 1):
                    same = partial(tf.nest.map_structure, tf.identity, carried)
                    carried = tf.cond(goes_on(*carried), partial(steps, 1, *carried), same)
                return carried

            def goes_on(assigned: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return PackedAssignment(assigned[0]).goes_on

            def several(assigned: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return PackedAssignment(assigned[0]).several

            times = StepTimer(self.store.measures_phases).last_time
            _send(reports, pack_report(ReportKind.FUNCTION_STARTED, serial, worker), self.layout.without_counts([]))
            start = [next_assignment(self.devices, queues), *times]
            if self._promises(size):
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, some, start, parallel_iterations=1)
            _send(reports, pack_report(ReportKind.FUNCTION_ENDED, serial, worker), self.layout.without_counts([]))
            return worker

        return work

    def _step(
        self,
        read: ReadBatches,
        worker: tf.Tensor,
        counts: tf.Tensor,
        reports: tf.Tensor,
        assigned: list[tf.Tensor],
        timer: StepTimer,
    ) -> Tensors:
        """Takes a step with a batch; returns what the next one is read after."""
        store = self.store
        ready = dict(zip(store.devices, assigned, strict=True))
        keys = store.on_each_ps(lambda packed: PackedAssignment(packed).key, ready)
        numbers = StepNumbers(worker, PackedAssignment(assigned[0]).step, counts)
        stored = store.store(read, numbers, ready, keys, timer)
        first, *others = store.devices
        with tf.device(first), tf.control_dependencies(stored.operations[first]):
            head = tf.identity(assigned[0])  # sent by a ps, which has to confirm that the gradient is stored
        with tf.control_dependencies([operation for device in others for operation in stored.operations[device]]):
            _send(reports, head, stored.report)
        return [stored.loss]

    def _update_function(self, size: int) -> Any:
        aggregate = self._aggregate

        def update(handles: Handles, packed: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            """Applies an update, sends the assignments that follow it, and waits for the next order."""
            store = self.store
            orders = store.copied(packed)
            timer = StepTimer(store.measures_phases)
            begun = {device: store.time_of(device, own) for device, own in orders.items()}
            keys = store.on_each_ps(lambda own: UpdateOrder(own, aggregate).keys, orders)
            done, spans = store.apply(keys, state), []
            for number, device in enumerate(self.devices):
                part = store.on_device(device, done)
                spans += [now - then for now, then in zip(store.time_of(device, part), begun[device], strict=True)]
                with tf.device(device):
                    count_update(handles["applied"][number], after=part)
                    assignments = UpdateOrder(orders[device], aggregate).assignments
                    send_assignments(handles[f"assignments{number}"], after(assignments, part))
            if store.measures_phases:
                timer.add_longest("update", spans)
                with tf.control_dependencies(done):
                    phases = self.layout.without_counts(timer.totals())
                    _send(handles["reports"][0], pack_report(ReportKind.UPDATE_APPLIED), phases)
            return next_update(handles, aggregate)

        def chunk(count: int, handles: Handles, packed: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            carried = [packed, state]
            for _ in range(count):
                carried = update(handles, *carried)
            return carried

        def goes_on(packed: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return UpdateOrder(packed, aggregate).goes_on

        def several(packed: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return UpdateOrder(packed, aggregate).several

        @tf.function(autograph=False)
        def updates(handles: Handles) -> None:
            start = next_update(handles, aggregate)
            if self._promises(size):
                in_rows(goes_on, several, partial(chunk, size, handles), partial(chunk, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(chunk, 1, handles), start, parallel_iterations=1)

        return updates

    def _assignment_function(self) -> Callable[..., Any]:
        def send(handles: Handles, packed: tf.Tensor) -> list[tf.Tensor]:
            for number, (device, own) in enumerate(self.store.copied(packed).items()):
                with tf.device(device):
                    order = AssignmentOrder(own)
                    applied = wait_for_updates(handles["applied"][number], order.updates)
                    send_assignments(handles[f"assignments{number}"], after(order.assignments, [applied]))
            return next_assignments(handles)

        def goes_on(packed: tf.Tensor) -> tf.Tensor:
            return AssignmentOrder(packed).goes_on

        @tf.function(autograph=False)
        def assignments(handles: Handles) -> None:
            tf.while_loop(goes_on, partial(send, handles), next_assignments(handles), parallel_iterations=1)

        return assignments

    def _promises(self, size: int) -> bool:
        """Whether several steps, and updates, may be promised to follow each other for sure."""
        return self.all_take_part and size > 1

    def _discard_function(self) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def discard(key: tf.Tensor) -> tf.Tensor:
            pushed = self.store.take(self.store.copied(key))
            return tf.size(pushed.packed[0]) if pushed.packed else tf.constant(0)

        return discard


def _send(reports: tf.Tensor, head: tf.Tensor, body: tf.Tensor) -> None:
    with tf.device(CHIEF_DEVICE):
        tf.raw_ops.QueueEnqueueV2(handle=reports, components=[head, body])
