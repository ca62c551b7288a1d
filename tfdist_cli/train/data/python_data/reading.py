"""Reads Python data in TensorFlow's threads, until the process exits."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

_PREFETCHED = 4
"""Batches that are read ahead."""
_GRACE_SECONDS = 2.0
"""How long the exit of the process waits for a batch that is being made."""


def as_dataset(read: Callable[[], Iterator[Any]], spec: Any, length: int | None = None) -> tf.data.Dataset:
    """Returns batches that Python code yields as a dataset, some of which are read ahead.

    Args:
        read: begins to yield them.
        spec: the `tf.TypeSpec`s of a batch.
        length: their number; None if it is unknown.
    """
    dataset = tf.data.Dataset.from_generator(_Reading(read), output_signature=spec)
    if length is not None:
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(length))
    return dataset.prefetch(_PREFETCHED)


_open: weakref.WeakSet[_Reading] = weakref.WeakSet()
"""The functions that TensorFlow may be reading batches from."""


class _Reading:
    """Opens the batches, and yields them until the process exits.

    Args:
        read: yields the batches.
    """

    def __init__(self, read: Callable[[], Iterator[Any]]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._ended = False

    def __call__(self) -> Iterator[Any]:
        batches = self._read()
        _open.add(self)
        while True:
            with self._lock:
                batch = next(batches, self) if not self._ended else self
            if batch is self:
                return
            yield batch

    def end(self) -> None:
        """Ends the data, after the batch that is being made."""
        self._ended = True
        if self._lock.acquire(timeout=_GRACE_SECONDS):
            self._lock.release()


@atexit.register
def _end_all() -> None:
    """No thread of TensorFlow may call Python when the interpreter ends."""
    for reading in list(_open):
        reading.end()
