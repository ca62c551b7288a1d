"""All-reduce over direct TCP connections: each task sums one part of the tensor for all tasks.

A tensor of n numbers is split into N parts, one per task. Each task sends every other task that task's part, sums the
parts that it receives, and sends the sum to all: a reduce-scatter and an all-gather. A task sends and receives
2·n·(N − 1)/N numbers, in two messages per other task. All tasks get bitwise equal sums, since each part is summed once.

The connection of a task that exits is closed. A stopped task keeps its connection open: a task that waits for it longer
than `_PROBE_AFTER` probes it regularly, and fails if it does not answer for `PATIENCE` seconds.

Of a large table a step changes only some rows. These are gathered instead: each task sends its rows with their numbers
to all others. How many they are differs from task to task, so each message says it.

TensorFlow's collectives copy the data to protobuf messages and back, several times in each direction, and pass it
between threads. Here it goes from the tensor's memory to the socket and back.
"""

from __future__ import annotations

import select
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TaskLost, TfdistError, TrainingError

PATIENCE = 10.0
"""Seconds without an answer after which a task counts as lost; the same as for TensorFlow's collectives."""
_PROBE_AFTER = 2.0
"""Seconds of waiting for a task after which it is probed."""
_HEADER = struct.Struct("<QQq")
"""The sequence number of an exchange, and the bytes that follow: of an array, and −1; or of each row, and the number of
rows."""
_ARRAY = -1
_ALIGNED = 64
"""TensorFlow uses an array without a copy if its address is a multiple of this."""


