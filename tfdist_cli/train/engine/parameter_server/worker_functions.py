"""Functions that run for as long as a training: one on each worker, and others in threads of the chief."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, NoReturn, TypeVar

import tensorflow as tf

from tfdist_cli.train.engine.parameter_server.context import raise_cause
from tfdist_cli.train.tf_compat.coordinator import failure_of, is_aborted, wait_for
from tfdist_cli.train.tf_compat.exit_hooks import GRACE_SECONDS

_serials = count()
NO_FUNCTION = -1
"""A serial number that no function of a training has."""
_CHECK_SECONDS = 0.5
"""How often the workers are checked while no message arrives."""
_CAUSE_SECONDS = 2.0
"""How long to wait for the cause of cancellations."""
_Message = TypeVar("_Message")
Messages = queue.SimpleQueue[_Message | Exception]
"""What threads have received, and the errors that they failed with."""
Threads = Mapping[str, threading.Thread]


class WorkerFunctions:
    """A function on each worker.

    A worker that is restarted starts its function again, even when nothing waits for it any more. So each function has
    a serial number.

    Args:
        workers: how many there are.
        start: starts the function on a worker: the worker's number, the function's serial number → its `RemoteValue`.
    """

    def __init__(self, workers: int, start: Callable[[int, int], Any]) -> None:
        self._running: dict[int, Any] = {}
        for worker in range(workers):
            serial = next(_serials)
            self._running[serial] = start(worker, serial)

    def is_running(self, serial: int) -> bool:
        """Whether a function is one of these, and has not ended."""
        return serial in self._running

    def ended(self, serial: int) -> None:
        """A function has ended."""
        self._running.pop(serial, None)

    @property
    def any_running(self) -> bool:
        """Whether any function runs, or will run."""
        return any(not is_aborted(remote) for remote in self._running.values())

    @property
    def any_left(self) -> bool:
        """Whether any function has not ended: it runs, or its worker is lost."""
        return bool(self._running)

    def join(self) -> None:
        """Waits until all functions have ended, except on lost workers; raises the error that one has failed with."""
        for remote in self._running.values():
            while not wait_for(remote, _CHECK_SECONDS):
                self.check()
        self.check()

    def check(self) -> None:
        """Raises the error that a function has failed with; the loss of a worker is no failure."""
        if self._failures():
            self._raise_first_cause([], None)

    def next_message(self, messages: Messages[_Message]) -> _Message | None:
        """Returns the next message; None if none arrives for a while.

        Raises:
            Exception: a function has failed, which is checked first, or the thread that receives messages.
        """
        if self._failures():
            self._raise_first_cause([], messages)
        try:
            message = messages.get(timeout=_CHECK_SECONDS)
        except queue.Empty:
            return None
        if isinstance(message, Exception):
            self._raise_first_cause([message], messages)
        return message

    def _failures(self) -> list[Exception]:
        return [error for remote in self._running.values() if (error := failure_of(remote)) is not None]

    def _raise_first_cause(self, received: list[Exception], messages: Messages[_Message] | None) -> NoReturn:
        """Raises one of several errors: not a cancellation, which only follows from another error, if there is one.

        If there are only cancellations, waits a moment for their cause, which may be reported after them.
        """
        end = time.monotonic() + _CAUSE_SECONDS
        while all(map(_is_cancellation, failures := [*received, *self._failures()])) and time.monotonic() < end:
            try:
                message = (messages or queue.SimpleQueue()).get(timeout=_CAUSE_SECONDS / 10)
            except queue.Empty:
                continue
            received += [message] if isinstance(message, Exception) else []
        raise_cause(min(failures, key=_is_cancellation))


def _is_cancellation(error: Exception) -> bool:
    return isinstance(getattr(error, "original_exception", None) or error, tf.errors.CancelledError)


def raise_failure(messages: Messages[Any]) -> None:
    """Raises the error that a thread has failed with, if there is one among the messages that are left."""
    while not messages.empty():
        message = messages.get()
        if isinstance(message, Exception):
            raise_cause(message)


def run_all(functions: Sequence[Callable[[], None]]) -> None:
    """Runs functions at the same time, each in a thread, and waits; raises the error of one that failed."""
    with ThreadPoolExecutor(len(functions)) as pool:
        for done in [pool.submit(function) for function in functions]:
            done.result()


@contextmanager
def receiving(receive: Callable[[], _Message | None], stop: Callable[[], None]) -> Iterator[Messages[_Message]]:
    """Receives messages in a thread within the context: a wait in TensorFlow would delay signal handlers.

    Args:
        receive: waits for the next message; returns None to stop.
        stop: makes `receive` return None, after the messages before.
    """
    messages: Messages[_Message] = queue.SimpleQueue()

    def listen() -> None:
        while (message := receive()) is not None:
            messages.put(message)

    thread = threading.Thread(target=listen, name="messages", daemon=True)
    thread.start()
    try:
        yield messages
    finally:
        stop()
        thread.join()  # otherwise the next run's thread could receive the stop, and this one the next run's messages


@contextmanager
def running(
    functions: Mapping[str, Callable[[], None]],
    messages: Messages[Any],
    *,
    scope: Callable[[], Any],
    end: Callable[[], None] = lambda: None,
    abort: Callable[[Threads], None],
) -> Iterator[None]:
    """Runs functions in threads; they run until they are told to end, see `end`.

    Args:
        functions: by the names of their threads.
        messages: receives the errors that they fail with.
        scope: the strategy's.
        end: called at the end of the context: tells the functions to end.
        abort: called instead if the context is left by an exception: tells workers and functions to end, as far as
            they can be reached.
    """

    def run(function: Callable[[], None]) -> None:
        try:
            with scope():
                function()
        except Exception as error:  # noqa: BLE001 it is raised where the training runs
            messages.put(error)

    threads = {
        name: threading.Thread(target=run, args=(function,), name=name, daemon=True)
        for name, function in functions.items()
    }
    for thread in threads.values():
        thread.start()
    try:
        yield
    except BaseException:
        abort(threads)
        raise
    end()
    for thread in threads.values():
        thread.join()
    raise_failure(messages)


def try_briefly(function: Callable[[], None]) -> None:
    """Calls a function that may fail, or hang, if a ps is lost; otherwise it takes a moment."""

    def attempt() -> None:
        with contextlib.suppress(tf.errors.OpError):
            function()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
