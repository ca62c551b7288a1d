"""The sums and gathered rows of one task, see the package."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TaskLost, TfdistError
from tfdist_cli.train.cluster.all_reduce.memory import Reused, empty
from tfdist_cli.train.cluster.all_reduce.messages import Incoming, IncomingRows, Outgoing, advance
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES, OthersMemory, OwnMemory, Place

PATIENCE = 10.0
"""Seconds without an answer after which a task counts as lost; the same as for TensorFlow's collectives."""
_PROBE_AFTER = 2.0
"""Seconds of waiting for a task after which it is probed."""
_SHARED_BYTES = 1 << 16
"""The size of a message from which on it is in shared memory."""


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
        self._memory = Reused()
        self._answers = answers
        self._own_memory: OwnMemory | None = None
        self._shared: dict[int, OthersMemory] = {}
        """The memory of the tasks on this host, by rank."""
        for link in links.values():
            link.setblocking(False)

    def share_memory(self) -> None:
        """Finds the tasks on the same host. Large messages between them cross in memory. All tasks have to call it.

        Raises:
            TaskLost: another task exited, or does not answer.
        """
        own = OwnMemory.if_supported()
        identity = np.frombuffer(own.identity if own else bytes(IDENTITY_BYTES), np.uint8)
        theirs = {rank: np.empty(IDENTITY_BYTES, np.uint8) for rank in self._links}
        self._swap(dict.fromkeys(self._links, Outgoing([identity])), theirs)
        opened = {rank: OthersMemory.opened(each.tobytes()) for rank, each in theirs.items()}
        answers = {rank: Outgoing([np.array([memory is not None])]) for rank, memory in opened.items()}
        can_read = {rank: np.empty(1, np.bool_) for rank in self._links}
        self._swap(answers, can_read)
        shared = {rank: memory for rank, memory in opened.items() if memory is not None and can_read[rank][0]}
        if own and shared:
            self._own_memory, self._shared = own, shared
        elif own:
            own.close()

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

        def reduce_scatter(flat: np.ndarray) -> list[np.ndarray]:
            return self._scatter(flat, bounds)

        def all_gather(part: np.ndarray) -> list[np.ndarray]:
            return [self._gather(part, bounds)]

        flat = tf.reshape(value, [-1])
        parts = _as_op(reduce_scatter, flat, [own.stop - own.start] * len(self._links))
        parts.insert(self._index, flat[own])
        wide = tf.float32 if len(parts) > 2 and value.dtype in (tf.float16, tf.bfloat16) else value.dtype
        summed = tf.cast(tf.add_n([tf.cast(part, wide) for part in parts]), value.dtype)
        return tf.reshape(_as_op(all_gather, summed, [size])[0], value.shape)

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
        if self._own_memory:
            self._own_memory.close()

    def _scatter(self, flat: np.ndarray, bounds: Sequence[int]) -> list[np.ndarray]:
        """Sends each other task its part; returns their values of this task's part, by rank.

        They may be in the memory of those tasks, where they stay until the next exchange but one.
        """
        size = bounds[self._index + 1] - bounds[self._index]
        arriving = {
            rank: Incoming(self._exchanges, size * flat.itemsize, partial(self._memory.empty, size, flat.dtype))
            for rank in sorted(self._links)
        }
        self._exchange({rank: Outgoing([flat[bounds[rank] : bounds[rank + 1]]]) for rank in self._links}, arriving)
        return [message.array.view(flat.dtype) for message in arriving.values()]

    def _gather(self, part: np.ndarray, bounds: Sequence[int]) -> np.ndarray:
        """Sends the sum of this task's part to the other tasks; returns the sums of all parts."""
        received = self._memory.empty(bounds[-1], part.dtype)
        received[bounds[self._index] : bounds[self._index + 1]] = part
        places = {rank: received[bounds[rank] : bounds[rank + 1]] for rank in self._links}
        self._swap(dict.fromkeys(self._links, Outgoing([part])), places)
        return received

    def _gather_rows(self, numbers: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sends this task's rows to the other tasks; returns the rows of all."""
        each = numbers.itemsize + rows.shape[1] * rows.itemsize
        incoming = {rank: IncomingRows(self._exchanges, each) for rank in self._links}
        own = Outgoing([numbers, rows], each, len(numbers))
        self._exchange(dict.fromkeys(self._links, own), incoming)
        parts = {rank: message.split(numbers.dtype, rows.dtype, rows.shape[1]) for rank, message in incoming.items()}
        parts[self._index] = numbers, rows
        ordered = [parts[rank] for rank in sorted(parts)]
        total = sum(len(found) for found, _ in ordered)
        found, gathered = empty(total, numbers.dtype), empty(total * rows.shape[1], rows.dtype)
        np.concatenate([found for found, _ in ordered], out=found)
        gathered = gathered.reshape(total, rows.shape[1])
        np.concatenate([own for _, own in ordered], out=gathered)
        return found, gathered

    def _swap(self, own: Mapping[int, Outgoing], places: Mapping[int, np.ndarray]) -> None:
        """Sends arrays to the other tasks, and receives theirs.

        Args:
            own: what is sent to each rank.
            places: the memory for what each rank sends.
        """
        arriving = {
            rank: Incoming(self._exchanges, place.nbytes, partial(np.asarray, place)) for rank, place in places.items()
        }
        self._exchange(own, arriving)
        for rank, message in arriving.items():
            if message.is_shared:
                places[rank][:] = message.array.view(places[rank].dtype)

    def _exchange(self, outgoing: Mapping[int, Outgoing], incoming: Mapping[int, Incoming]) -> None:
        """Sends and receives at the same time: two tasks that only sent would deadlock."""
        if self._broken:
            raise self._broken
        places = self._written(outgoing)
        sending = {rank: message.buffers(self._exchanges, places.get(rank)) for rank, message in outgoing.items()}
        for rank, arriving in incoming.items():
            arriving.memory = self._shared.get(rank)
        self._exchanges += 1
        try:
            self._transfer(sending, dict(incoming))
        except TfdistError as error:
            self._broken = error
            raise

    def _written(self, outgoing: Mapping[int, Outgoing]) -> dict[int, Place]:
        """Writes large messages to tasks on this host into shared memory, each once; returns their places by rank."""
        large = {
            rank: message
            for rank, message in outgoing.items()
            if rank in self._shared and message.size >= _SHARED_BYTES
        }
        if not (self._own_memory and large):
            return {}
        messages = list(dict.fromkeys(large.values()))  # one that goes to several tasks is the same object
        try:
            written = self._own_memory.write(self._exchanges, [message.arrays for message in messages])
        except OSError:
            return {}  # there is no memory or no descriptor for a larger region: they follow in messages
        places = dict(zip(messages, written, strict=True))
        return {rank: places[message] for rank, message in large.items()}

    def _transfer(self, sending: dict[int, list[memoryview]], receiving: dict[int, Incoming]) -> None:
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
            advance(buffers, self._links[rank].sendmsg(buffers))
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(rank, _reason(error)) from error
        return not buffers

    def _receive(self, rank: int, message: Incoming) -> bool:
        """Receives the available bytes; returns whether the message is complete."""
        try:
            count = self._links[rank].recvmsg_into(message.buffers)[0]
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(rank, _reason(error)) from error
        if not count:
            raise self._lost(rank, "it closed the connection")
        try:
            message.advance(count, self._names[rank])
        except OSError as error:  # its memory is not there any more
            raise self._lost(rank, _reason(error)) from error
        except ValueError as error:
            raise self._lost(rank, str(error)) from error
        return not message.buffers

    def _lost(self, rank: int, reason: str) -> TaskLost:
        name = self._names[rank]
        return TaskLost(
            f"{name} failed or is unreachable: {reason}",
            code="task-lost",
            hint=f"see the output of {name} for the reason",
        )


def _as_op(
    function: Callable[[np.ndarray], list[np.ndarray]], value: tf.Tensor, sizes: Sequence[int]
) -> list[tf.Tensor]:
    """Returns what a function returns for a tensor.

    Args:
        function: a flat array → flat arrays of the same type.
        value: the tensor.
        sizes: those of the results.
    """
    if tf.executing_eagerly():
        return [tf.constant(array) for array in function(value.numpy())]
    # Stateful, so TensorFlow keeps the program's order.
    results = tf.numpy_function(function, [value], [value.dtype] * len(sizes))
    for result, size in zip(results, sizes, strict=True):
        result.set_shape([size])
    return list(results)


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
