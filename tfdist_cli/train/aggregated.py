"""Synchronous and bounded updates: gradients of several workers make one update.

Each worker runs one function for as long as the training goes on. For each step it waits for the chief's answer, the
step's number, which comes as soon as the rule lets the worker go on. It computes a gradient, leaves it on the ps under
a key, and hands the key in with what it counted. When enough gradients for the next update are there, the chief orders
it: another function, which is under way all the time, too, has the ps apply the mean of what was left under these keys,
and then answers the workers that wait for this update. What a worker leaves is applied whole or not at all, on all ps:
of a worker that dies in between nothing is applied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count as counter
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.phases import COLUMNS
from tfdist_cli.train.aggregation import Aggregation, Gradient
from tfdist_cli.train.crew import Crew
from tfdist_cli.train.data import next_batch
from tfdist_cli.train.engine import Execution, Pause
from tfdist_cli.train.phases import Turns, Watch
from tfdist_cli.train.step import Tensors, values
from tfdist_cli.train.tally import Message, Tally
from tfdist_cli.train.wire import Arrival
from tfdist_cli.train.workshop import CHIEF_DEVICE, Workshop

_LOOK_SECONDS = 0.5
"""How often workers are looked at that say nothing."""
_GREETS, _LEAVES, _MADE, _OVER = -1, -2, -3, -4
"""What a message says in the place of a step's number: a worker's function begins, or has ended; an update has been
made; nobody listens any more."""
_NO_MORE, _NO_ANSWER = -1, -2
"""In the place of a step's number in an answer: there are no more steps; this worker is not answered now."""
_names = counter()
_News = queue.SimpleQueue[Message | Exception]


