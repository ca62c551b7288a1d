"""Sums over tasks by connections of their own: each task adds up one part of a tensor for all of them.

A tensor of n numbers is cut into as many parts as there are tasks. Each task sends every other one that one's part of
its own tensor, adds up what it is sent, and sends the sum to all: 2·n·(N − 1)/N numbers each way, in two messages to
each other task, whatever their number N. All have the same sums, to the bit, since each part is added up once.

A task that has ended is noticed by its connection. One that is stopped keeps it: whoever waits for it longer than a
moment asks for an answer now and then, and gives it up when none comes.

TensorFlow's own collectives copy what crosses into a message of protobuf and out of it, several times each way, and
hand it from thread to thread; here it goes from a tensor's memory into the socket and back.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TaskLost, TfdistError, TrainingError

PATIENCE = 10.0
"""Seconds without an answer after which a task that is waited for is given up, as TensorFlow's own collectives do."""
_MOMENT = 2.0
"""Seconds of waiting after which it is asked for one."""
_HEADER = struct.Struct("<QQ")
"""The number of an exchange, and the bytes that follow."""
_ALIGNED = 64
"""TensorFlow takes an array as it is, and copies no byte of it, if it begins at a multiple of so many."""


class AllReduce:
    """The connections of one of the tasks that sum up together.

    Args:
        index: this task's place among them.
        names: all tasks, `("chief:0", "worker:0")`.
        links: a connection to each of the others, by its place.
        answers: whether the task of a place answers within a moment.
    """

    def __init__(
        self, index: int, names: Sequence[str], links: Mapping[int, socket.socket], answers: Callable[[int], bool]
    ) -> None:
        self._broken: TfdistError | None = None
        self._index = index
        self._names = tuple(names)
        self._links = dict(links)
        self._places = {link.fileno(): place for place, link in links.items()}
        self._exchanges = 0
        self._answers = answers
        for link in links.values():
            link.setblocking(False)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """The sum of what all tasks give, in a function that all of them run.

        It is added up in the tasks' order; narrow types are rounded once, after that.

        Args:
            value: of any shape, which is known, and of any type that has a sum.

        Returns:
            The sum, of the same shape and type.

        Raises:
            TaskLost: another task has ended, or does not answer.
            TrainingError: another task sums up something else. In a function both are a `tf.errors.UnknownError`,
                which `told` makes what it was.
        """
        size = value.shape.num_elements()
        bounds = [size * place // len(self._names) for place in range(len(self._names) + 1)]
        own = slice(bounds[self._index], bounds[self._index + 1])

        def collect(flat: np.ndarray) -> np.ndarray:
            return self._collected(flat, bounds)

        def spread(part: np.ndarray) -> np.ndarray:
            return self._spread(part, bounds)

        flat = tf.reshape(value, [-1])
        theirs = _carried_out(collect, flat)
        parts = tf.unstack(tf.reshape(theirs, [len(self._links), own.stop - own.start]))
        parts.insert(self._index, flat[own])
        wide = tf.float32 if len(parts) > 2 and value.dtype in (tf.float16, tf.bfloat16) else value.dtype
        summed = tf.cast(tf.add_n([tf.cast(part, wide) for part in parts]), value.dtype)
        return tf.reshape(_carried_out(spread, summed), value.shape)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Around a function with sums: an operation that failed because of this raises what it was.

        Raises:
            TaskLost, TrainingError: as `sum` does.
        """
        try:
            yield
        except tf.errors.UnknownError:
            if self._broken is None:
                raise
            raise self._broken from None

    def close(self) -> None:
        """Ends the connections."""
        for link in self._links.values():
            link.close()

    def _collected(self, flat: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Sends each of the others its part; returns what they send of this task's own, one after the other."""
        size = bounds[self._index + 1] - bounds[self._index]
        received = _empty(size * len(self._links), flat.dtype)
        places = sorted(self._links)
        self._exchange(
            {place: flat[bounds[place] : bounds[place + 1]] for place in places},
            {place: received[number * size : (number + 1) * size] for number, place in enumerate(places)},
        )
        return received

    def _spread(self, part: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Sends the others the sum of this task's part; returns all parts' sums."""
        received = _empty(bounds[-1], part.dtype)
        received[bounds[self._index] : bounds[self._index + 1]] = part
        self._exchange(
            dict.fromkeys(self._links, part),
            {place: received[bounds[place] : bounds[place + 1]] for place in self._links},
        )
        return received

    def _exchange(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, np.ndarray]) -> None:
        """Sends and receives at the same time: two tasks that both only sent would wait for each other."""
        if self._broken:
            raise self._broken
        try:
            sending = {place: _outgoing(self._exchanges, array) for place, array in outgoing.items()}
            receiving = {place: _Incoming(self._exchanges, array) for place, array in incoming.items()}
            self._exchanges += 1
            self._pass(sending, receiving)
        except TfdistError as error:
            self._broken = error
            raise

    def _pass(self, sending: dict[int, list[memoryview]], receiving: dict[int, _Incoming]) -> None:
        ready, unanswered = list(self._links), dict[int, float]()
        while True:
            for place in ready:
                if place in sending and self._send(place, sending[place]):
                    del sending[place]
                if place in receiving and self._receive(place, receiving[place]):
                    del receiving[place]
            if not sending and not receiving:
                return
            waiting = select.poll()
            for place in sending.keys() | receiving.keys():
                events = (select.POLLOUT if place in sending else 0) | (select.POLLIN if place in receiving else 0)
                waiting.register(self._links[place], events)
            ready = [self._places[number] for number, _ in waiting.poll(_MOMENT * 1000)]
            if ready:
                unanswered.clear()
            else:
                self._ask(sending.keys() | receiving.keys(), unanswered)

    def _ask(self, places: Iterable[int], unanswered: dict[int, float]) -> None:
        """Asks those that are waited for whether they are there, up to the first that does not answer.

        Args:
            places: theirs.
            unanswered: since when each has not answered, by the machine's monotonic clock.

        Raises:
            TaskLost: one has not answered for too long.
        """
        now = time.monotonic()
        for place in sorted(places, key=lambda place: (unanswered.get(place, now), place)):
            if self._answers(place):
                unanswered.pop(place, None)
                continue
            since = unanswered.setdefault(place, now)
            if now - since >= PATIENCE:
                raise self._lost(place, f"no answer for {now - since:.0f} s")
            return

    def _send(self, place: int, buffers: list[memoryview]) -> bool:
        """Sends what the connection takes now; whether that was all."""
        try:
            _advance(buffers, self._links[place].sendmsg(buffers))
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(place, _reason(error)) from error
        return not buffers

    def _receive(self, place: int, message: _Incoming) -> bool:
        """Receives what has come; whether that was all."""
        try:
            count = self._links[place].recvmsg_into(message.buffers)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(place, _reason(error)) from error
        if not count:
            raise self._lost(place, "it has closed the connection")
        message.took(count, self._names[place])
        return not message.buffers

    def _lost(self, place: int, reason: str) -> TaskLost:
        name = self._names[place]
        return TaskLost(
            f"{name} has ended, or is out of reach: {reason}",
            code="task-lost",
            hint=f"{name}'s own output says why, if it has ended",
        )


class _Incoming:
    """A message that is being received.

    Args:
        exchange: the number of the exchange that it is to be of.
        array: where it goes.

    Attributes:
        buffers: what is still to be filled.
    """

    def __init__(self, exchange: int, array: np.ndarray) -> None:
        self._expected = _HEADER.pack(exchange, array.nbytes)
        self._header = bytearray(_HEADER.size)
        self._checked = False
        self.buffers = [memoryview(self._header), *_bytes(array)]

    def took(self, count: int, name: str) -> None:
        """Counts bytes that have come.

        Raises:
            TrainingError: they are of another message.
        """
        begun = not self._checked and count >= len(self.buffers[0])
        _advance(self.buffers, count)
        if not begun:
            return
        self._checked = True
        if self._header != self._expected:
            (number, size), (awaited, room) = _HEADER.unpack(self._header), _HEADER.unpack(self._expected)
            raise TrainingError(
                f"{name} sums up {size} bytes as number {number}, and this task {room} as number {awaited}",
                hint="run the same program on every task, with the same model and batches of the same shapes",
            )


def _carried_out(function: Callable[[np.ndarray], np.ndarray], value: tf.Tensor) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(function(value.numpy()))
    return tf.numpy_function(function, [value], value.dtype)  # in the program's order: it is stateful


def _outgoing(exchange: int, array: np.ndarray) -> list[memoryview]:
    return [memoryview(_HEADER.pack(exchange, array.nbytes)), *_bytes(array)]


def _bytes(array: np.ndarray) -> list[memoryview]:
    return [array.view(np.uint8).data] if array.size else []


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _advance(buffers: list[memoryview], count: int) -> None:
    """Leaves out the first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


def _empty(size: int, dtype: np.dtype) -> np.ndarray:
    """An array that TensorFlow takes as it is."""
    raw = np.empty(size * dtype.itemsize + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size * dtype.itemsize].view(dtype)
