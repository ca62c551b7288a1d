"""Synchronous and bounded updates: gradients of several workers make one update.

Each worker runs a function of some steps. For each step it asks the chief, which answers with the step's number as soon
as the rule lets the worker go on. It computes a gradient, leaves it on the ps under a key, and hands the key in with
what it counted. When enough gradients for the next update are there, the chief has the ps apply their mean. What a
worker leaves is applied whole or not at all, on all ps: of a worker that dies in between nothing is applied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count as counter
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator.remote_value import RemoteValueStatus

from tfdist_cli.train.aggregation import Aggregation, Gradient
from tfdist_cli.train.engine import Execution, Pause, WorkerReport
from tfdist_cli.train.step import Tensors, values
from tfdist_cli.train.wire import Arrival
from tfdist_cli.train.workshop import Workshop, raise_cause

_LOOK_SECONDS = 0.5
"""How often workers are looked at that say nothing."""
_AHEAD = 2
"""Functions that are begun on a worker: one that runs and one that waits for it."""
_CHIEF = "/job:chief/replica:0/task:0/device:CPU:0"
_GREETS, _LEAVES, _OVER = -1, -2, -3
"""What a message says in the place of a step's number: a worker begins, a worker has ended, nobody listens any more."""
_numbers = counter()


@dataclass(frozen=True)
class _Message:
    """What a worker says, and what it counted.

    Args:
        worker: its number.
        step: the step its gradient is for, or one of the words above.
        key: what its gradient is left under.
        waits: whether it waits for an answer.
        loss: the loss of its batch.
        examples: the examples in it.
        metrics: what they counted, packed.
        state: the state after the step, flat.
    """

    worker: int
    step: int
    key: int
    waits: bool
    loss: float
    examples: int
    metrics: np.ndarray
    state: np.ndarray


