"""Streams that Python reads, as datasets: chunks of many elements cross from Python to TensorFlow.

The Python functions are known by name in every task of a cluster, so that a pipeline runs on whichever task it is sent
to.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.data import call_registered

NEXT = "next"
"""The name of the function that returns the next chunk."""
_OPEN = 1024
"""Streams that are open at most: those that nobody reads any more are never closed by TensorFlow."""


def stream(name: tf.Tensor, kind: str, chunk: tf.TensorSpec) -> tf.data.Dataset:
    """Returns the chunks of one stream.

    Args:
        name: what the stream is opened with, a string tensor.
        kind: the name of the registered function that opens it: it returns what `Streams.add` returns.
        chunk: the type and the shape of the chunks.
    """

    def opened(file: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(call_registered(kind, [file], [tf.int64])[0], [])

    def chunks(number: tf.Tensor) -> tf.data.Dataset:
        def following(_: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(call_registered(NEXT, [number], [chunk.dtype])[0], chunk.shape)

        return tf.data.Dataset.counter().map(following).take_while(lambda part: tf.shape(part)[0] > 0)

    return tf.data.Dataset.from_tensors(name).map(opened).flat_map(chunks)


class Streams:
    """The streams that pipelines of this process read, by number."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[int, tuple[Iterator[Any], Any]] = OrderedDict()
        self._last = 0

    def add(self, chunks: Iterator[Any], end: Any) -> np.int64:
        """Adds a stream, and returns its number.

        Args:
            chunks: its chunks, none of them empty.
            end: the empty chunk that ends it.
        """
        with self._lock:
            self._last += 1
            self._open[self._last] = chunks, end
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)  # the one that was read least recently
            return np.int64(self._last)

    def next(self, number: np.int64) -> Any:
        """Returns the next chunk of a stream; an empty one at its end, which closes it."""
        key = int(number)
        with self._lock:
            chunks, end = self._open[key]
            self._open.move_to_end(key)
        chunk = next(chunks, end)
        if chunk is end:
            with self._lock:
                self._open.pop(key, None)
        return chunk


STREAMS = Streams()
