"""Synchronous updates in which all workers take part: each update is the mean of one gradient of every worker.

Each worker runs one function for as long as the training goes on, and so does the ps side (`lockstep_functions.py`).
A worker waits on each ps for the token of its step, computes a gradient, stores it on the ps, and commits it on the
first ps. When all workers have committed, each ps applies the mean of the stored gradients and gives the next token
(`token_queues.py`). The chief orders updates in advance, several at a time, and receives a message when they are
applied. A worker's gradient is applied on all ps or on none: if a worker dies before its commit, nothing of it is
applied.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.engine.base import Execution, Pause
from tfdist_cli.train.engine.pacing import Pacing
from tfdist_cli.train.engine.parameter_server.context import ParameterServerContext
from tfdist_cli.train.engine.parameter_server.update_rules.accumulator import Accumulator, Message
from tfdist_cli.train.engine.parameter_server.update_rules.lockstep_functions import LockstepFunctions
from tfdist_cli.train.engine.parameter_server.update_rules.token_queues import END, ONE, ROW, RUN, TokenQueues
from tfdist_cli.train.engine.parameter_server.worker_functions import News, WorkerFunctions, raise_failure
from tfdist_cli.train.engine.step_timer import within_wait
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit

_AHEAD = 2
"""Rows that are ordered and not yet told of, so that the ps need not wait for the chief."""
_Told = News[np.ndarray]
_runs = count(1)


class LockstepUpdates:
    """Orders updates and counts what they consist of.

    Args:
        workshop: the model on its cluster.
    """

    def __init__(self, workshop: ParameterServerContext) -> None:
        self._shop = workshop
        self._cadence = LockstepFunctions(workshop)
        self._turnstile: TokenQueues | None = None
        """None before the first run, and after one that was broken off."""
        self._pace = Pacing(1)

    def run(self, iterators: Any, steps: int, *, first: int, size: int, pause: Pause) -> Iterator[Execution]:
        """See `Engine.run`; a pause comes as soon as the rows are done that have been ordered."""
        cadence, workers = self._cadence, self._shop.workers
        if self._turnstile is None:
            self._turnstile = TokenQueues(cadence.devices, len(workers), sum(cadence.sizes))
        turnstile = self._turnstile
        place = next(_runs) * RUN + first
        with self._shop.coordinator.strategy.scope():
            turnstile.begin(place)
        crew = WorkerFunctions(len(workers), partial(self._begin, turnstile, iterators, size, place))
        end, ordered, under_way = first + steps, first, 0
        seconds = 0.0
        self._pace.begin()
        with self._listening(turnstile) as news, self._updating(turnstile, news, size, place):
            over = False
            while True:
                while under_way < _AHEAD and ordered < end:
                    if pause.agreed():
                        end = ordered
                        break
                    several = 1 < size == self._pace.size(size) <= end - ordered
                    turnstile.order(ROW if several else ONE)
                    ordered, under_way = ordered + (size if several else 1), under_way + 1
                if ordered == end and not over:  # at once: that all functions end takes as long as some updates
                    turnstile.order(END)
                    over = True
                if not under_way:
                    break
                told = crew.next(news)
                if told is None:
                    continue
                tally = Accumulator(first)
                seconds = self._count(told, tally, seconds)
                first, under_way = first + len(told), under_way - 1
                self._pace.done(len(told))
                yield tally.execution(int(pause.wanted()), gap=0)
        crew.finish()
        with self._shop.coordinator.strategy.scope():
            cadence.forget()

    def _begin(self, turnstile: TokenQueues, iterators: Any, size: int, place: int, worker: int, _: int) -> Any:
        """Begins a worker's function."""
        args = iterators, tf.constant([worker, place], tf.int64), turnstile.of(worker)
        return self._shop.on_worker(self._shop.workers[worker], self._cadence.work(size), args)

    def _count(self, told: np.ndarray, tally: Accumulator, seconds: float) -> float:
        """Counts what a row of updates consists of.

        Args:
            told: shape (updates, workers, numbers).
            tally: where it is counted.
            seconds: how long the update before took, which the workers waited for, where time is taken.

        Returns:
            The same of the last one.
        """
        sizes = self._cadence.sizes
        for update in told:
            messages = []
            for worker, numbers in enumerate(update):
                (loss, examples), metrics, state, phases, own = np.split(numbers, np.cumsum(sizes))
                message = Message(worker, tally.first, 0, float(loss), int(examples), metrics, state, phases)
                messages.append(message)
                if phases.size:
                    task = f"worker:{worker}"
                    tally.phases[task] = tally.phases.get(task, 0.0) + within_wait(phases, seconds)
            tally.update(messages, [0] * len(messages))
            seconds = float(own[0]) if own.size else 0.0
        return seconds

    @contextlib.contextmanager
    def _listening(self, turnstile: TokenQueues) -> Iterator[_Told]:
        """Has a thread receive what is told: waiting in TensorFlow would keep signals from being heard."""
        news: _Told = queue.SimpleQueue()

        def listen() -> None:
            while (told := turnstile.results.dequeue().numpy()).size:
                news.put(told)

        thread = threading.Thread(target=listen, name="results", daemon=True)
        thread.start()
        try:
            yield news
        finally:
            turnstile.results.enqueue(tf.zeros([0], tf.float64))
            thread.join()  # else the next run's could hear this, and this one what is told in the next run

    @contextlib.contextmanager
    def _updating(self, turnstile: TokenQueues, news: _Told, size: int, place: int) -> Iterator[None]:
        """Has a thread call the function that makes updates until the end is ordered, within the context.

        A run that is broken off ends with what was ordered, if that comes to pass; its turnstile is left behind.
        """
        scope = self._shop.coordinator.strategy.scope

        def make_updates() -> None:
            try:
                with scope():
                    self._cadence.updates(size)(turnstile.handles, tf.constant(place, tf.int64))
            except Exception as error:  # noqa: BLE001 it is raised where the training runs
                news.put(error)

        updates = threading.Thread(target=make_updates, name="updates", daemon=True)
        updates.start()
        try:
            yield
        except BaseException:
            turnstile.order(END)
            updates.join(GRACE_SECONDS)
            self._turnstile = None
            _briefly(partial(turnstile.break_off, size + 1))
            if updates.is_alive():
                end_at_exit(partial(_briefly, turnstile.end_commits), updates)
            raise
        updates.join()
        raise_failure(news)


def _briefly(work: Any) -> None:
    """Does what takes a moment where all ps are there, and may fail, or hang, where one is not."""

    def attempt() -> None:
        with contextlib.suppress(tf.errors.OpError):
            work()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
