"""Slots of shared memory: a task writes data into one, and another task of its host uses it where it is.

The task that writes owns the slots. It marks a slot as used before it writes. The reader marks it as free when nothing
refers to the data any more. So slots are used again and again, and a reader may keep data for as long as it wants.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfdist_cli.train.cluster.shared_memory.memory import (
    ALIGNED,
    SMALLEST_REGION,
    OthersMemory,
    Place,
    Region,
    aligned,
)

_MESSAGE = struct.Struct("<qqqqx")
"""A process, a descriptor of it, the offset of a slot, and the bytes that were written.

Its size is odd: that of numbers is not.
"""
MESSAGE_BYTES = _MESSAGE.size
_HEADER = ALIGNED
"""Bytes before a slot's data: whether it is used, and the process of its reader, int64."""
_USED, _READER = 0, 1


@dataclass(frozen=True)
class _Slot:
    place: Place
    header: np.ndarray
    memory: np.ndarray


class Slots:
    """The slots that this task writes to.

    Attributes:
        identity: what another task needs to open their memory.
    """

    def __init__(self) -> None:
        self._first, self.identity = Region.identifying()
        self._region, self._taken = self._first, len(self._first.memory)
        self._slots: dict[int, list[_Slot]] = {}
        self._lock = threading.Lock()

    def write(self, data: np.ndarray) -> bytes:
        """Writes bytes into a free slot.

        Args:
            data: the bytes.

        Returns:
            What `SlotReader.read` needs, `MESSAGE_BYTES` bytes.

        Raises:
            OSError: there is no memory or no descriptor for another slot. Nothing was written.
        """
        with self._lock:
            slot = self._free(len(data))
            slot.header[:] = 1, 0
        slot.memory[:] = data
        return _MESSAGE.pack(os.getpid(), slot.place.descriptor, slot.place.offset, len(data))

    def _free(self, size: int) -> _Slot:
        slots = self._slots.setdefault(size, [])
        free = next((slot for slot in slots if not slot.header[_USED]), None)
        # A process that was killed lets go of nothing.
        free = free or next((slot for slot in slots if _has_exited(int(slot.header[_READER]))), None)
        if free is None:
            free = self._new(size)
            slots.append(free)
        return free

    def _new(self, size: int) -> _Slot:
        needed = _HEADER + aligned(size)
        if self._taken + needed > len(self._region.memory):
            # What is not written to takes no memory, and few regions take few descriptors.
            grown = max(SMALLEST_REGION, 2 * len(self._region.memory))
            self._region, self._taken = Region.new(max(grown, needed)), 0
        begin, self._taken = self._taken, self._taken + needed
        part = self._region.memory[begin : begin + needed]
        header = part[:_HEADER].view(np.int64)[: _READER + 1]
        return _Slot(Place(self._region.descriptor, begin), header, part[_HEADER : _HEADER + size])


class SlotReader:
    """Reads what other tasks of this host have written to their slots."""

    def __init__(self) -> None:
        self._others: dict[int, _Other] = {}
        """The tasks whose memory is open, by their processes."""
        self._used: list[_OthersSlot] = []
        self._lock = threading.Lock()

    def meet(self, identity: bytes) -> bool:
        """Opens the memory of a task; returns whether that is possible. That of processes that have exited is closed.

        Args:
            identity: that of its slots.
        """
        other = OthersMemory.opened(identity)
        if other is None:
            return False
        with self._lock:
            self._others = {process: each for process, each in self._others.items() if not _has_exited(process)}
            self._others[other.process] = _Other(other)  # a process of before may have had the same number
        return True

    def read(self, message: bytes) -> np.ndarray:
        """Returns the bytes of a slot, without a copy. They stay for as long as an array refers to them.

        Args:
            message: what `Slots.write` returned on another task.

        Raises:
            KeyError: this task has not met it.
            OSError: it has ended.
            ValueError: there is no such memory.
        """
        process, descriptor, offset, size = _MESSAGE.unpack(message)
        with self._lock:
            self._let_go()
            slot = self._others[process].slot(Place(descriptor, offset), size)
            slot.header[_READER] = os.getpid()
            self._used.append(slot)
            return slot.memory[:]

    def let_go(self) -> None:
        """Marks the slots as free that nothing refers to."""
        with self._lock:
            self._let_go()

    def _let_go(self) -> None:
        unused = [slot for slot in self._used if _references(slot) == _UNUSED]
        for slot in unused:
            self._used.remove(slot)
            slot.header[_USED] = 0


@dataclass(frozen=True, eq=False)
class _OthersSlot:
    header: np.ndarray
    memory: np.ndarray


class _Other:
    def __init__(self, memory: OthersMemory) -> None:
        self._memory = memory
        self._slots: dict[Place, _OthersSlot] = {}

    def slot(self, place: Place, size: int) -> _OthersSlot:
        found = self._slots.get(place)
        if found is None:
            header = self._memory.read(place, _HEADER).view(np.int64)
            memory: Any = self._memory.read(Place(place.descriptor, place.offset + _HEADER), size)
            # A view refers to this array, as what this one refers to is no array.
            found = self._slots[place] = _OthersSlot(header, np.frombuffer(memoryview(memory), np.uint8))
        return found


def _has_exited(process: int) -> bool:
    return bool(process) and not Path(f"/proc/{process}").exists()


def _references(slot: _OthersSlot) -> int:
    return sys.getrefcount(slot.memory)


_UNUSED = _references(_OthersSlot(np.zeros(0), np.zeros(0)))
"""The references to an array that a slot has and nothing else, as this interpreter counts them."""
