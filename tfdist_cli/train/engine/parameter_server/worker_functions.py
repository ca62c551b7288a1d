"""The functions that run on the workers."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from itertools import count
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import raise_cause
from tfdist_cli.train.tf_compat.coordinator import failure_of, is_aborted, wait_for

_serials = count()
_LOOK_SECONDS = 0.5
"""How often the workers are looked at while nothing is heard of them."""
_CAUSE_SECONDS = 2.0
"""How long the cause of cancellations is waited for."""
_Message = TypeVar("_Message")
News = queue.SimpleQueue[_Message | Exception]
"""What threads have heard, or failed of."""


class WorkerFunctions:
    """A function on each worker.

    A worker that is lost and comes back begins its function anew, even when nobody waits for it any more. So each has a
    serial number, by which those of this crew are known.

    Args:
        workers: how many there are.
        start: begins the function on a worker: the worker's number, the function's serial number → its result to be.
    """

    def __init__(self, workers: int, start: Callable[[int, int], Any]) -> None:
        self._running: dict[int, Any] = {}
        for worker in range(workers):
            serial = next(_serials)
            self._running[serial] = start(worker, serial)

    def knows(self, serial: int) -> bool:
        """Whether a function is one of these, and has not ended."""
        return serial in self._running

    def left(self, serial: int) -> None:
        """One has ended."""
        self._running.pop(serial, None)

    @property
    def at_work(self) -> bool:
        """Whether any of them still runs, or will."""
        return any(not is_aborted(remote) for remote in self._running.values())

    def finish(self) -> None:
        """Waits until all have ended but those whose workers are gone; raises what one has failed of."""
        for remote in self._running.values():
            while not wait_for(remote, _LOOK_SECONDS):
                self.check()
        self.check()

    def check(self) -> None:
        """Raises what one of them has failed of; that a worker is gone is no failure."""
        if self._failures():
            self._raise_first_cause([], None)

    def next(self, news: News[_Message]) -> _Message | None:
        """The next message; None after a while without one. Raises what the thread that listens has failed of.

        Before it waits it looks at all workers.
        """
        if self._failures():
            self._raise_first_cause([], news)
        try:
            message = news.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            self._raise_first_cause([message], news)
        return message

    def _failures(self) -> list[Exception]:
        return [error for remote in self._running.values() if (error := failure_of(remote)) is not None]

    def _raise_first_cause(self, heard: list[Exception], news: News[_Message] | None) -> NoReturn:
        """Raises a failure; of several one that is no cancellation, which only follows from another failure.

        Where there are only cancellations, their cause is waited for a moment: it may be reported after them.
        """
        end = time.monotonic() + _CAUSE_SECONDS
        while all(map(_is_cancellation, failures := [*heard, *self._failures()])) and time.monotonic() < end:
            try:
                message = (news or queue.SimpleQueue()).get(timeout=_CAUSE_SECONDS / 10)
            except queue.Empty:
                continue
            heard += [message] if isinstance(message, Exception) else []
        raise_cause(min(failures, key=_is_cancellation))


def _is_cancellation(error: Exception) -> bool:
    return isinstance(getattr(error, "original_exception", None) or error, tf.errors.CancelledError)


def raise_failure(news: News[Any]) -> None:
    """Raises what a thread that has ended has failed of, which nobody has heard."""
    while not news.empty():
        message = news.get()
        if isinstance(message, Exception):
            raise_cause(message)
