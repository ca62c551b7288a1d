"""Parameters that workers of one host update where they are, in the memory of the ps.

Within a run, the parameters and their slots are in memory that their ps shares with the workers. A worker acquires the
lock of a ps, counts its update, applies its gradients to them, copies the new values of the parameters for its next
step, and releases the lock. So no gradient is sent, no ps computes, and each update is made as a whole, as if the ps
had made it.

The variables themselves get copies of them at the end of a run, and before callbacks read them within it, see `stored`.

The ps waits until the run ends. Meanwhile it looks whether the holder of its lock is still there, see `locks`. A worker
that is killed within its update leaves a part of it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from tfdist_cli.train.cluster.shared_memory import locks
from tfdist_cli.train.cluster.shared_memory.boards import Array
from tfdist_cli.train.cluster.shared_memory.layout import Layout
from tfdist_cli.train.cluster.shared_memory.locks import Lock, OthersLock
from tfdist_cli.train.cluster.shared_memory.memory import (
    ALIGNED,
    NONCE_BYTES,
    OthersMemory,
    Region,
    aligned,
    gone_if_ended,
    has_ended,
)
from tfdist_cli.train.cluster.shared_memory.pipes import Pipe, PipeTo
from tfdist_cli.train.cluster.shared_memory.stored import StoredValues, aligned_bytes, is_at

_HEADER = 3 * ALIGNED
_LOCK = slice(ALIGNED, ALIGNED + 8 * locks.NUMBERS)
_NUMBERS = slice(2 * ALIGNED, _HEADER)
_DESCRIPTOR, _INODE, _COUNT, _STOPPED, _ENDED = range(5)
"""The place of the pipe of the ps, how many updates there were, whether workers are to take no more steps, and whether
there are no more updates."""
_CHECK_SECONDS = 1.0
"""How often a task that waits looks whether the others are still there."""


class UpdatesEnded(Exception):
    """A ps takes no more updates."""


class _Content:
    """The variables in the memory of a ps.

    Args:
        memory: the bytes.
        layout: the arrays of all ps.
        ps: the number of this one.

    Attributes:
        stored: the arrays of its parameters, then those of their slots.
        padded: the same, each with some bytes behind it that belong to nothing.
    """

    def __init__(self, memory: np.ndarray, layout: Layout, ps: int) -> None:
        arrays = _arrays(layout, ps)
        self.lock_numbers = memory[_LOCK].view(np.int64)
        self.numbers = memory[_NUMBERS].view(np.int64)
        places = list(zip(_offsets(arrays), arrays, strict=False))
        self.stored = [memory[offset : offset + array.bytes].view(array.dtype) for offset, array in places]
        self.padded = [memory[offset : offset + array.bytes + ALIGNED].view(array.dtype) for offset, array in places]
        end = list(_offsets(arrays))[len(layout.values[ps])]
        self.values = memory[_HEADER:end]
        """The bytes of all parameters."""


def _arrays(layout: Layout, ps: int) -> list[Array]:
    return [*layout.values[ps], *layout.others[ps]]


def _offsets(arrays: Sequence[Array]) -> Iterator[int]:
    """Where each array begins, and where all of them end."""
    offset = _HEADER
    yield offset
    for array in arrays:
        offset += aligned(array.bytes) + ALIGNED
        yield offset


class PsParameters:
    """A ps's side.

    Args:
        ps: its number; 0 is the leader.
        layout: the arrays.

    Raises:
        AttributeError, OSError: this system cannot share memory, or has none left.

    Attributes:
        identity: what workers need to open it, `IDENTITY_BYTES` bytes.
        is_closed: whether there are no more updates.
    """

    def __init__(self, ps: int, layout: Layout) -> None:
        size = list(_offsets(_arrays(layout, ps)))[-1]
        region, self.identity = Region.identifying(size - NONCE_BYTES)
        self._content = _Content(region.memory, layout, ps)
        self._descriptor = region.descriptor
        self._pipe, self._lock = Pipe(), Lock(self._content.lock_numbers)
        self._own_side = OthersLock(os.getpid(), self._content.lock_numbers)
        self._content.numbers[: _INODE + 1] = self._pipe.place
        self._stored = StoredValues(self._content.stored, self._held)
        self._using = threading.Lock()
        """Held by a thread that uses descriptors, but for `wait`: then no other one closes them."""
        self.is_closed = self._waits = False

    def begin(self, count: int) -> None:
        """Begins a run.

        Args:
            count: how many updates there were.
        """
        self._content.numbers[_COUNT], self._content.numbers[_STOPPED] = count, 0

    def publish(self, values: Sequence[np.ndarray]) -> None:
        """Writes values of variables to the memory, see `StoredValues.write`.

        Args:
            values: those of the parameters, then of their slots.
        """
        self._stored.write(values)

    def read(self, values: Sequence[np.ndarray]) -> tuple[int, Sequence[np.ndarray]]:
        """Copies all arrays for the variables, see `StoredValues.read`.

        Args:
            values: see `publish`; those that were assigned stay.

        Returns:
            How many updates there were, and the copies, flat.
        """
        count = 0

        def note_count() -> None:
            nonlocal count
            count = int(self._content.numbers[_COUNT])

        copies = self._stored.read(values, note_count)
        return count, copies

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Holds the lock within the context, but when there are no more updates: its holder may never release it."""
        with self._using:
            holds = False
            while not (holds or self._content.numbers[_ENDED]):
                holds = self._own_side.acquire(_CHECK_SECONDS)
                if not holds:
                    self._lock.look()
            try:
                yield
            finally:
                if holds:
                    self._own_side.release()

    def stop(self) -> None:
        """Tells workers to take no more steps in this run."""
        self._content.numbers[_STOPPED] = 1

    def wait(self) -> None:
        """Waits until the run ends, or the memory is closed."""
        with self._using:
            if self.is_closed:
                return
            self._waits = True
        try:
            while self._pipe.receive(_CHECK_SECONDS) is None:
                self._lock.look()
        finally:
            self._end_wait()

    def _end_wait(self) -> None:
        with self._using:
            self._waits = False
            if self.is_closed:
                self._close()

    def end(self) -> None:
        """Lets `wait` return, also if it is called later. Any thread may call it."""
        with self._using:
            if not self.is_closed:
                self._pipe.send()

    def close(self) -> None:
        """Lets workers know that there are no more updates, and `wait` return. Any thread may call it."""
        self._content.numbers[_ENDED] = 1
        with self._using:
            if self.is_closed:
                return
            self.is_closed = True
            if self._waits:  # it closes the descriptors that it waits for
                self._pipe.send()
            else:
                self._close()

    def _close(self) -> None:
        os.close(self._descriptor)
        self._pipe.close()
        self._lock.close()
        self._own_side.close()


