"""The messages between the tasks of an all-reduce: arrays, and rows whose number differs from task to task."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.cluster.all_reduce.memory import empty
from tfdist_cli.train.cluster.shared_memory.memory import OthersMemory, Place

_HEADER = struct.Struct("<QQqqQ")
"""The sequence number of an exchange; the bytes of an array, and −1; or of each row, and the number of rows; and their
place in shared memory, or −1 and 0 if they follow."""
_ARRAY = -1
_FOLLOWS = Place(-1, 0)


class Outgoing:
    """A message to other tasks.

    Args:
        arrays: what is sent, one after another.
        row_bytes: the bytes of a row.
        count: the number of rows. By default, it is an array whose size the others know.

    Attributes:
        arrays: the same as bytes.
        size: their number.
    """

    def __init__(self, arrays: Sequence[np.ndarray], row_bytes: int = 0, count: int = _ARRAY) -> None:
        self.arrays = [array.reshape(-1).view(np.uint8) for array in arrays]
        self.size = sum(array.nbytes for array in self.arrays)
        self._described = (self.size, _ARRAY) if count == _ARRAY else (row_bytes, count)

    def buffers(self, exchange: int, place: Place | None) -> list[memoryview]:
        """Returns what crosses the connection.

        Args:
            exchange: the sequence number.
            place: where it is in shared memory; None if it is not.
        """
        where = place or _FOLLOWS
        head = _HEADER.pack(exchange, *self._described, where.descriptor, where.offset)
        return [memoryview(head), *(array.data for array in self.arrays if array.size and not place)]


class Incoming:
    """A message that is being received: an array of a known size.

    Args:
        exchange: the sequence number that the message has to have.
        size: its bytes.
        allocate: returns memory for a message that is not in shared memory.

    Attributes:
        buffers: the memory that is still to be filled.
        memory: the sender's, if it is on this host.
        array: the message, when its head has arrived.
        is_shared: whether it is in the sender's memory.
    """

    memory: OthersMemory | None = None
    array: np.ndarray
    is_shared = False

    def __init__(self, exchange: int, size: int, allocate: Callable[[], np.ndarray]) -> None:
        self._exchange, self._size, self._allocate = exchange, size, allocate
        self._head = bytearray(_HEADER.size)
        self._has_head = False
        self.buffers = [memoryview(self._head)]

    def advance(self, count: int, name: str) -> None:
        """Counts received bytes. Once the head is complete, checks it, and finds the memory of the rest.

        Raises:
            OSError: the sender's memory is not there any more.
            TrainingError: the head is that of another message.
        """
        complete = not self._has_head and count >= len(self.buffers[0])
        advance(self.buffers, count)
        if complete:
            self._has_head = True
            exchange, size, count, *place = _HEADER.unpack(self._head)
            self._begin(self._bytes(exchange, size, count, name), Place(*place), name)

    def _begin(self, size: int, place: Place, name: str) -> None:
        if place == _FOLLOWS:
            self.array = self._allocate()
            self.buffers += _bytes_of(self.array)
        elif self.memory is None:
            raise differs(f"{name} sends bytes in shared memory", "bytes in messages")
        else:
            self.array, self.is_shared = self.memory.read(place, size), True

    def _bytes(self, exchange: int, size: int, count: int, name: str) -> int:
        """Returns the size of the message that a head belongs to.

        Raises:
            TrainingError: it is another message.
        """
        if (exchange, size, count) != (self._exchange, self._size, _ARRAY):
            sent = _described(size, count)
            raise differs(f"{name} sends {sent} in sum {exchange}", f"{self._size} bytes in sum {self._exchange}")
        return size


class IncomingRows(Incoming):
    """A message that is being received: any number of rows.

    Args:
        exchange: the sequence number that the message has to have.
        row_bytes: the size of a row and its number.
    """

    def __init__(self, exchange: int, row_bytes: int) -> None:
        super().__init__(exchange, row_bytes, lambda: empty(self._received, np.dtype(np.uint8)))
        self._received = 0

    def _bytes(self, exchange: int, size: int, count: int, name: str) -> int:
        if (exchange, size) != (self._exchange, self._size) or count == _ARRAY:
            sent = _described(size, count)
            raise differs(
                f"{name} sends {sent} in sum {exchange}", f"rows of {self._size} bytes in sum {self._exchange}"
            )
        self._received = count * size
        return self._received

    def split(self, numbers: np.dtype, values: np.dtype, width: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the rows, shape (n,), and the rows, shape (n, width)."""
        count = len(self.array) // self._size
        end = count * numbers.itemsize
        return self.array[:end].view(numbers), self.array[end:].view(values).reshape(count, width)


def _described(size: int, count: int) -> str:
    return f"{size} bytes" if count == _ARRAY else f"{count} rows of {size} bytes"


def differs(sent: str, expected: str) -> TrainingError:
    """The error of a task that receives something else than it expects."""
    return TrainingError(
        f"{sent}, and this task expects {expected}",
        code="sums-differ",
        hint="run the same program on every task, with the same model and batches of the same shapes; end the program "
        "after an error in a call of tfdist that only one task had, such as that of a callback",
    )


def _bytes_of(array: np.ndarray) -> list[memoryview]:
    return [array.reshape(-1).view(np.uint8).data] if array.size else []


def advance(buffers: list[memoryview], count: int) -> None:
    """Removes the first `count` bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers.pop(0))
    if count:
        buffers[0] = buffers[0][count:]
