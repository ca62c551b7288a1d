"""Boards: memory in which a task shows others of its host the same arrays again and again, with new values each time.

A board has two halves, which take turns. So the values of one turn stay until those of the turn after the next one are
written.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tfdist_cli.train.cluster.shared_memory.memory import (
    ALIGNED,
    IDENTITY_BYTES,
    NONCE_BYTES,
    OthersMemory,
    Region,
    aligned,
    gone_if_ended,
    has_ended,
)
from tfdist_cli.train.cluster.shared_memory.pipes import Pipe, PipeTo

_NUMBERS = slice(NONCE_BYTES, ALIGNED)
"""Where a board's numbers are, int64: the place of the pipe of its task, and whether there will be no more values."""
_DESCRIPTOR, _INODE, _ENDED = range(3)
_IDENTITY = struct.Struct(f"<{IDENTITY_BYTES // 8}q")


@dataclass(frozen=True)
class Array:
    """An array of a board.

    Args:
        dtype: its type.
        size: how many numbers it has.
    """

    dtype: np.dtype
    size: int

    @property
    def bytes(self) -> int:
        """Its bytes."""
        return self.size * self.dtype.itemsize


class _Halves:
    """The content of a board.

    Args:
        arrays: the arrays of a turn.
        content: its bytes.
    """

    def __init__(self, arrays: Sequence[Array], content: np.ndarray) -> None:
        offsets, half = _offsets(arrays)
        places = list(zip(offsets, arrays, strict=True))
        self._bytes = [
            [content[start + offset : start + offset + array.bytes] for offset, array in places] for start in (0, half)
        ]
        """Those of each array in both halves. Slices are made once: they cost as much as to copy a small array."""
        self._values = [
            [own.view(array.dtype) for own, array in zip(each, arrays, strict=True)] for each in self._bytes
        ]

    def write(self, turn: int, values: Sequence[np.ndarray], first: int = 0) -> None:
        """Writes values of a turn.

        Args:
            turn: its number.
            values: some arrays.
            first: the place of the first one among all of them.
        """
        for place, value in zip(self._bytes[turn % 2][first:], values, strict=False):
            place[: value.nbytes] = value.reshape(-1).view(np.uint8)

    def read(self, turn: int) -> list[np.ndarray]:
        """Returns the values of a turn, without a copy."""
        return list(self._values[turn % 2])


class Board(_Halves):
    """A board of this task, and the pipe in which it receives messages about it and those of others.

    Args:
        arrays: the arrays of a turn.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left.

    Attributes:
        identity: what another task needs to open it, `IDENTITY_BYTES` bytes.
        pipe: the pipe.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        region, self.identity = Region.identifying(ALIGNED - NONCE_BYTES + 2 * _offsets(arrays)[1])
        super().__init__(arrays, region.memory[ALIGNED:])
        self.pipe = Pipe()
        self._descriptor = region.descriptor
        self._numbers = region.memory[_NUMBERS].view(np.int64)
        self._numbers[: _INODE + 1] = self.pipe.place

    def end(self) -> None:
        """Lets other tasks know that there will be no more values."""
        self._numbers[_ENDED] = 1

    @property
    def has_ended(self) -> bool:
        """Whether `end` was called."""
        return bool(self._numbers[_ENDED])

    def close(self) -> None:
        """Closes memory and pipe. The memory stays for as long as an array of it does."""
        os.close(self._descriptor)
        self.pipe.close()


class OthersBoard(_Halves):
    """A board of another task, or of this one.

    Args:
        identity: `Board.identity`.
        arrays: the arrays of a turn.

    Raises:
        FileNotFoundError: its task has ended, or has closed it.
        OSError: it cannot be opened here, see `OthersMemory.of`.

    Attributes:
        pipe: sends messages to its task.
    """

    def __init__(self, identity: bytes, arrays: Sequence[Array]) -> None:
        memory = OthersMemory.of(identity)
        self._process = memory.process
        content = memory.first(ALIGNED + 2 * _offsets(arrays)[1])
        super().__init__(arrays, content[ALIGNED:])
        self._numbers = content[_NUMBERS].view(np.int64)
        with gone_if_ended(memory.process):
            self.pipe = PipeTo(memory.process, (int(self._numbers[_DESCRIPTOR]), int(self._numbers[_INODE])))

    @property
    def has_ended(self) -> bool:
        """Whether there will be no more values."""
        return bool(self._numbers[_ENDED]) or has_ended(self._process)

    def close(self) -> None:
        """Closes it here. The memory stays for as long as an array of it does."""
        self.pipe.close()


def _offsets(arrays: Sequence[Array]) -> tuple[list[int], int]:
    """Where each array begins, and how many bytes they have together."""
    ends = np.cumsum([0, *(aligned(array.bytes) for array in arrays)]).tolist()
    return ends[:-1], ends[-1]


def key_of(identity: bytes) -> int:
    """A number of a board that no other one has."""
    return _IDENTITY.unpack(identity)[-1]


def as_numbers(identity: bytes) -> Sequence[int]:
    """An identity as numbers of a message."""
    return _IDENTITY.unpack(identity)


def identity_of(numbers: Sequence[int]) -> bytes:
    """The identity that begins some numbers of a message."""
    return _IDENTITY.pack(*numbers[: IDENTITY_BYTES // 8])