class AggregatedUpdates:
    """Gives out steps and makes updates as `Aggregation` says.

    Args:
        workshop: the model on its cluster.
    """

    def __init__(self, workshop: Workshop) -> None:
        self._shop = workshop
        self._name = f"tfdist-{next(_numbers)}"
        self._functions: dict[int, Any] = {}
        self._present: list[bool] = []
        self._keys = counter()
        self._accepted: dict[int, _Message] = {}
        """What was handed in for updates that are still to be made, by key."""
        self._state_sizes = [int(np.prod(variable.shape)) for variable in workshop.own_state(workshop.step.state)]
        with tf.device(_CHIEF):
            size = 2 + workshop.totals.size + sum(self._state_sizes)
            self._inbox = tf.queue.FIFOQueue(-1, [tf.int64, tf.float64], [[4], [size]])
            self._outboxes = [tf.queue.FIFOQueue(-1, [tf.int64], [[2]]) for _ in workshop.workers]
        self._update = self._update_function()
        self._discard = self._discard_function()

    def run(
        self, iterators: Any, steps: int, *, first: int, size: int, adapts: bool, pause: Pause
    ) -> Iterator[Execution]:
        """See `Engine.run`; a pause comes as soon as what workers have been given is done."""
        del adapts  # workers ask before every step
        rules, workers = self._shop.rules, len(self._shop.workers)
        staleness = rules.updates.staleness or 0
        aggregation = Aggregation(workers, rules.batches(workers), staleness, first, first + steps)
        tally = _Tally(first)
        work = self._functions.get(size)
        if work is None:
            work = self._functions[size] = self._worker_function(size)

        def begin(worker: int) -> Any:
            args = (iterators, tf.constant(worker, tf.int64), self._outboxes[worker].queue_ref)
            return self._shop.on_worker(self._shop.workers[worker], work, args)

        crew = _Crew(workers, begin)
        self._accepted.clear()
        with self._listening() as messages, self._letting_go():
            while aggregation.done < aggregation.end or crew.at_work:
                message = _next(messages, crew)
                if message is None:
                    continue
                self._take(message, aggregation, crew, tally)
                done = []
                while made := aggregation.complete():
                    self._make(made, tally)
                    aggregation.updated()
                    if pause.agreed():
                        aggregation.wind_up()
                    if len(tally.losses) == size or pause.wanted():
                        done.append(tally.execution(int(pause.wanted()), aggregation.largest_gap))
                        tally = _Tally(aggregation.done)
                self._answer(aggregation)
                yield from done
            if tally.losses or tally.dropped:
                yield tally.execution(int(pause.wanted()), aggregation.largest_gap)
        for gradient in aggregation.left_over():
            self._discard(tf.constant(gradient.key, tf.int64))

    @contextlib.contextmanager
    def _listening(self) -> Iterator[queue.SimpleQueue[_Message]]:
        """Has a thread receive what workers say: waiting in TensorFlow would keep signals from being heard."""
        messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        sizes = np.cumsum([2, self._shop.totals.size])

        def listen() -> None:
            while True:
                head, body = (part.numpy() for part in self._inbox.dequeue())
                worker, step, key, waits = (int(number) for number in head)
                if step == _OVER:
                    return
                (loss, examples), metrics, state = np.split(body, sizes)
                messages.put(_Message(worker, step, key, bool(waits), float(loss), int(examples), metrics, state))

        thread = threading.Thread(target=listen, name="gradients", daemon=True)
        thread.start()
        try:
            yield messages
        finally:
            self._send(tf.constant([0, _OVER, 0, 0], tf.int64), self._nothing())
            thread.join()  # else the next run's could hear this, and this one what is said in the next run

    @contextlib.contextmanager
    def _letting_go(self) -> Iterator[None]:
        """Tells the workers to leave when a run is broken off: they would wait for ever, and take up nothing else."""
        try:
            yield
        except BaseException:
            for outbox in self._outboxes:
                for _ in range(_AHEAD):
                    outbox.enqueue([tf.constant([-1, 0], tf.int64)])
            raise

    def _take(self, message: _Message, aggregation: Aggregation, crew: _Crew, tally: _Tally) -> None:
        if message.step == _GREETS:
            aggregation.greet(message.worker)
            if aggregation.done < aggregation.end:
                crew.begin(message.worker)  # the next one, so that the worker need not wait for it
            return
        if message.step == _LEAVES:
            crew.left(message.worker)
            return
        if aggregation.hand_in(message.worker, message.step, message.key, waits=message.waits):
            self._accepted[message.key] = message
        else:
            tally.drop(message)
            self._discard(tf.constant(message.key, tf.int64))

    def _make(self, gradients: list[Gradient], tally: _Tally) -> None:
        messages = [self._accepted.pop(gradient.key) for gradient in gradients]
        state = np.mean([message.state for message in messages], axis=0)
        self._update(tf.constant([message.key for message in messages], tf.int64), tf.constant(state, tf.float64))
        tally.update(messages, [gradient.staleness for gradient in gradients])

    def _answer(self, aggregation: Aggregation) -> None:
        for worker, step in aggregation.assign():
            self._outboxes[worker].enqueue([tf.constant([step, next(self._keys)], tf.int64)])

    def _worker_function(self, count: int) -> Any:
        """At most `count` steps of one worker; it ends when it is told that there are no more."""

        @tf.function(autograph=False)
        def work(iterator: Any, worker: tf.Tensor, outbox: tf.Tensor) -> tf.Tensor:
            def say(word: int, *, waits: bool) -> None:
                self._send(tf.stack([worker, word, 0, int(waits)]), self._nothing())

            def receive() -> tf.Tensor:
                with tf.device(_CHIEF):
                    (answer,) = tf.raw_ops.QueueDequeueV2(handle=outbox, component_types=[tf.int64])
                return tf.ensure_shape(answer, [2])

            nothing = tf.constant([-1, 0], tf.int64)
            say(_GREETS, waits=True)
            going = tf.constant(True)
            for number in range(count):
                answer = tf.cond(going, receive, lambda: nothing)
                going = answer[0] >= 0
                waits = number < count - 1

                def step(answer: tf.Tensor = answer, waits: bool = waits) -> tf.Tensor:
                    return self._step(iterator, worker, answer[0], answer[1], waits=waits)

                tf.cond(going, step, lambda: tf.constant(0))
            say(_LEAVES, waits=False)
            return worker

        return work

    def _step(self, iterator: Any, worker: tf.Tensor, number: tf.Tensor, key: tf.Tensor, *, waits: bool) -> tf.Tensor:
        shop, step = self._shop, self._shop.step
        batch = next(iterator)
        lookup = shop.tables.lookup([batch])
        pulled = shop.wire.pull(lookup)
        state = shop.seeds.put(values(step.state), number, worker)
        result = step.train(pulled.values, state, shop.totals.start(), batch, shop.tables.given(lookup.positions[0]))
        self._present = [gradient is not None for gradient in result.gradients]
        arrival = shop.wire.push(result.gradients, pulled)
        left = [
            self._leave(post, key, [parcel, *rows])
            for post, (parcel, rows) in enumerate(zip(arrival.parcels, arrival.rows, strict=True))
        ]
        own = [tf.reshape(tf.cast(value, tf.float64), [-1]) for value in shop.own_state(result.state)]
        counted = tf.stack([tf.cast(result.loss, tf.float64), tf.cast(result.examples, tf.float64)])
        with tf.control_dependencies(left):
            head = tf.stack([worker, number, key, tf.constant(int(waits), tf.int64)])
            self._send(head, tf.concat([counted, shop.totals.pack(result.metrics), *own], axis=0))
        return tf.constant(1)

    def _send(self, head: tf.Tensor, body: tf.Tensor) -> None:
        with tf.device(_CHIEF):
            self._inbox.enqueue([head, body])

    def _nothing(self) -> tf.Tensor:
        return tf.zeros([2 + self._shop.totals.size + sum(self._state_sizes)], tf.float64)

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

    def _taken(self, key: tf.Tensor) -> Arrival:
        """What a worker has left on the ps."""
        parcels, rows = [], []
        for number, post in enumerate(self._shop.wire.posts):
            dtypes = [post.dtype, *[tf.int32] * len(post.tables)]
            with tf.device(post.device):
                parcel, *own = tf.raw_ops.MapUnstage(
                    key=key, indices=tf.range(len(dtypes)), dtypes=dtypes, shared_name=f"{self._name}-{number}"
                )
                parcels.append(parcel)
                rows.append([tf.reshape(each, [-1]) for each in own])
        return Arrival(parcels, rows)

    def _update_function(self) -> Callable[..., Any]:
        """Applies the mean of the gradients that were left under some keys."""
        shop = self._shop
        aggregate, sizes = shop.rules.batches(len(shop.workers)), self._state_sizes

        @tf.function(autograph=False)
        def update(keys: tf.Tensor, state: tf.Tensor) -> tf.Tensor:
            arrivals = [self._taken(keys[number]) for number in range(aggregate)]
            updates = shop.apply(shop.wire.gradients(arrivals), self._present)
            shop.assign_state(tf.split(state, sizes) if sizes else [])
            return updates

        return self._in_scope(update)

    def _discard_function(self) -> Callable[..., Any]:
        @tf.function(autograph=False)
        def discard(key: tf.Tensor) -> tf.Tensor:
            arrival = self._taken(key)
            return tf.size(arrival.parcels[0]) if arrival.parcels else tf.constant(0)

        return self._in_scope(discard)

    def _in_scope(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self._shop.coordinator.strategy.scope():
                return function(*args)

        return call


@dataclass
class _Tally:
    """What has been counted since the last execution.

    Args:
        first: the number of the first update in it.
    """

    first: int
    losses: list[float] = field(default_factory=list)
    metrics: Any = 0.0
    steps: Counter[str] = field(default_factory=Counter)
    examples: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    loss_of: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    staleness: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))

    def drop(self, message: _Message) -> None:
        """A gradient came too late."""
        name = f"worker:{message.worker}"
        self.steps[name] += 1
        self.dropped[name] += 1

    def update(self, messages: list[_Message], staleness: list[int]) -> None:
        """An update has been made of what workers handed in."""
        self.losses.append(float(np.mean([message.loss for message in messages])))
        for message, behind in zip(messages, staleness, strict=True):
            name = f"worker:{message.worker}"
            self.metrics = self.metrics + message.metrics
            self.steps[name] += 1
            self.examples[name] += message.examples
            self.loss_of[name] += message.loss
            self.staleness[name].append(behind)

    def execution(self, votes: int, gap: int) -> Execution:
        """All of it."""
        reports = {
            name: WorkerReport(
                self.loss_of[name], steps - self.dropped[name], tuple(self.staleness[name]), self.dropped[name]
            )
            for name, steps in self.steps.items()
        }
        losses = np.array(self.losses)
        return Execution(self.first, losses, self.metrics, dict(self.steps), dict(self.examples), votes, reports, gap)


