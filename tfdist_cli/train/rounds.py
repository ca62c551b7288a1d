"""The functions of synchronous and bounded updates that workers, ps and chief run together.

A worker's goes on from step to step, another one makes updates, a third gives answers to workers that wait for none.
All of them are under way for as long as the training is: to call a function takes longer than a step of it. A
condition within one, and each turn of a loop, cost some messages to every task in it. So where it is sure that several
steps or updates follow each other, they stand in a row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import count as counter
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.phases import COLUMNS
from tfdist_cli.train.channels import (
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
from tfdist_cli.train.data import next_batch
from tfdist_cli.train.order import unordered
from tfdist_cli.train.phases import Watch, noted
from tfdist_cli.train.step import Tensors, values
from tfdist_cli.train.wire import Arrival
from tfdist_cli.train.workshop import CHIEF_DEVICE, Workshop

GREETS, LEAVES, MADE, OVER = -3, -4, -5, -6
"""What a message says in the place of a step's number: a worker's function begins, or has ended; an update has been
made, which is said where time is taken; nobody listens any more."""
_names = counter()


class Rounds:
    """The functions.

    Args:
        workshop: the model on its cluster.
        aggregate: gradients that make an update.

    Attributes:
        devices: the ps.
        state_size: how many numbers of state come with a gradient.
        sizes: the parts of what is counted: loss and examples, metrics, state, seconds and bytes.
        work: for so many steps in a row a worker's function: its iterator; its number and the function's serial number;
            what `Channels.of` gives.
        updates: for so many updates in a row the function that makes them until it is told to end: `Channels.handles`.
        gives: gives answers that follow no update: `Channels.handles`.
        discard: forgets a gradient: its key, an int64 scalar.
    """

    def __init__(self, workshop: Workshop, aggregate: int) -> None:
        self._shop = workshop
        self._aggregate = aggregate
        self._name = f"tfdist-{next(_names)}"
        self._present: list[bool] = []
        """Which parameters have a gradient; known when a worker's function has been traced, which comes first."""
        own = workshop.own_state(workshop.step.state)
        self._state_sizes = [int(np.prod(variable.shape)) for variable in own]
        self.state_size = sum(self._state_sizes)
        devices = [post.device for post in workshop.wire.posts] + [variable.value.device for variable in own]
        self.devices = list(dict.fromkeys(devices)) or [CHIEF_DEVICE]
        self._watched = len(COLUMNS) if workshop.rules.phases else 0
        self.sizes = [2, workshop.totals.size, self.state_size, self._watched]
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
                _in_rows(goes_on, several, partial(steps, size), partial(steps, 1), start)
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
        shop, step = self._shop, self._shop.step
        there = dict(zip(self.devices, answers, strict=True))
        watch.after("wait", answers)
        with tf.control_dependencies(before):  # else all batches of a function would be there at once
            batch = next_batch(iterator)
        lookup = shop.tables.lookup([batch])
        pulled = shop.wire.pull(lookup, after=there)
        watch.after("data", batch)
        watch.after("pull", pulled.values)
        state = shop.seeds.put(self._state(there), answers[0][STEP], worker)
        result = step.train(pulled.values, state, shop.totals.start(), batch, shop.tables.given(lookup.positions[0]))
        self._present = [gradient is not None for gradient in result.gradients]
        watch.after("compute", result.gradients)
        arrival = shop.wire.push(result.gradients, pulled)
        left: dict[str, list[Any]] = {device: [] for device in self.devices}
        for number, (post, parcel, rows) in enumerate(zip(shop.wire.posts, arrival.parcels, arrival.rows, strict=True)):
            left[post.device].append(self._leave(number, there[post.device], [parcel, *rows]))
        watch.after("push", left)
        watch.crossed(lambda: shop.wire.sizes(lookup))
        own = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in shop.own_state(result.state)]
        counted = tf.stack([tf.cast(result.loss, tf.float64), tf.cast(result.examples, tf.float64)])
        body = tf.concat([counted, shop.totals.pack(result.metrics), *own, *watch.totals()], axis=0)
        first, *others = self.devices
        with tf.device(first), tf.control_dependencies(left[first]):
            head = tf.identity(answers[0])  # to the chief from a ps, which has to say that all is there
        with tf.control_dependencies([operation for device in others for operation in left[device]]):
            _send(inbox, head, body)
        return [result.loss]

    def _state(self, there: dict[str, tf.Tensor]) -> Tensors:
        """The model's state, read where it is when the answer is there."""
        state = []
        for variable in self._shop.step.state:
            answer = there.get(variable.value.device)
            with tf.control_dependencies([] if answer is None else [answer]):
                state += values([variable])
        return state

    def _nothing(self, *phases: tf.Tensor) -> tf.Tensor:
        """A message without content but perhaps the time that something took."""
        if phases:
            return tf.concat([tf.zeros([sum(self.sizes) - self._watched], tf.float64), *phases], axis=0)
        return tf.zeros([sum(self.sizes)], tf.float64)

    def _leave(self, number: int, answer: tf.Tensor, tensors: Tensors) -> Any:
        """Leaves tensors on a ps until they are taken by the key that an answer names."""
        with tf.device(self._shop.wire.posts[number].device):
            staged = tf.raw_ops.MapStage(
                key=answer[KEY],
                indices=tf.range(len(tensors)),
                values=tensors,
                dtypes=[tensor.dtype for tensor in tensors],
                shared_name=f"{self._name}-{number}",
            )
            return unordered(staged)

    def _taken(self, order: dict[str, tf.Tensor], place: int) -> Arrival:
        """What a worker has left on the ps under a key, which an order names there."""
        parcels, rows = [], []
        for number, post in enumerate(self._shop.wire.posts):
            dtypes = [post.dtype, *[tf.int32] * len(post.tables)]
            name = f"{self._name}-{number}"
            with tf.device(post.device):
                key = order[post.device][place]
                taken = tf.raw_ops.MapUnstage(key=key, indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=name)
                parcel, *own = unordered(taken)
                parcels.append(parcel)
                rows.append([tf.reshape(each, [-1]) for each in own])
        return Arrival(parcels, rows)

    def _there(self, order: tf.Tensor) -> dict[str, tf.Tensor]:
        """An order, or a part of it, on each ps."""
        there = {}
        for device in self.devices:
            with tf.device(device):
                there[device] = tf.identity(order)
        return there

    def _noted(self, device: str, what: Any) -> list[tf.Tensor]:
        """The time when something is there on a ps, where time is taken."""
        with tf.device(device):
            return [noted(what)] if self._watched else []

    def _update(self, order: dict[str, tf.Tensor], state: tf.Tensor) -> list[tf.Operation]:
        """Applies the mean of the gradients that were left under an order's keys; returns what changes variables."""
        shop = self._shop
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        arrivals = [self._taken(order, 1 + number) for number in range(self._aggregate)]
        shop.apply(shop.wire.gradients(arrivals), self._present)
        shop.assign_state(tf.split(state, self._state_sizes) if self._state_sizes else [])
        made = graph.get_operations()[before:]
        return [each for each in made if any(part.dtype == tf.resource for part in each.inputs)]

    def _update_function(self, size: int) -> Any:
        aggregate = self._aggregate

        def follow(handles: Handles, order: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            """Makes an update, gives the answers that follow it, and waits for the next order."""
            there = self._there(order)
            watch = Watch(self._shop.rules.phases)
            begun = {device: self._noted(device, own) for device, own in there.items()}
            done, spans = self._update(there, state), []
            for place, device in enumerate(self.devices):
                # What is nowhere in particular may be anywhere.
                own = [each for each in done if each.device == device or each.device not in self.devices]
                spans += [now - then for now, then in zip(self._noted(device, own), begun[device], strict=True)]
                with tf.device(device), tf.control_dependencies(own):
                    count_update(handles["made"][place])
                    give(handles[f"answers{place}"], there[device][1 + aggregate :])
            if self._watched:
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
                _in_rows(goes_on, several, partial(row, size, handles), partial(row, 1, handles), start)
            else:
                tf.while_loop(goes_on, partial(row, 1, handles), start, parallel_iterations=1)

        return updates

    def _give_function(self) -> Callable[..., Any]:
        def answer(handles: Handles, order: tf.Tensor) -> list[tf.Tensor]:
            for place, (device, own) in enumerate(self._there(order).items()):
                with tf.device(device):
                    before = updates_made(handles["made"][place], own[0] - 1)
                    with tf.control_dependencies([before]):
                        give(handles[f"answers{place}"], own[1:])
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
            arrival = self._taken(self._there(key[None]), 0)
            return tf.size(arrival.parcels[0]) if arrival.parcels else tf.constant(0)

        return discard


def _send(inbox: tf.Tensor, head: tf.Tensor, body: tf.Tensor) -> None:
    with tf.device(CHIEF_DEVICE):
        tf.raw_ops.QueueEnqueueV2(handle=inbox, components=[head, body])


def _in_rows(
    goes_on: Callable[..., tf.Tensor],
    several: Callable[..., tf.Tensor],
    row: Callable[..., list[Any]],
    single: Callable[..., list[Any]],
    start: list[Any],
) -> None:
    """Goes on in rows as long as it is sure that several follow each other, and else one by one.

    Two loops within one: a condition that chose between the two would cost three times the messages of a loop's turn.
    """

    def alone(*carried: Any) -> tf.Tensor:
        return tf.logical_and(goes_on(*carried), tf.logical_not(several(*carried)))

    def both(*carried: Any) -> Any:
        carried = tf.while_loop(several, row, carried, parallel_iterations=1)
        return tf.while_loop(alone, single, carried, parallel_iterations=1)

    tf.while_loop(goes_on, both, start, parallel_iterations=1)
