"""Compiles functions of unrolled steps while workers take steps in loops.

A function of 20 steps takes 20 times as long to trace and to compile as a loop. If workers compiled it at its first
call, all of them would wait for it. So a thread traces it, and has each worker compile it, beside what the worker runs.

Keras's layers are not made for two threads that call them. So the thread traces only while the training waits for
workers, and only the steps of one round at a time.

Where the processor is busy, as with all tasks of a cluster on one machine, that would take several times as long, and
loops are slow. There the training waits for the trace. After that it waits for the workers, but only as long as the
trace has taken, since a worker may be stopped.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import CHIEF_DEVICE, ParameterServerContext
from tfdist_cli.train.engine.parameter_server.worker_functions import run_all
from tfdist_cli.train.tf_compat.coordinator import Cancellation, are_per_worker, is_dead, iterator_without_data
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS, end_at_exit

log = logging.getLogger("tfdist")
_LOST = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError)
"""Errors of a worker that is lost. It compiles the function when it is back and runs it first."""
_BUSY = 2.0
"""The time of a trace as a multiple of its processor time from which on the training waits."""
_POLL_SECONDS = 0.1
"""How often it is looked whether the training is to pause."""


class _Ended(Exception):
    """The training has ended: the function is not needed any more."""


class UnrolledFunctions:
    """The functions that are compiled.

    Args:
        context: the model on its cluster.
        function: a number of steps → the function that takes them. It traces each round within `turn`.
    """

    def __init__(self, context: ParameterServerContext, function: Callable[[int], Any]) -> None:
        self._context, self._function = context, function
        self._ready: set[int] = set()
        self._begun: set[int] = set()
        self._thread: threading.Thread | None = None
        self._turns, self._cancellation = threading.Condition(), Cancellation()
        self._training_waits = self._traces = self._hurries = self._is_closed = False
        self._deadline = math.inf
        """Until when the training waits where the processor is busy."""

    def is_ready(self, count: int, iterators: Any) -> bool:
        """Whether workers have compiled the function; if not, it will be.

        Args:
            count: its steps.
            iterators: the workers' data.
        """
        if count not in self._begun and not self._is_closed and not (self._thread and self._thread.is_alive()):
            self._begun.add(count)
            self._thread = threading.Thread(
                target=self._compile, args=(count, iterators), name="tfdist-unrolled", daemon=True
            )
            self._thread.start()
            end_at_exit(self._end, self._thread)
            if self._context.rules.builds_first:
                with self.training_waits():
                    self._thread.join()
        return count in self._ready

    @contextmanager
    def training_waits(self, ends: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Lets the thread trace while the training waits for workers; at its end, waits for the round in progress.

        Args:
            ends: whether the training is to pause, and waits no longer where the processor is busy.
        """
        with self._turns:
            self._training_waits = True
            self._turns.notify_all()
        try:
            yield
        finally:
            with self._turns:
                while self._hurries and time.monotonic() < self._deadline and not ends():
                    self._turns.wait(_POLL_SECONDS)
                self._training_waits = False
                self._turns.wait_for(lambda: not self._traces)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The thread traces a round. Other threads do not come here while it does.

        Raises:
            _Ended: the training has ended.
        """
        if threading.current_thread() is not self._thread:
            yield
            return
        with self._turns:
            self._turns.wait_for(lambda: self._training_waits or self._is_closed)
            if self._is_closed:
                raise _Ended
            self._traces = True
        begun, used = time.monotonic(), time.thread_time()
        try:
            yield
        finally:
            with self._turns:
                self._traces = False
                self._hurries |= time.monotonic() - begun > _BUSY * (time.thread_time() - used)
                self._turns.notify_all()

    def reopen(self) -> None:
        """Another training begins, after `close`; what was not compiled until then is compiled now."""
        if self._is_closed:
            self._begun &= self._ready
            self._cancellation, self._is_closed = Cancellation(), False

    def close(self) -> None:
        """Ends the thread, which does not wait for workers that compile."""
        self._end()
        if self._thread:
            self._thread.join(GRACE_SECONDS)

    def _end(self) -> None:
        with self._turns:
            self._is_closed = True
            self._turns.notify_all()
        self._cancellation.cancel()

    def _compile(self, count: int, iterators: Any) -> None:
        try:
            with self._context.coordinator.strategy.scope():
                workers = [each for each in self._context.workers if not is_dead(each)]
                begun, self._deadline = time.monotonic(), math.inf
                rehearsals = [self._rehearsal(each, count, iterators) for each in workers]
                self._deadline = 2 * time.monotonic() - begun
                run_all(rehearsals)
        except _Ended:
            return
        except Exception as error:  # noqa: BLE001 the training goes on in loops
            log.info("steps are not unrolled: %s", error)
        else:
            self._ready.add(count)
        finally:
            with self._turns:
                self._hurries = False
                self._turns.notify_all()

    def _rehearsal(self, worker: Any, count: int, iterators: Any) -> Callable[[], None]:
        """Traces the function, and returns one that has a worker compile it: it fails when it reads the first batch."""
        with tf.device(worker.device_name if are_per_worker(iterators) else CHIEF_DEVICE):
            iterator = iterator_without_data(self._context.element_spec)
        arguments = iterator, tf.constant(self._context.seeds.numbers(0), tf.int64)
        rehearse = self._context.rehearsal(worker, self._function(count), arguments, self._cancellation)
        return partial(_compiled, rehearse)


def _compiled(rehearse: Callable[[], None]) -> None:
    try:
        rehearse()
    except tf.errors.FailedPreconditionError:
        return  # there is no batch
    except _LOST as error:
        log.debug("a worker compiles unrolled steps later: %s", error)