class AllReduce:
    """One task's connections to the other tasks of the all-reduce.

    Args:
        index: this task's rank.
        names: the names of all tasks by rank, `("chief:0", "worker:0")`.
        links: a connection to each of the other tasks, by rank.
        answers: probes the task of a rank; returns whether it answers.
    """

    def __init__(
        self, index: int, names: Sequence[str], links: Mapping[int, socket.socket], answers: Callable[[int], bool]
    ) -> None:
        self._broken: TfdistError | None = None
        self._index = index
        self._names = tuple(names)
        self._links = dict(links)
        self._places = {link.fileno(): rank for rank, link in links.items()}
        self._exchanges = 0
        self._memory = _Reused()
        self._answers = answers
        for link in links.values():
            link.setblocking(False)

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all tasks' values. All tasks have to call it in the same order.

        Values are added by rank. Float16 and bfloat16 are rounded once, after the addition.

        Args:
            value: a tensor of static shape and numeric type.

        Returns:
            The sum, of the same shape and type.

        Raises:
            TaskLost: another task exited, or does not answer.
            TrainingError: another task sums another tensor. In a `tf.function`, both are a `tf.errors.UnknownError`,
                which `errors_translated` translates back.
        """
        size = value.shape.num_elements()
        bounds = [size * rank // len(self._names) for rank in range(len(self._names) + 1)]
        own = slice(bounds[self._index], bounds[self._index + 1])

        def reduce_scatter(flat: np.ndarray) -> np.ndarray:
            return self._scatter(flat, bounds)

        def all_gather(part: np.ndarray) -> np.ndarray:
            return self._gather(part, bounds)

        flat = tf.reshape(value, [-1])
        theirs = _as_op(reduce_scatter, flat)
        parts = tf.unstack(tf.reshape(theirs, [len(self._links), own.stop - own.start]))
        parts.insert(self._index, flat[own])
        wide = tf.float32 if len(parts) > 2 and value.dtype in (tf.float16, tf.bfloat16) else value.dtype
        summed = tf.cast(tf.add_n([tf.cast(part, wide) for part in parts]), value.dtype)
        return tf.reshape(_as_op(all_gather, summed), value.shape)

    def gather(self, numbers: tf.Tensor, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all tasks' rows, ordered by rank. All tasks have to call it in the same order.

        Args:
            numbers: the number of each row, int32 or int64, shape (n,). n may differ from task to task.
            rows: the rows, shape (n, width), whose width is static.

        Returns:
            The numbers of all rows, and the rows, each in one tensor.

        Raises:
            TaskLost: another task exited, or does not answer.
            TrainingError: another task gathers other rows, or sums a tensor; in a `tf.function`, see `sum`.
        """
        width = int(rows.shape[1])

        def all_gather(own_numbers: np.ndarray, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            return self._gather_rows(own_numbers, own.reshape(-1, width))

        if tf.executing_eagerly():
            found, gathered = all_gather(numbers.numpy(), rows.numpy())
            return tf.constant(found), tf.constant(gathered)
        found, gathered = tf.numpy_function(all_gather, [numbers, rows], [numbers.dtype, rows.dtype])
        return tf.ensure_shape(found, [None]), tf.ensure_shape(gathered, [None, width])

    @contextmanager
    def errors_translated(self) -> Iterator[None]:
        """Within the context, a `tf.function` that fails in a sum raises the sum's own error.

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
        """Closes the connections."""
        for link in self._links.values():
            link.close()

    def _scatter(self, flat: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Sends each other task its part; returns their values of this task's part, concatenated by rank."""
        size = bounds[self._index + 1] - bounds[self._index]
        received = self._memory.empty(size * len(self._links), flat.dtype)
        ranks = sorted(self._links)
        self._exchange_arrays(
            {rank: flat[bounds[rank] : bounds[rank + 1]] for rank in ranks},
            {rank: received[number * size : (number + 1) * size] for number, rank in enumerate(ranks)},
        )
        return received

    def _gather(self, part: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Sends the sum of this task's part to the other tasks; returns the sums of all parts."""
        received = self._memory.empty(bounds[-1], part.dtype)
        received[bounds[self._index] : bounds[self._index + 1]] = part
        self._exchange_arrays(
            dict.fromkeys(self._links, part),
            {rank: received[bounds[rank] : bounds[rank + 1]] for rank in self._links},
        )
        return received

    def _gather_rows(self, numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sends this task's rows to the other tasks; returns the rows of all."""
        count, each = len(numbers), numbers.itemsize + rows.shape[1] * rows.itemsize
        sent = [memoryview(_HEADER.pack(self._exchanges, each, count)), *_bytes(numbers), *_bytes(rows)]
        incoming = {rank: _IncomingRows(self._exchanges, each) for rank in self._links}
        self._exchange({rank: list(sent) for rank in self._links}, incoming)
        parts = {rank: message.split(numbers.dtype, rows.dtype, rows.shape[1]) for rank, message in incoming.items()}
        parts[self._index] = numbers, rows
        ordered = [parts[rank] for rank in sorted(parts)]
        total = sum(len(found) for found, _ in ordered)
        found, gathered = _empty(total, numbers.dtype), _empty(total * rows.shape[1], rows.dtype)
        np.concatenate([found for found, _ in ordered], out=found)
        gathered = gathered.reshape(total, rows.shape[1])
        np.concatenate([own for _, own in ordered], out=gathered)
        return found, gathered

    def _exchange_arrays(self, outgoing: Mapping[int, np.ndarray], incoming: Mapping[int, np.ndarray]) -> None:
        """Exchanges arrays of sizes that are the same in each step."""
        self._exchange(
            {rank: _outgoing(self._exchanges, array) for rank, array in outgoing.items()},
            {rank: _Incoming(self._exchanges, array) for rank, array in incoming.items()},
        )

    def _exchange(
        self, outgoing: Mapping[int, list[memoryview]], incoming: Mapping[int, _Incoming | _IncomingRows]
    ) -> None:
        """Sends and receives at the same time: two tasks that only sent would deadlock."""
        if self._broken:
            raise self._broken
        self._exchanges += 1
        try:
            self._transfer(dict(outgoing), dict(incoming))
        except TfdistError as error:
            self._broken = error
            raise

    def _transfer(self, sending: dict[int, list[memoryview]], receiving: dict[int, _Incoming | _IncomingRows]) -> None:
        ready, unanswered = list(self._links), dict[int, float]()
        while True:
            for rank in ready:
                if rank in sending and self._send(rank, sending[rank]):
                    del sending[rank]
                if rank in receiving and self._receive(rank, receiving[rank]):
                    del receiving[rank]
            if not sending and not receiving:
                return
            waiting = select.poll()
            for rank in sending.keys() | receiving.keys():
                events = (select.POLLOUT if rank in sending else 0) | (select.POLLIN if rank in receiving else 0)
                waiting.register(self._links[rank], events)
            ready = [self._places[number] for number, _ in waiting.poll(_PROBE_AFTER * 1000)]
            if ready:
                unanswered.clear()
            else:
                self._probe(sending.keys() | receiving.keys(), unanswered)

    def _probe(self, ranks: Iterable[int], unanswered: dict[int, float]) -> None:
        """Probes the tasks that this one waits for, up to the first that does not answer.

        Args:
            ranks: the tasks' ranks.
            unanswered: the time of each task's first unanswered probe, by the monotonic clock. It is updated.

        Raises:
            TaskLost: a task has not answered for `PATIENCE` seconds.
        """
        now = time.monotonic()
        for rank in sorted(ranks, key=lambda rank: (unanswered.get(rank, now), rank)):
            if self._answers(rank):
                unanswered.pop(rank, None)
                continue
            since = unanswered.setdefault(rank, now)
            if now - since >= PATIENCE:
                raise self._lost(rank, f"no answer for {now - since:.0f} s")
            return

    def _send(self, rank: int, buffers: list[memoryview]) -> bool:
        """Sends what the socket accepts now; returns whether the message is complete."""
        try:
            _advance(buffers, self._links[rank].sendmsg(buffers))
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(rank, _reason(error)) from error
        return not buffers

    def _receive(self, rank: int, message: _Incoming | _IncomingRows) -> bool:
        """Receives the available bytes; returns whether the message is complete."""
        try:
            count = self._links[rank].recvmsg_into(message.buffers)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(rank, _reason(error)) from error
        if not count:
            raise self._lost(rank, "it closed the connection")
        message.advance(count, self._names[rank])
        return not message.buffers

    def _lost(self, rank: int, reason: str) -> TaskLost:
        name = self._names[rank]
        return TaskLost(
            f"{name} failed or is unreachable: {reason}",
            code="task-lost",
            hint=f"see the output of {name} for the reason",
        )


class _Incoming:
    """A message that is being received: an array of a known size.

    Args:
        exchange: the sequence number that the message has to have.
        array: the array that it is written to.

    Attributes:
        buffers: the memory that is still to be filled.
    """

    def __init__(self, exchange: int, array: np.ndarray) -> None:
        self._exchange, self._size = exchange, array.nbytes
        self._header = bytearray(_HEADER.size)
        self._checked = False
        self.buffers = [memoryview(self._header), *_bytes(array)]

    def advance(self, count: int, name: str) -> None:
        """Counts received bytes, and checks the header once it is complete.

        Raises:
            TrainingError: the header is that of another message.
        """
        complete = not self._checked and count >= len(self.buffers[0])
        _advance(self.buffers, count)
        if complete:
            self._checked = True
            exchange, size, count = _HEADER.unpack(self._header)
            self._check(exchange, size, count, name)

    def _check(self, exchange: int, size: int, count: int, name: str) -> None:
        if (exchange, size, count) != (self._exchange, self._size, _ARRAY):
            sent = _described(size, count)
            raise _differs(f"{name} sends {sent} in sum {exchange}", f"{self._size} bytes in sum {self._exchange}")


class _IncomingRows(_Incoming):
    """A message that is being received: any number of rows.

    Args:
        exchange: the sequence number that the message has to have.
        row_bytes: the size of a row and its number.
    """

    def __init__(self, exchange: int, row_bytes: int) -> None:
        super().__init__(exchange, _empty(0, np.dtype(np.uint8)))
        self._row_bytes = row_bytes
        self._received = _empty(0, np.dtype(np.uint8))

    def _check(self, exchange: int, size: int, count: int, name: str) -> None:
        if (exchange, size) != (self._exchange, self._row_bytes) or count == _ARRAY:
            sent = _described(size, count)
            raise _differs(
                f"{name} sends {sent} in sum {exchange}", f"rows of {self._row_bytes} bytes in sum {self._exchange}"
            )
        self._received = _empty(count * size, np.dtype(np.uint8))
        self.buffers += _bytes(self._received)

    def split(self, numbers: np.dtype, values: np.dtype, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the rows, shape (n,), and the rows, shape (n, width)."""
        count = len(self._received) // self._row_bytes
        end = count * numbers.itemsize
        return self._received[:end].view(numbers), self._received[end:].view(values).reshape(count, width)


def _described(size: int, count: int) -> str:
    return f"{size} bytes" if count == _ARRAY else f"{count} rows of {size} bytes"


def _differs(sent: str, expected: str) -> TrainingError:
    return TrainingError(
        f"{sent}, and this task expects {expected}",
        code="sums-differ",
        hint="run the same program on every task, with the same model and batches of the same shapes",
    )


def _as_op(function: Callable[[np.ndarray], np.ndarray], value: tf.Tensor) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(function(value.numpy()))
    return tf.numpy_function(function, [value], value.dtype)  # stateful, so TensorFlow keeps the program's order


def _outgoing(exchange: int, array: np.ndarray) -> list[memoryview]:
    return [memoryview(_HEADER.pack(exchange, array.nbytes, _ARRAY)), *_bytes(array)]


def _bytes(array: np.ndarray) -> list[memoryview]:
    return [array.reshape(-1).view(np.uint8).data] if array.size else []


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _advance(buffers: list[memoryview], count: int) -> None:
    """Removes the first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]


class _Reused:
    """Memory for arrays of the same sizes in each step, used again once nothing refers to an array of it.

    The kernel clears new memory: for a transformer of 5.7M weights, that was a fifth of a step's processor time.
    """

    def __init__(self) -> None:
        self._owners: dict[int, list[np.ndarray]] = {}

    def empty(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Returns an array of a number of values that TensorFlow uses without a copy. Its content is arbitrary."""
        owners = self._owners.setdefault(size * dtype.itemsize, [])
        for number in range(len(owners)):
            # A view of an owner, and a tensor that uses its memory, refer to it. The list and the argument remain.
            if sys.getrefcount(owners[number]) == _UNUSED:
                return _aligned(owners[number], size, dtype)
        owners.append(_owner(size, dtype))
        return _aligned(owners[-1], size, dtype)


def _empty(size: int, dtype: np.dtype) -> np.ndarray:
    """Returns an array that TensorFlow uses without a copy."""
    return _aligned(_owner(size, dtype), size, dtype)


def _owner(size: int, dtype: np.dtype) -> np.ndarray:
    return np.empty(size * dtype.itemsize + _ALIGNED, np.uint8)


def _aligned(owner: np.ndarray, size: int, dtype: np.dtype) -> np.ndarray:
    start = -owner.ctypes.data % _ALIGNED
    return owner[start : start + size * dtype.itemsize].view(dtype)


def _references(owners: list[np.ndarray]) -> int:
    return sys.getrefcount(owners[0])


_UNUSED = _references([np.empty(0)])
"""The references to an array that is in a list and nowhere else, as this interpreter counts them."""
