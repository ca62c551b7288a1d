"""The sums and gathered rows of one task, see the package."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, count

import numpy as np
import tensorflow as tf

from tfdist_cli.errors import TaskLost, TfdistError
from tfdist_cli.train.cluster.all_reduce.memory import Reused, empty
from tfdist_cli.train.cluster.all_reduce.messages import Incoming, IncomingRows, Outgoing, advance, differs
from tfdist_cli.train.cluster.all_reduce.packing import packed, unpacked
from tfdist_cli.train.cluster.shared_memory.memory import IDENTITY_BYTES, OthersMemory, OwnMemory, Place, aligned
from tfdist_cli.train.tf_compat.data import call_registered, forget_python, register_python

PATIENCE = 10.0
"""Seconds without an answer after which a task counts as lost; the same as for TensorFlow's collectives."""
_PROBE_AFTER = 2.0
"""Seconds of waiting for a task after which it is probed."""
_SHARED_BYTES = 1 << 16
"""The size of a message from which on it is in shared memory."""
_MOST_BUFFERS = os.sysconf("SC_IOV_MAX")
"""How many buffers the system sends in one call. A message has one for each array."""
_NARROW = (tf.float16, tf.bfloat16)
_numbers = count()


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
        self._functions = {
            f"all-reduce {next(_numbers)}: {function.__name__}": function
            for function in (self._add, self._others, self._scatter, self._gather, self._gather_rows)
        }
        for name, function in self._functions.items():
            register_python(name, function)
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

    @property
    def shares_memory(self) -> bool:
        """Whether this task and each other one can open each other's memory."""
        return self._own_memory is not None and self._shared.keys() == self._links.keys()

    def look(self, unanswered: dict[int, float], waits: Callable[[], bool]) -> None:
        """Looks at the other tasks, while this one waits for them by other means.

        Args:
            unanswered: at first empty; it remembers who has not answered.
            waits: whether this task waits still. A task that it has waited for may begin a sum.

        Raises:
            TaskLost: another task exited, or does not answer for long.
            TrainingError: another task does something else: it has begun a sum.
        """
        try:
            for rank, link in self._links.items():
                self._look_at(rank, link, waits)
            self._probe(self._links, unanswered)
        except TfdistError as error:
            self._broken = error
            raise

    def _look_at(self, rank: int, link: socket.socket, waits: Callable[[], bool]) -> None:
        try:
            begun = link.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._lost(rank, _reason(error)) from error
        if not begun:
            raise self._lost(rank, "it closed the connection")
        if waits():
            raise differs(f"{self._names[rank]} has begun a sum", "gradients")

    def sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all tasks' values, see `sums`."""
        return self.sums([value])[0]

    def sums(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of all tasks' values, which cross together. All tasks have to call it in the same order.

        Values are added by rank. Float16 and bfloat16 are rounded once, after the addition.

        Args:
            values: tensors of static shapes and of the same numeric type.

        Returns:
            The sums, of the same shapes and type.

        Raises:
            TaskLost: another task exited, or does not answer.
            TrainingError: another task sums other tensors. In a `tf.function`, both are a `tf.errors.UnknownError`,
                which `errors_translated` translates back.
        """
        if len(self._names) == 2:
            # NumPy takes 40 times as long to add values of 16 bits.
            narrow = values[0].dtype in _NARROW
            found = self._call(self._others if narrow else self._add, values, [value.dtype for value in values])
            found = [tf.ensure_shape(each, value.shape) for each, value in zip(found, values, strict=True)]
            return [value + each for value, each in zip(values, found, strict=True)] if narrow else found
        return unpacked(self._summed_in_parts(packed(values)), values)

    def _summed_in_parts(self, flat: tf.Tensor) -> tf.Tensor:
        """Returns the sum of all tasks' values, shape (n,): each task sums a part of them."""
        size = flat.shape.num_elements()
        bounds = self._bounds(size)
        own = slice(bounds[self._index], bounds[self._index + 1])
        parts = self._call(self._scatter, [flat], [flat.dtype] * len(self._links))
        for part in parts:
            part.set_shape([own.stop - own.start])
        parts.insert(self._index, flat[own])
        wide = tf.float32 if len(parts) > 2 and flat.dtype in _NARROW else flat.dtype
        summed = tf.cast(tf.add_n([tf.cast(part, wide) for part in parts]), flat.dtype)
        (gathered,) = self._call(self._gather, [summed, tf.constant(size, tf.int64)], [flat.dtype])
        return tf.ensure_shape(gathered, [size])

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
        found, gathered = self._call(self._gather_rows, [numbers, rows], [numbers.dtype, rows.dtype])
        return tf.ensure_shape(found, [None]), tf.ensure_shape(gathered, [None, rows.shape[1]])

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
        for name in self._functions:
            forget_python(name)
        self._functions.clear()

    def _call(
        self, function: Callable[..., Sequence[np.ndarray]], values: Sequence[tf.Tensor], dtypes: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        """Returns what one of this object's functions of arrays returns for tensors."""
        if tf.executing_eagerly():
            return [tf.constant(array) for array in function(*(value.numpy() for value in values))]
        (name,) = (name for name, known in self._functions.items() if known == function)
        return call_registered(name, values, dtypes)  # stateful, so TensorFlow keeps the program's order

    def _bounds(self, size: int) -> list[int]:
        """Returns where the parts of so many numbers begin that each task sums, and the end."""
        return [size * rank // len(self._names) for rank in range(len(self._names) + 1)]

    def _add(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Exchanges arrays with the only other task, and returns the sums.

        To add all numbers takes no longer than to add half of them and to wait for the other half.
        """
        return self._of_both(arrays, np.add)

    def _others(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """Exchanges arrays with the only other task, and returns its arrays."""
        return self._of_both(arrays, lambda _, theirs, out: np.copyto(out, theirs))

    def _of_both(self, arrays: Sequence[np.ndarray], function: Callable[..., object]) -> list[np.ndarray]:
        """Returns arrays of the same shapes, which a function has written.

        Args:
            arrays: this task's.
            function: takes this task's array, that of the other task, and the array that it writes, all of shape (n,).
        """
        dtype, (other,) = arrays[0].dtype, self._links
        size = sum(array.size for array in arrays)
        message = Incoming(self._exchanges, size * dtype.itemsize, partial(self._memory.empty, size, dtype))
        self._exchange({other: Outgoing(arrays)}, {other: message})
        theirs = message.array.view(dtype)
        starts = [0, *accumulate(aligned(array.nbytes) // dtype.itemsize for array in arrays)]
        memory, read, results = self._memory.empty(starts[-1], dtype), 0, []
        for start, array in zip(starts[:-1], arrays, strict=True):
            result = memory[start : start + array.size]
            function(array.reshape(-1), theirs[read : read + array.size], result)
            read += array.size
            results.append(result.reshape(array.shape))
        return results

    def _scatter(self, flat: np.ndarray) -> list[np.ndarray]:
        """Sends each other task its part; returns their values of this task's part, by rank.

        They may be in the memory of those tasks, where they stay until the next exchange but one.
        """
        bounds = self._bounds(flat.size)
        size = bounds[self._index + 1] - bounds[self._index]
        arriving = {
            rank: Incoming(self._exchanges, size * flat.itemsize, partial(self._memory.empty, size, flat.dtype))
            for rank in sorted(self._links)
        }
        self._exchange({rank: Outgoing([flat[bounds[rank] : bounds[rank + 1]]]) for rank in self._links}, arriving)
        return [message.array.view(flat.dtype) for message in arriving.values()]

    def _gather(self, part: np.ndarray, size: np.ndarray) -> list[np.ndarray]:
        """Sends the sum of this task's part to the other tasks; returns the sums of all parts, so many numbers."""
        bounds = self._bounds(int(size))
        received = self._memory.empty(bounds[-1], part.dtype)
        received[bounds[self._index] : bounds[self._index + 1]] = part
        places = {rank: received[bounds[rank] : bounds[rank + 1]] for rank in self._links}
        self._swap(dict.fromkeys(self._links, Outgoing([part])), places)
        return [received]

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
            advance(buffers, self._links[rank].sendmsg(buffers[:_MOST_BUFFERS]))
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


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()
