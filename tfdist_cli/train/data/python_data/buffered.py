"""A source that is read once for several readers, or ahead of the steps."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfdist_cli.errors import TrainingError
from tfdist_cli.train.data.python_data.sources import Source

_READ_AHEAD_BYTES = 256 * 2**20
"""The most bytes of batches that are read to find the end of the data."""


class BufferedSource:
    """A source that is read once for all shares. What was read is kept until it is known not to be read again.

    Data of unknown length is read pass by pass, and the end of a pass is noted.

    Args:
        source: the source.
        name: what is read.

    Attributes:
        skips: whether a reader that is behind the others skips the batches that were let go of.
    """

    skips = False

    def __init__(self, source: Source, name: str = "") -> None:
        self.spec, self.length, self.endless, self.repeats = source.spec, source.length, source.endless, source.repeats
        self.source, self.name = source, name
        self._batches: Iterator[Any] | None = None
        self._kept: dict[int, Any] = {}
        self._batch_bytes = 0
        self._first = self._read = self._forgotten = 0
        self._opened = self._restarts = self._closed = False
        self._pass_begin = 0
        self._pass_end: int | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()

    def read(self, first: int, index: int, count: int, *, repeat: bool, to_end: bool = False) -> Iterator[Any]:
        """See `Source.read`.

        Args:
            first: see there.
            index: see there.
            count: see there.
            repeat: see there.
            to_end: whether the batches end with the pass, although another one may follow.

        Raises:
            TrainingError: a batch was let go of.
        """
        with self._lock:
            self._open(first, repeat=repeat)
        for number in itertools.count(first + index, count):
            found = self._batch(number, to_end=to_end)
            if found is None:
                return
            yield from found

    def ahead(self, first: int, least: int, most: int, *, repeat: bool) -> int:
        """Reads batches from `first` on, up to the end of a pass; returns how many there are.

        Args:
            first: the number of the first one.
            least: the number to read whatever their size is.
            most: the most batches to read.
            repeat: whether another pass follows a pass.
        """
        with self._lock:
            self._open(first, repeat=repeat)
            while self._pass_end is None and self._read < first + most:
                full = self._batch_bytes * len(self._kept) >= _READ_AHEAD_BYTES
                if (full and self._read >= first + least) or not self._draw():
                    break
            end = self._read if self._pass_end is None else self._pass_end
            return max(0, min(first + most, end) - first)

    def ends_at(self, number: int, *, repeat: bool) -> bool:
        """Whether the first pass that was read to its end ended before the batch of a number."""
        self.ahead(number, 1, 1, repeat=repeat)
        return self._pass_end == number

    def forget(self, before: int) -> None:
        """See `Source.forget`."""
        with self._lock:
            for number in range(self._forgotten, min(before, self._read)):
                self._kept.pop(number, None)  # none are kept after `close`
            self._forgotten = max(self._forgotten, min(before, self._read))

    def close(self) -> None:
        """Ends the reading; whoever still reads ahead finds no more batches."""
        with self._lock:
            self._closed = True
            self._batches = None
            self._kept.clear()

    def _open(self, first: int, *, repeat: bool) -> None:
        """Begins to read at a batch, unless it has begun."""
        if self._opened:
            return
        self._opened, self._first, self._forgotten = True, first, first
        self._restarts = repeat and self.repeats and self.length is None and not self.endless
        if not self._restarts:
            self._batches = self.source.read(first, 0, 1, repeat=repeat)
            self._read = first
        while self._read < first and self._draw():
            pass

    def _draw(self) -> bool:
        """Reads the next batch, or notes that the pass has ended. Returns whether more may follow.

        The next pass begins only when its first batch is needed. After the first complete pass its length is known, and
        complete passes before the first batch are not read.

        Raises:
            Exception: the source raised it, now or for another reader: a generator ends with its first error.
        """
        if self._error is not None:
            raise self._error
        if self._batches is None:
            self._batches = self.source.read(0, 0, 1, repeat=False)
        try:
            found = next(self._batches, None)
        except Exception as error:
            self._error = error
            raise
        if found is not None:
            if self._read >= self._forgotten:
                self._kept[self._read] = found
                self._batch_bytes = self._batch_bytes or _bytes_of(found)
            self._read += 1
            return True
        if self._pass_end is None and self._read >= self._first:
            self._pass_end = self._read
        length = self._read - self._pass_begin
        if not self._restarts or not length:
            return False
        self._read += max(0, self._first - self._read) // length * length
        self._pass_begin, self._batches = self._read, None
        return True

    def _batch(self, number: int, *, to_end: bool) -> tuple[Any, ...] | None:
        """Returns a batch, or nothing if it is skipped; None after the last one."""

        def is_over() -> bool:
            return self._closed or (to_end and self._pass_end is not None and number >= self._pass_end)

        with self._lock:
            while not is_over() and self._read <= number:
                if not self._draw():
                    return None
            if is_over():
                return None
            if number < self._forgotten and self.skips:
                return ()
            if number < self._forgotten:
                raise TrainingError(
                    f"batch {number} of a generator is to be read again, and it is gone",
                    code="generator-read-again",
                    hint="pass a keras.utils.PyDataset, which can be read again",
                )
            return (self._kept[number],)


def _bytes_of(batch: Any) -> int:
    """Returns the bytes of a batch's arrays."""
    tensors = tf.nest.flatten(batch, expand_composites=True)
    return sum(int(getattr(each.numpy() if tf.is_tensor(each) else each, "nbytes", 0)) for each in tensors)