class _OthersParameters:
    """What a worker has of one ps."""

    def __init__(self, identity: bytes, layout: Layout, ps: int) -> None:
        memory = OthersMemory.of(identity)
        self._process = memory.process
        self.content = _Content(memory.first(list(_offsets(_arrays(layout, ps)))[-1]), layout, ps)
        self.lock = OthersLock(memory.process, self.content.lock_numbers)
        place = self.content.numbers[: _INODE + 1].tolist()
        with gone_if_ended(memory.process):
            self._pipe = PipeTo(memory.process, (place[0], place[1]))
        offsets = [offset - _HEADER for offset in _offsets(layout.values[ps])]
        self._copies = [aligned_bytes(len(self.content.values)) for _ in range(2)]
        self._views = [
            [
                copy[at : at + array.bytes].view(array.dtype)
                for at, array in zip(offsets, layout.values[ps], strict=False)
            ]
            for copy in self._copies
        ]
        self._turn = 0

    @property
    def has_ended(self) -> bool:
        return bool(self.content.numbers[_ENDED]) or has_ended(self._process)

    @property
    def is_closed(self) -> bool:
        """The same, at no cost."""
        return bool(self.content.numbers[_ENDED]) or self._pipe.is_broken

    def copied(self) -> list[np.ndarray]:
        self._turn ^= 1
        np.copyto(self._copies[self._turn], self.content.values)
        return list(self._views[self._turn])


class WorkerParameters:
    """A worker's side. It makes one update after another.

    Its descriptors are closed when nothing uses it any more: a thread may wait for a lock while others find that a ps
    has ended.

    Args:
        layout: the arrays.
        identities: of all ps, `PsParameters.identity`.

    Raises:
        OSError: the memory of a ps cannot be opened here though the ps goes on, see `OthersMemory.of`.

    Attributes:
        is_over: whether there will be no more updates.
    """

    def __init__(self, layout: Layout, identities: Sequence[bytes]) -> None:
        self._ps: list[_OthersParameters] = []
        self.is_over = False
        try:
            for ps, identity in enumerate(identities):
                self._ps.append(_OthersParameters(identity, layout, ps))
        except FileNotFoundError:
            self.is_over = True  # a ps has ended, or has closed its memory

    @property
    def padded(self) -> list[np.ndarray]:
        """The arrays of all ps, see `_Content`."""
        self._check()
        return [array for each in self._ps for array in each.content.padded]

    def acquire(self, ps: int, *, counts: bool) -> int:
        """Waits for the lock of a ps.

        Args:
            ps: its number.
            counts: whether an update follows, which is counted.

        Returns:
            How many updates there were before.

        Raises:
            UpdatesEnded: there will be no more.
        """
        self._check()
        own = self._ps[ps]
        while not own.lock.acquire(_CHECK_SECONDS):
            self.is_over |= any(each.has_ended for each in self._ps)
            self._check()
        if self.is_over or own.is_closed:
            own.lock.release()  # others that wait for it find the same
            self.is_over = True
        self._check()
        before = int(own.content.numbers[_COUNT])
        own.content.numbers[_COUNT] = before + counts
        return before

    def release(self, ps: int) -> tuple[Sequence[int], list[np.ndarray]]:
        """Copies the parameters of a ps, and releases its lock.

        Returns:
            How many updates there were, and whether the worker is to take no more steps; and the values. They stay as
            they are until the call after the next one.
        """
        own = self._ps[ps]
        values = own.copied()
        numbers = own.content.numbers[[_COUNT, _STOPPED]].tolist()
        own.lock.release()
        return numbers, values

    def check_places(self, values: Sequence[np.ndarray]) -> None:
        """Raises an error if some values, of all variables of all ps, are not those in the memory."""
        places = [array for each in self._ps for array in each.content.stored]
        if not all(is_at(value, place) for value, place in zip(values, places, strict=True)):
            raise RuntimeError("a variable of a worker has left the memory of its ps")

    def has_ended(self) -> bool:
        """Whether a ps takes no more updates."""
        self.is_over = self.is_over or any(each.has_ended for each in self._ps)
        return self.is_over

    def _check(self) -> None:
        if self.is_over:
            raise UpdatesEnded("a ps has ended")