class _Crew:
    """The functions that run on the workers, in the order they were begun.

    Args:
        workers: how many there are.
        start: begins one on a worker.
    """

    def __init__(self, workers: int, start: Callable[[int], Any]) -> None:
        self._start = start
        self._running: list[deque[Any]] = [deque() for _ in range(workers)]
        for worker in range(workers):
            self.begin(worker)

    def begin(self, worker: int) -> None:
        """Begins one more, when those before it have ended; a worker that comes back begins its own anew."""
        if len(self._running[worker]) < _AHEAD:
            self._running[worker].append(self._start(worker))

    def left(self, worker: int) -> None:
        """One has ended."""
        self._running[worker].popleft()

    @property
    def at_work(self) -> bool:
        """Whether any of them still runs, or will."""
        return any(running and running[0]._status is not RemoteValueStatus.ABORTED for running in self._running)

    def check(self) -> None:
        """Raises what one of them has failed of; that a worker is gone is no failure."""
        for running in self._running:
            for remote in running:
                if remote._status is RemoteValueStatus.READY and remote._error is not None:
                    raise_cause(remote._error)


def _next(messages: queue.SimpleQueue[_Message], crew: _Crew) -> _Message | None:
    """The next message; None after a while without one. Before it waits it looks at all workers."""
    crew.check()
    try:
        return messages.get(timeout=_LOOK_SECONDS)
    except queue.Empty:
        return None
