"""Ids that never end, in a `DynamicEmbedding` with a limit of bytes: what it holds, and how long steps take, over time.

Half of the ids of a step are new. The others are drawn among all ids so far by Zipf's law with the exponent 1.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist_cli as tfdist

WIDTH = 32
PART = 50
"""Steps whose times are taken together."""
_FACTOR = -7046029254386353131
"""An odd number: ids are multiples of it modulo 2^64, so that they are all different and have no order."""


@dataclass(frozen=True)
class Part:
    """Some steps in a row.

    Args:
        end: seconds since the first step.
        step: the seconds of a step.
        processor: the seconds of processor time of a step.
        held: the bytes of the process in memory.
        ids: how many ids have rows.
    """

    end: float
    step: float
    processor: float
    held: int
    ids: int


class Parts(keras.callbacks.Callback):  # type: ignore[misc] # Keras has no types
    """Measures the parts of a training.

    Args:
        table: the layer.
        seconds: after how many the training stops.
    """

    def __init__(self, table: Any, seconds: float) -> None:
        super().__init__()
        self._table, self._seconds = table, seconds
        self.parts: list[Part] = []
        self._origin = self._begun = self._used = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Takes the time."""
        self._begun, self._used = time.perf_counter(), time.process_time()
        self._origin = self._origin or self._begun

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Takes the time, and what is held."""
        now, used = time.perf_counter(), time.process_time()
        ids = int(tf.math.count_nonzero(self._table.index.keys.value))
        step, processor = (now - self._begun) / PART, (used - self._used) / PART
        self.parts.append(Part(now - self._origin, step, processor, _resident(), ids))
        self.model.stop_training = now - self._origin > self._seconds


def stream(batch: int) -> tf.data.Dataset:
    """Returns batches of ids without end."""
    new = batch // 2

    def ids(step: tf.Tensor) -> tf.Tensor:
        first = step * new
        drawn = tf.random.stateless_uniform([batch - new], tf.stack([step, 1]), dtype=tf.float64)
        rank = tf.cast(tf.pow(tf.cast(first + new, tf.float64), drawn), tf.int64) - 1
        return tf.concat([first + tf.range(new, dtype=tf.int64), rank], axis=0) * tf.constant(_FACTOR, tf.int64)

    return tf.data.Dataset.counter().map(lambda step: (ids(step), tf.ones([batch, 1])))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _minute(parts: list[Part], *, last: bool) -> list[Part]:
    """The parts of the first or the last minute; without the first part, in which functions are compiled."""
    end = parts[-1].end
    return [part for part in parts[1:] if (part.end > end - 60 if last else part.end <= 60)]


def main() -> None:
    """Trains, and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ids", type=int, default=50_000_000, help="how many ids to look up")
    parser.add_argument("--bytes", type=int, default=1_000_000_000, help="the limit of rows and index")
    parser.add_argument("--batch", type=int, default=8192, help="ids in a step")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after how many to stop")
    parser.add_argument("--evict", choices=["lru", "lfu"], default="lru")
    given = parser.parse_args()
    ids = keras.Input((), dtype="int64")
    table = tfdist.layers.DynamicEmbedding(WIDTH, max_bytes=given.bytes, evict=given.evict)
    model = keras.Model(ids, keras.layers.Dense(1)(table(ids)))
    model.compile(keras.optimizers.Adagrad(0.05), "mse")
    measured = Parts(table, given.seconds)
    epochs = -(-given.ids // (given.batch * PART))
    data = stream(given.batch)
    tfdist.fit(model, data, epochs=epochs, steps_per_epoch=PART, callbacks=[measured], verbose=0)
    steps = len(measured.parts) * PART
    _print(measured.parts, table, seen=steps * given.batch, new=steps * (given.batch // 2))


def _print(parts: list[Part], table: Any, *, seen: int, new: int) -> None:
    index = sum(variable.value.dtype.size * int(np.prod(variable.shape)) for variable in table.index.variables)
    rows = table.embeddings.value.dtype.size * int(np.prod(table.embeddings.shape))
    print(f"ids looked up {seen:,}, different ones {new:,}, in {parts[-1].end:.0f} s")
    print(f"rows {table.embeddings.shape[0]:,}: {rows:,} bytes, and {index:,} of the index: {rows + index:,}")
    print(f"ids that have rows {parts[-1].ids:,}; that have lost theirs {new - parts[-1].ids:,}")
    for name, last in (("first", False), ("last", True)):
        own = _minute(parts, last=last)
        times, used = (
            np.array(each) * 1e3 for each in zip(*((part.step, part.processor) for part in own), strict=True)
        )
        low, median, high = np.percentile(times, [10, 50, 90])
        held = max(part.held for part in own)
        print(
            f"{name} minute: {median:.1f} ms a step (10% {low:.1f}, 90% {high:.1f}), "
            f"{np.median(used):.1f} ms of processor time; process {held / 1e9:.2f} GB"
        )


if __name__ == "__main__":
    main()