class AggregatedUpdates:
    """Gives out steps and makes updates as `Aggregation` says.

    Args:
        workshop: the model on its cluster.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._shop = workshop
        self._name = f"tfdist-{next(_names)}"
        self._aggregate = workshop.rules.batches(len(workshop.workers))
        self._present: list[bool] = []
        """Which parameters have a gradient; known when a worker's function has been traced, which comes first."""
        self._turns = Turns()
        self._keys = counter()
        self._accepted: dict[int, Message] = {}
        """What was handed in for updates that are still to be made, by key."""
        self._state_sizes = [int(np.prod(variable.shape)) for variable in workshop.own_state(workshop.step.state)]
        self._watched = len(COLUMNS) if workshop.rules.phases else 0
        with tf.device(CHIEF_DEVICE):
            size = 2 + workshop.totals.size + sum(self._state_sizes) + self._watched
            self._inbox = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[3], [size]])
            self._outboxes = [tf.queue.FIFOQueue(-1, [tf.int64], [[2]]) for _ in workshop.workers]
            size = 1 + self._aggregate + 2 * len(workshop.workers)
            self._orders = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[size], [sum(self._state_sizes)]])
        self._worker_functions: dict[int, Any] = {}
        self._updates = self._update_function()
        self._discard = self._discard_function()

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `Engine.run`; a pause comes as soon as what workers have been given is done."""
        del adapts  # workers ask before every step
        workers, staleness = len(self._shop.workers), self._shop.rules.updates.staleness or 0
        aggregation = Aggregation(workers, self._aggregate, staleness, first, first + steps)
        tally, made = Tally(first), first
        early: list[tuple[int, int, int]] = []
        """Answers that wait for updates which are being made: how many have to be, to whom, which step."""
        self._turns = Turns()
        crew = Crew(workers, partial(self._begin, iterators, size))
        self._accepted.clear()
        with self._listening() as news, self._updating(news), self._letting_go():
            while aggregation.done < aggregation.end or made < aggregation.done or crew.at_work:
                message = _next(news, crew)
                if message is None:
                    continue
                if message.step == _MADE:
                    made += 1
                    self._turns.made(message.phases)
                else:
                    self._take(message, aggregation, crew, tally)
                done = []
                while gradients := aggregation.complete():
                    aggregation.updated()
                    if pause.agreed():
                        aggregation.wind_up()
                    self._turns.order()
                    self._order(gradients, dict(self._assigned(aggregation)), tally)
                    if len(tally.losses) == size or pause.wanted():
                        done.append(tally.execution(int(pause.wanted()), aggregation.largest_gap))
                        tally = Tally(aggregation.done)
                early += [(aggregation.done, worker, step) for worker, step in self._assigned(aggregation)]
                for _, worker, step in [each for each in early if each[0] <= made]:
                    self._outboxes[worker].enqueue([self._answer(step)])
                early = [each for each in early if each[0] > made]
                yield from done
            if tally.losses or tally.dropped:
                yield tally.execution(int(pause.wanted()), aggregation.largest_gap)
        for gradient in aggregation.left_over():
            self._discard(tf.constant(gradient.key, tf.int64))

    def _begin(self, iterators: Any, size: int, worker: int, serial: int) -> Any:
        """Begins a worker's function."""
        work = self._worker_functions.get(size)
        if work is None:
            work = self._worker_functions[size] = self._worker_function(size)
        numbers = tf.constant([worker, serial], tf.int64)
        outbox = self._outboxes[worker].queue_ref
        return self._shop.on_worker(self._shop.workers[worker], work, (iterators, numbers, outbox))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[_News]:
        """Has a thread receive what is said: waiting in TensorFlow would keep signals from being heard."""
        news: _News = queue.SimpleQueue()
        sizes = np.cumsum([2, self._shop.totals.size, sum(self._state_sizes)])

        def listen() -> None:
            while True:
                head, body = (part.numpy() for part in self._inbox.dequeue())
                worker, step, key = (int(number) for number in head)
                if step == _OVER:
                    return
                (loss, examples), *counted = np.split(body, sizes)
                news.put(Message(worker, step, key, float(loss), int(examples), *counted))

        thread = threading.Thread(target=listen, name="gradients", daemon=True)
        thread.start()
        try:
            yield news
        finally:
            self._send(tf.constant([0, _OVER, 0], tf.int64), self._nothing())
            thread.join()  # else the next run's could hear this, and this one what is said in the next run

    @contextlib.contextmanager
    def _updating(self, news: _News) -> Iterator[None]:
        """Has a thread call the function that makes updates until it is ordered to end."""

        def update() -> None:
            try:
                with self._shop.coordinator.strategy.scope():
                    self._updates()
            except Exception as error:  # noqa: BLE001 it is raised where the training runs
                news.put(error)

        thread = threading.Thread(target=update, name="updates", daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            self._orders.enqueue(self._no_order())  # it may hang with a ps that has failed: nobody waits for it
            raise
        self._orders.enqueue(self._no_order())
        thread.join()

    @contextlib.contextmanager
    def _letting_go(self) -> Iterator[None]:
        """Tells the workers to leave when a run is broken off: they would wait for ever, and take up nothing else."""
        try:
            yield
        except BaseException:
            for outbox in self._outboxes:
                outbox.enqueue([self._answer(_NO_MORE)])
            raise

    def _take(self, message: Message, aggregation: Aggregation, crew: Crew, tally: Tally) -> None:
        worker = message.worker
        if message.step == _GREETS:
            if not crew.knows(message.key):  # of an earlier run, begun anew when its worker came back
                self._outboxes[worker].enqueue([self._answer(_NO_MORE)])
                return
            aggregation.greet(worker)
            return
        if message.step == _LEAVES:
            crew.left(message.key)
            return
        self._turns.add(worker, message.phases, tally.phases)
        self._turns.wait(worker)
        if aggregation.hand_in(worker, message.step, message.key):
            self._accepted[message.key] = message
        else:
            tally.drop(message)
            self._discard(tf.constant(message.key, tf.int64))

    def _assigned(self, aggregation: Aggregation) -> Iterator[tuple[int, int]]:
        """The workers that are given steps now, and these."""
        for worker, step in aggregation.assign():
            self._turns.go(worker)
            yield worker, step

    def _order(self, gradients: list[Gradient], answers: dict[int, int], tally: Tally) -> None:
        """Orders an update, and the answers that follow it."""
        messages = [self._accepted.pop(gradient.key) for gradient in gradients]
        told = [self._answer(answers.get(worker, _NO_ANSWER)) for worker in range(len(self._outboxes))]
        numbers = np.concatenate([[1], [message.key for message in messages], *told])
        state = np.mean([message.state for message in messages], axis=0)
        self._orders.enqueue([tf.constant(numbers, tf.int64), tf.constant(state, tf.float64)])
        tally.update(messages, [gradient.staleness for gradient in gradients])

    def _answer(self, step: int) -> np.ndarray:
        """A step, and the key to leave its gradient under."""
        return np.array([step, next(self._keys)], np.int64)

    def _no_order(self) -> list[tf.Tensor]:
        """The order to end."""
        numbers = tf.zeros([1 + self._aggregate + 2 * len(self._outboxes)], tf.int64)
        return [numbers, tf.zeros([sum(self._state_sizes)], tf.float64)]

    def _worker_function(self, unrolled: int) -> Any:
        """One worker's steps, until it is told that there are no more.

        Going round a loop over several tasks' devices takes longer than another step in it: some are unrolled.
        """

        @tf.function(autograph=False)
        def work(iterator: Any, numbers: tf.Tensor, outbox: tf.Tensor) -> tf.Tensor:
            worker, serial = tf.unstack(numbers)

            def receive() -> tf.Tensor:
                with tf.device(CHIEF_DEVICE):
                    (answer,) = tf.raw_ops.QueueDequeueV2(handle=outbox, component_types=[tf.int64])
                return tf.ensure_shape(answer, [2])

            def step(answer: tf.Tensor, *note: tf.Tensor) -> list[tf.Tensor]:
                last = self._step(iterator, worker, answer, Watch(self._shop.rules.phases, *note))
                return [receive(), *last]

            def steps(answer: tf.Tensor, *note: tf.Tensor) -> list[tf.Tensor]:
                carried = step(answer, *note)
                for _ in range(unrolled - 1):
                    same = partial(tf.nest.map_structure, tf.identity, carried)
                    carried = tf.cond(carried[0][0] >= 0, partial(step, *carried), same)
                return carried

            note = Watch(self._shop.rules.phases).note
            self._send(tf.stack([worker, _GREETS, serial]), self._nothing())
            tf.while_loop(lambda answer, *_: answer[0] >= 0, steps, [receive(), *note], parallel_iterations=1)
            self._send(tf.stack([worker, _LEAVES, serial]), self._nothing())
            return worker

        return work

    def _step(self, iterator: Any, worker: tf.Tensor, answer: tf.Tensor, watch: Watch) -> list[tf.Tensor]:
        shop, step = self._shop, self._shop.step
        number, key = tf.unstack(answer)
        watch.after("wait", answer)
        batch = next_batch(iterator)
        lookup = shop.tables.lookup([batch])
        pulled = shop.wire.pull(lookup)
        watch.after("data", batch)
        watch.after("pull", pulled.values)
        state = shop.seeds.put(values(step.state), number, worker)
        result = step.train(pulled.values, state, shop.totals.start(), batch, shop.tables.given(lookup.positions[0]))
        self._present = [gradient is not None for gradient in result.gradients]
        watch.after("compute", result.gradients)
        arrival = shop.wire.push(result.gradients, pulled)
        left = [
            self._leave(post, key, [parcel, *rows])
            for post, (parcel, rows) in enumerate(zip(arrival.parcels, arrival.rows, strict=True))
        ]
        watch.after("push", left)
        watch.crossed(lambda: shop.wire.sizes(lookup))
        own = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in shop.own_state(result.state)]
        counted = tf.stack([tf.cast(result.loss, tf.float64), tf.cast(result.examples, tf.float64)])
        head = tf.stack([worker, number, key])
        body = tf.concat([counted, shop.totals.pack(result.metrics), *own, *watch.totals()], axis=0)
        with tf.control_dependencies(left):
            self._send(head, body)
        return watch.note

    def _send(self, head: tf.Tensor, body: tf.Tensor) -> None:
        with tf.device(CHIEF_DEVICE):
            self._inbox.enqueue([head, body])

    def _nothing(self, *phases: tf.Tensor) -> tf.Tensor:
        """A message without content but perhaps the time that something took."""
        size = 2 + self._shop.totals.size + sum(self._state_sizes)
        if phases:
            return tf.concat([tf.zeros([size], tf.float64), *phases], axis=0)
        return tf.zeros([size + self._watched], tf.float64)

    def _leave(self, number: int, key: tf.Tensor, tensors: Tensors) -> Any:
        """Leaves tensors on a ps until they are taken by their key."""
        with tf.device(self._shop.wire.posts[number].device):
            return tf.raw_ops.MapStage(
                key=key,
                indices=tf.range(len(tensors)),
                values=tensors,
                dtypes=[tensor.dtype for tensor in tensors],
                shared_name=f"{self._name}-{number}",
            )

    def _taken(self, keys: tf.Tensor, number: int) -> Arrival:
        """What a worker has left on the ps, under one of the keys."""
        parcels, rows = [], []
        for place, post in enumerate(self._shop.wire.posts):
            dtypes = [post.dtype, *[tf.int32] * len(post.tables)]
            with tf.device(post.device):
                parcel, *own = tf.raw_ops.MapUnstage(
                    key=keys[number], indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=f"{self._name}-{place}"
                )
                parcels.append(parcel)
                rows.append([tf.reshape(each, [-1]) for each in own])
        return Arrival(parcels, rows)

    def _update_function(self) -> Callable[[], Any]:
        """Updates, each as it is ordered, until it is told to end."""
        shop, sizes, aggregate = self._shop, self._state_sizes, self._aggregate

        def receive() -> list[tf.Tensor]:
            with tf.device(CHIEF_DEVICE):
                return self._orders.dequeue()

        @tf.function(autograph=False)  # who waits for a function's result waits for all that it does
        def update(order: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
            """Applies the mean of the gradients that were left under the order's keys."""
            keys = order[1 : 1 + aggregate]
            arrivals = [self._taken(keys, number) for number in range(aggregate)]
            shop.apply(shop.wire.gradients(arrivals), self._present)
            shop.assign_state(tf.split(state, sizes) if sizes else [])
            return tf.constant(0)

        def report(order: tf.Tensor, phases: Tensors) -> tf.Tensor:
            with tf.device(CHIEF_DEVICE):
                for worker, answer in enumerate(tf.unstack(tf.reshape(order[1 + aggregate :], [-1, 2]))):
                    outbox = self._outboxes[worker]
                    tf.cond(answer[0] == _NO_ANSWER, lambda: None, partial(_put, outbox, answer))
                self._send(tf.constant([0, _MADE, 0], tf.int64), self._nothing(*phases))
            return tf.constant(0)

        def follow(order: tf.Tensor, state: tf.Tensor) -> list[tf.Tensor]:
            watch = Watch(shop.rules.phases)
            done = update(order, state)
            watch.after("update", done)
            with tf.control_dependencies([done]):
                reported = report(order, watch.totals())
            with tf.control_dependencies([reported]):
                return receive()

        @tf.function(autograph=False)
        def updates() -> None:
            tf.while_loop(lambda order, _: order[0] > 0, follow, receive(), parallel_iterations=1)

        return updates

    def _discard_function(self) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def discard(key: tf.Tensor) -> tf.Tensor:
            arrival = self._taken(key[None], 0)
            return tf.size(arrival.parcels[0]) if arrival.parcels else tf.constant(0)

        def call(key: tf.Tensor) -> Any:
            with self._shop.coordinator.strategy.scope():
                return discard(key)

        return call


def _put(outbox: tf.queue.QueueBase, answer: tf.Tensor) -> None:
    outbox.enqueue([answer])


def _next(news: _News, crew: Crew) -> Message | None:
    """The next message; None after a while without one. Before it waits it looks at all workers."""
    crew.check()
    try:
        message = news.get(timeout=_LOOK_SECONDS)
    except queue.Empty:
        return None
    if isinstance(message, Exception):
        raise message
    return message
