"""The functions of updates that the chief decides on, which workers, ps and chief run together.

A worker's goes on from step to step, another one makes updates, a third gives answers to workers that wait for none.
All of them are under way for as long as the training is: to call a function takes longer than a step of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, ParameterServerContext
from tfdist_cli.train.engine.parameter_server.update_rules.gradient_store import GradientStore
from tfdist_cli.train.engine.parameter_server.update_rules.messages import (
    KEY,
    SEVERAL,
    STEP,
    Handles,
    count_update,
    give,
    next_answers,
    next_order,
    receive,
    updates_made,
)
from tfdist_cli.train.engine.step_timer import Watch
from tfdist_cli.train.model.train_step import Tensors
from tfdist_cli.train.tf_compat.control_flow import after, in_rows

GREETS, LEAVES, MADE, OVER = -3, -4, -5, -6
"""What a message says in the place of a step's number: a worker's function begins, or has ended; an update has been
made, which is said where time is taken; nobody listens any more."""


class QuorumFunctions:
    """The functions.

    Args:
        workshop: the model on its cluster.
        aggregate: gradients that make an update.

    Attributes:
        devices: the ps.
        state_size: how many numbers of state come with a gradient.
        sizes: the parts of what is counted: loss and examples, metrics, state, seconds and bytes.
        work: for so many steps in a row a worker's function: its iterator; its number and the function's serial number;
            what `MessageChannels.of` gives.
        updates: for a number of updates in a row the function that makes them until the end is ordered.
        gives: gives answers that follow no update: `MessageChannels.handles`.
        discard: forgets a gradient: its key, an int64 scalar.
    """

    def __init__(self, workshop: ParameterServerContext, aggregate: int) -> None:
        self._shop = workshop
        self._aggregate = aggregate
        self._staged = GradientStore(workshop)
        self.devices, self.sizes, self.state_size = self._staged.devices, self._staged.sizes, self._staged.state_size
        self.work = cache(self._worker_function)
        self.updates = cache(self._update_function)
        self.gives = self._give_function()
        self.discard = self._discard_function()

    def over(self) -> list[tf.Tensor]:
        """A message that nobody has to listen any more."""
        return [tf.constant([OVER, 0, 0, 0], tf.int64), self._nothing()]

    def _worker_function(self, size: int) -> Any:
        """One worker's steps, until it is told that there are no more.

        Where nothing is promised, some stand in a row, too, each bound to a condition: a loop's turn costs more.
        """

        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, handles: Handles) -> tf.Tensor:
            worker, serial = tf.unstack(numbers)
            queues, [inbox] = handles["answers"], handles["inbox"]

            def steps(count: int, answers: list[tf.Tensor], *note: tf.Tensor) -> list[Any]:
                before: Tensors = []
                for _ in range(count):
                    watch = Watch(self._shop.rules.phases, *note)
                    before = self._step(iterator, worker, inbox, answers, before, watch)
                    note = tuple(watch.note)
                    answers = receive(self.devices, queues)
                return [answers, *note]

            def some(answers: list[tf.Tensor], *note: tf.Tensor) -> list[Any]:
                carried = steps(1, answers, *note)
                for _ in range(size - 1):
                    same = partial(tf.nest.map_structure, tf.identity, carried)
                    carried = tf.cond(carried[0][0][STEP] >= 0, partial(steps, 1, *carried), same)
                return carried

            def goes_on(answers: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return answers[0][STEP] >= 0

            def several(answers: list[tf.Tensor], *_: tf.Tensor) -> tf.Tensor:
                return answers[0][SEVERAL] > 0

            note = Watch(self._shop.rules.phases).note
            _send(inbox, tf.stack([GREETS, serial, 0, worker]), self._nothing())
            start = [receive(self.devices, queues), *note]
            if self._promises(size):
                in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
            else:
                tf.while_loop(goes_on, some, start, parallel_iterations=1)
            _send(inbox, tf.stack([LEAVES, serial, 0, worker]), self._nothing())
            return worker

        return work

    def _step(
        self,
        iterator: Any,
        worker: tf.Tensor,
        inbox: tf.Tensor,
        answers: list[tf.Tensor],
        before: Tensors,
        watch: Watch,
    ) -> Tensors:
        """A step. Its batch is read after `before`; returns what the next one's is."""
        staged = self._staged
        there = dict(zip(staged.devices, answers, strict=True))
        keys = staged.on_each(lambda answer: answer[KEY], there)
        left = staged.leave(iterator, worker, answers[0][STEP], there, keys, before, watch)
        first, *others = staged.devices
        with tf.device(first), tf.control_dependencies(left.operations[first]):
            head = tf.identity(answers[0])  # to the chief from a ps, which has to say that all is there
        with tf.control_dependencies([operation for device in others for operation in left.operations[device]]):
            _send(inbox, head, left.counted)
        return [left.loss]

    def _nothing(self, *phases: tf.Tensor) -> tf.Tensor:
        """A message without content but perhaps the time that something took."""
        if phases:
            return tf.concat([tf.zeros([sum(self.sizes[:-1])], tf.float64), *phases], axis=0)
        return tf.zeros([sum(self.sizes)], tf.float64)

    def _update_function(self, size: int) -> Any:
        aggregate = self._aggregate

        def follow(handles: Handles, order: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            """Makes an update, gives the answers that follow it, and waits for the next order."""
            staged = self._staged
            there = staged.there(order)
            watch = Watch(staged.watched)
            begun = {device: staged.noted(device, own) for device, own in there.items()}
            done, spans = staged.update(staged.on_each(lambda own: own[1 : 1 + aggregate], there), state), []
            for place, device in enumerate(self.devices):
                part = staged.part(device, done)
                spans += [now - then for now, then in zip(staged.noted(device, part), begun[device], strict=True)]
                with tf.device(device):
                    count_update(handles["made"][place], after=part)
                    give(handles[f"answers{place}"], after(there[device][1 + aggregate :], part))
            if staged.watched:
                watch.longest("update", spans)
                with tf.control_dependencies(done):
                    said = tf.constant([MADE, 0, 0, 0], tf.int64)
                    _send(handles["inbox"][0], said, self._nothing(*watch.totals()))
            return next_order(handles, aggregate)

        def row(count: int, handles: Handles, order: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            carried = [order, state]
            for _ in range(count):
                carried = follow(handles, *carried)
            return carried

        def goes_on(order: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return order[0] > 0

        def several(order: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
            return order[0] > 1

        @tf.function(autograph=False)
        def updates(handles: Handles) -> None:
            start = next_order(handles, aggregate)
            if self._promises(size):
                in_rows(goes_on, several, partial(row, size, handles), partial(row, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(row, 1, handles), start, parallel_iterations=1)

        return updates

    def _give_function(self) -> Callable[..., Any]:
        def answer(handles: Handles, order: tf.Tensor) -> list[tf.Tensor]:
            for place, (device, own) in enumerate(self._staged.there(order).items()):
                with tf.device(device):
                    before = updates_made(handles["made"][place], own[0] - 1)
                    give(handles[f"answers{place}"], after(own[1:], [before]))
            return next_answers(handles)

        @tf.function(autograph=False)
        def gives(handles: Handles) -> None:
            start = next_answers(handles)
            tf.while_loop(lambda order: order[0] > 0, partial(answer, handles), start, parallel_iterations=1)

        return gives

    def _promises(self, size: int) -> bool:
        """Whether workers, and who makes updates, may be promised several in a row."""
        return self._aggregate == len(self._shop.workers) and size > 1

    def _discard_function(self) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def discard(key: tf.Tensor) -> tf.Tensor:
            arrival = self._staged.take(self._staged.there(key))
            return tf.size(arrival.parcels[0]) if arrival.parcels else tf.constant(0)

        return discard


def _send(inbox: tf.Tensor, head: tf.Tensor, body: tf.Tensor) -> None:
    with tf.device(CHIEF_DEVICE):
        tf.raw_ops.QueueEnqueueV2(handle=inbox, components=[head, body])
