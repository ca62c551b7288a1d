"""Buffers of shared memory: a task writes data into one, and another task of its host uses it where it is.

The task that writes owns the buffers. It marks one as used before it writes. The reader marks it as free when nothing
refers to the data any more. So buffers are used again and again, and a reader may keep data for as long as it wants.
What was on its way to a task that is killed stays marked.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfdist_cli.train.cluster.shared_memory.memory import (
    ALIGNED,
    SMALLEST_REGION,
    OthersMemory,
    Place,
    Region,
    aligned,
    has_ended,
)

_MESSAGE = struct.Struct("<qqqqx")
"""A process, a descriptor of it, the offset of a buffer, and the bytes that were written.

Its size is odd: that of numbers is not.
"""
MESSAGE_BYTES = _MESSAGE.size
_HEADER = ALIGNED
"""Bytes before a buffer's data: whether it is used, and the process of its reader, int64."""
_USED, _READER = 0, 1


@dataclass(frozen=True)
class _Buffer:
    place: Place
    header: np.ndarray
    memory: np.ndarray


class Buffers:
    """The buffers that this task writes to.

    Attributes:
        identity: what another task needs to open their memory.
    """

    def __init__(self) -> None:
        self._first, self.identity = Region.identifying()
        self._region, self._taken = self._first, len(self._first.memory)
        self._buffers: dict[int, list[_Buffer]] = {}
        self._lock = threading.Lock()

    def write(self, data: np.ndarray) -> bytes:
        """Writes bytes into a free buffer.

        Args:
            data: the bytes.

        Returns:
            What `BufferReader.read` needs, `MESSAGE_BYTES` bytes.

        Raises:
            OSError: there is no memory or no descriptor for another buffer. Nothing was written.
        """
        with self._lock:
            buffer = self._free(len(data))
            buffer.header[:] = 1, 0
        buffer.memory[:] = data
        return _MESSAGE.pack(os.getpid(), buffer.place.descriptor, buffer.place.offset, len(data))

    def _free(self, size: int) -> _Buffer:
        buffers = self._buffers.setdefault(size, [])
        free = next((buffer for buffer in buffers if not buffer.header[_USED]), None)
        # A process that was killed lets go of nothing.
        free = free or next((buffer for buffer in buffers if _has_exited(int(buffer.header[_READER]))), None)
        if free is None:
            free = self._new(size)
            buffers.append(free)
        return free

    def _new(self, size: int) -> _Buffer:
        needed = _HEADER + aligned(size)
        if self._taken + needed > len(self._region.memory):
            # What is not written to takes no memory, and few regions take few descriptors.
            grown = max(SMALLEST_REGION, 2 * len(self._region.memory))
            self._region, self._taken = Region.new(max(grown, needed)), 0
        begin, self._taken = self._taken, self._taken + needed
        part = self._region.memory[begin : begin + needed]
        header = part[:_HEADER].view(np.int64)[: _READER + 1]
        return _Buffer(Place(self._region.descriptor, begin), header, part[_HEADER : _HEADER + size])


class BufferReader:
    """Reads what other tasks of this host have written to their buffers."""

    def __init__(self) -> None:
        self._others: dict[int, _Other] = {}
        """The tasks whose memory is open, by their processes."""
        self._used: list[_OthersBuffer] = []
        self._lock = threading.Lock()

    def meet(self, identity: bytes) -> bool:
        """Opens the memory of a task; returns whether that is possible. That of processes that have exited is closed.

        Args:
            identity: that of its buffers.
        """
        other = OthersMemory.opened(identity)
        if other is None:
            return False
        with self._lock:
            self._others = {process: each for process, each in self._others.items() if not _has_exited(process)}
            self._others[other.process] = _Other(other)  # a process of before may have had the same number
        return True

    def read(self, message: bytes) -> np.ndarray:
        """Returns the bytes of a buffer, without a copy. They stay for as long as an array refers to them.

        Args:
            message: what `Buffers.write` returned on another task.

        Raises:
            KeyError: this task has not met it.
            OSError: it has ended.
            ValueError: there is no such memory.
        """
        process, descriptor, offset, size = _MESSAGE.unpack(message)
        with self._lock:
            self._let_go()
            buffer = self._others[process].buffer(Place(descriptor, offset), size)
            buffer.header[_READER] = os.getpid()
            self._used.append(buffer)
            return buffer.memory[:]

    def let_go(self) -> None:
        """Marks the buffers as free that nothing refers to."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        unused = [buffer for buffer in self._used if _references(buffer) == _UNUSED]
        for buffer in unused:
            self._used.remove(buffer)
            buffer.header[_USED] = 0


@dataclass(frozen=True, eq=False)
class _OthersBuffer:
    header: np.ndarray
    memory: np.ndarray


class _Other:
    def __init__(self, memory: OthersMemory) -> None:
        self._memory = memory
        self._buffers: dict[Place, _OthersBuffer] = {}

    def buffer(self, place: Place, size: int) -> _OthersBuffer:
        found = self._buffers.get(place)
        if found is None:
            header = self._memory.read(place, _HEADER).view(np.int64)
            memory: Any = self._memory.read(Place(place.descriptor, place.offset + _HEADER), size)
            # A view refers to this array, as what this one refers to is no array.
            found = self._buffers[place] = _OthersBuffer(header, np.frombuffer(memoryview(memory), np.uint8))
        return found


def _has_exited(process: int) -> bool:
    return bool(process) and has_ended(process)


def _references(buffer: _OthersBuffer) -> int:
    return sys.getrefcount(buffer.memory)


_UNUSED = _references(_OthersBuffer(np.zeros(0), np.zeros(0)))
"""The references to an array that a buffer has and nothing else, as this interpreter counts them."""
