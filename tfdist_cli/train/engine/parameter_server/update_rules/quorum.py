"""Synchronous and bounded updates: gradients of several workers make one update.

Each worker runs one function for as long as the training goes on. For each step it waits for the chief's answer, the
step's number, which comes as soon as the rule lets the worker go on. It computes a gradient, leaves it on the ps under
a key, and hands the key in with what it counted. When enough gradients for the next update are there, the chief orders
it: another function, which is under way all the time, too, has the ps apply the mean of what was left under these keys.
The order has the answers for the workers that wait for this update, and each ps gives them out when it has done its
part (`messages.py`). What a worker leaves is applied whole or not at all, on all ps: of a worker that dies in between
nothing is applied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.update_rules.accumulator import Accumulator, Message
from tfdist_cli.train.engine.parameter_server.update_rules.messages import NO_MORE, Answer, MessageChannels
from tfdist_cli.train.engine.parameter_server.update_rules.quorum_functions import (
    GREETS,
    LEAVES,
    MADE,
    OVER,
    QuorumFunctions,
)
from tfdist_cli.train.engine.parameter_server.update_rules.quorum_policy import Gradient, QuorumPolicy
from tfdist_cli.train.engine.parameter_server.worker_functions import News, WorkerFunctions, raise_failure
from tfdist_cli.train.engine.step_timer import Turns
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit

_Told = News[Message]


class QuorumUpdates:
    """Gives out steps and makes updates as `QuorumPolicy` says.

    Args:
        workshop: the model on its cluster.
    """

    def __init__(self, workshop: ParameterServerContext) -> None:
        self._shop = workshop
        self._aggregate = workshop.batches_per_update
        self._rounds = QuorumFunctions(workshop, self._aggregate)
        self._channels: MessageChannels | None = None
        """None before the first run, and after one that was broken off."""
        self._turns = Turns()
        self._pace = Pacing(1)
        self._accepted: dict[int, Message] = {}
        """What was handed in for updates that are still to be made, by key."""

    def run(self, iterators: Any, steps: int, *, first: int, size: int, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`; a pause comes as soon as what workers have been given, or promised, is done."""
        workers, staleness = len(self._shop.workers), self._shop.rules.updates.staleness or 0
        aggregation = QuorumPolicy(workers, self._aggregate, staleness, first, first + steps)
        tally = Accumulator(first)
        self._turns = Turns()
        channels = self._channels = self._channels or self._new_channels()
        crew = WorkerFunctions(workers, partial(self._begin, channels, iterators, size))
        self._accepted.clear()
        self._pace.begin()
        with self._listening(channels) as news, self._working(channels, news, size):
            while aggregation.done < aggregation.end or crew.at_work:
                message = crew.next(news)
                if message is None:
                    continue
                self._take(message, channels, aggregation, crew, tally)
                aggregation.several = self._pace.size(size)
                done = []
                while gradients := aggregation.complete():
                    if pause.agreed():
                        aggregation.wind_up()
                    several = aggregation.updated()
                    self._turns.order()
                    self._order(channels, gradients, self._assigned(aggregation), tally, several=several)
                    if len(tally.losses) == size or pause.wanted():
                        done.append(tally.execution(int(pause.wanted()), aggregation.largest_gap))
                        tally = Accumulator(aggregation.done)
                if answers := self._assigned(aggregation):
                    channels.answer(answers)
                yield from done
            if tally.losses or tally.dropped:
                yield tally.execution(int(pause.wanted()), aggregation.largest_gap)
        for gradient in aggregation.left_over():
            self._discard(gradient.key)

    def _new_channels(self) -> MessageChannels:
        rounds = self._rounds
        return MessageChannels(
            rounds.devices, len(self._shop.workers), self._aggregate, rounds.state_size, sum(rounds.sizes)
        )

    def _begin(self, channels: MessageChannels, iterators: Any, size: int, worker: int, serial: int) -> Any:
        """Begins a worker's function."""
        numbers = tf.constant([worker, serial], tf.int64)
        args = iterators, numbers, channels.of(worker)
        return self._shop.on_worker(self._shop.workers[worker], self._rounds.work(size), args)

    @contextlib.contextmanager
    def _listening(self, channels: MessageChannels) -> Iterator[_Told]:
        """Has a thread receive what is said: waiting in TensorFlow would keep signals from being heard."""
        news: _Told = queue.SimpleQueue()
        ends, inbox = np.cumsum(self._rounds.sizes)[:-1], channels.inbox

        def listen() -> None:
            while True:
                head, body = (part.numpy() for part in inbox.dequeue())
                step, key, _, worker = (int(number) for number in head)
                if step == OVER:
                    return
                (loss, examples), *counted = np.split(body, ends)
                news.put(Message(worker, step, key, float(loss), int(examples), *counted))

        thread = threading.Thread(target=listen, name="gradients", daemon=True)
        thread.start()
        try:
            yield news
        finally:
            inbox.enqueue(self._rounds.over())
            thread.join()  # else the next run's could hear this, and this one what is said in the next run

    @contextlib.contextmanager
    def _working(self, channels: MessageChannels, news: _Told, size: int) -> Iterator[None]:
        """Has threads call the functions that make updates and give answers until these are ordered to end.

        A run that is broken off leaves its queues behind: workers may still ask, up to `size` times.
        """
        scope = self._shop.coordinator.strategy.scope

        def make_updates() -> None:
            try:
                with scope():
                    self._rounds.updates(size)(channels.handles)
            except Exception as error:  # noqa: BLE001 it is raised where the training runs
                news.put(error)
                with contextlib.suppress(tf.errors.OpError):  # on a ps that is gone nobody waits
                    channels.end_waiting()

        def give_answers() -> None:
            try:
                with scope():
                    self._rounds.gives(channels.handles)
            except Exception as error:  # noqa: BLE001 it is raised where the training runs
                news.put(error)

        updates = threading.Thread(target=make_updates, name="updates", daemon=True)
        answers = threading.Thread(target=give_answers, name="answers", daemon=True)
        updates.start()
        answers.start()
        try:
            yield
        except BaseException:
            end_at_exit(channels.end_orders, updates)
            self._channels = None  # a ps may be gone: others are made when they are needed
            channels.break_off(size + 1)
            answers.join(GRACE_SECONDS)  # with a ps that has failed it may hang
            raise
        channels.close()
        answers.join()
        updates.join()
        raise_failure(news)

    def _take(
        self,
        message: Message,
        channels: MessageChannels,
        aggregation: QuorumPolicy,
        crew: WorkerFunctions,
        tally: Accumulator,
    ) -> None:
        worker = message.worker
        if message.step == MADE:
            self._turns.made(message.phases)
            return
        if message.step == GREETS:
            if crew.knows(message.key):
                aggregation.greet(worker)
            else:  # of an earlier run, begun anew when its worker came back
                channels.answer([(worker, NO_MORE, False)])
            return
        if message.step == LEAVES:
            crew.left(message.key)
            return
        self._turns.add(worker, message.phases, tally.phases)
        self._turns.wait(worker)
        if aggregation.hand_in(worker, message.step, message.key):
            self._accepted[message.key] = message
        else:
            tally.drop(message)
            self._discard(message.key)

    def _assigned(self, aggregation: QuorumPolicy) -> list[Answer]:
        """The answers for workers that may go on now."""
        assigned = list(aggregation.assign())
        for worker, *_ in assigned:
            self._turns.go(worker)
        return assigned

    def _order(
        self,
        channels: MessageChannels,
        gradients: list[Gradient],
        answers: list[Answer],
        tally: Accumulator,
        *,
        several: bool,
    ) -> None:
        """Orders an update, and the answers that follow it."""
        messages = [self._accepted.pop(gradient.key) for gradient in gradients]
        state = np.mean([message.state for message in messages], axis=0)
        channels.order([message.key for message in messages], state, answers, several=several)
        self._pace.done(1)
        tally.update(messages, [gradient.staleness for gradient in gradients])

    def _discard(self, key: int) -> None:
        """Forgets a gradient that no update will take."""
        with self._shop.coordinator.strategy.scope():
            self._rounds.discard(tf.constant(key, tf.int64))
