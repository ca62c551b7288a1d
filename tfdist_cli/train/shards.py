"""Variables that are spread over several ps, and reading and writing them a few rows at a time.

What has to pass through one process (a checkpoint, an export, initial values) does so in blocks: neither the chief nor
a ps then needs memory for much more than what it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.sharded_variable import ShardedVariable

BLOCK_BYTES = 64 * 2**20
"""Rows of a spread variable that pass through one process at once: so many bytes of them, or one row."""


class Shards(ShardedVariable):
    """TensorFlow's spread variable: shards are contiguous rows, the first ones of one row more than the last ones."""

    def numpy(self) -> np.ndarray:
        """The whole, put together here block by block."""
        whole = np.empty(self.shape, self.dtype.as_numpy_dtype)
        for block in blocks(self):
            whole[block.first : block.first + block.count] = block.read().numpy()
        return whole

    def __array__(self, dtype: Any = None) -> np.ndarray:
        return self.numpy().astype(dtype, copy=False)


def parts(variable: keras.Variable) -> list[Any]:
    """TensorFlow's variables that hold a Keras variable: its shards, or one alone.

    Args:
        variable: one that has been initialized.
    """
    stored = variable._value  # `value` would be another one within an autocast or a stateless scope
    return list(stored.variables) if isinstance(stored, ShardedVariable) else [stored]


def divided(rows: int, count: int) -> list[int]:
    """How many rows each of `count` shards has: 10 rows in 4 shards are 3, 3, 2 and 2."""
    return [rows // count + (number < rows % count) for number in range(count)]


@dataclass(frozen=True)
class Block:
    """Some rows of one shard.

    Args:
        shard: the variable that holds them.
        first: the first one's number in the whole.
        count: how many they are.
        start: the first one's number in the shard.
    """

    shard: Any
    first: int
    count: int
    start: int

    def read(self) -> tf.Tensor:
        """The rows; only they leave the shard's ps."""
        with tf.device(self.shard.device):
            return self.shard.sparse_read(tf.range(self.start, self.start + self.count))

    def write(self, value: Any) -> None:
        """Replaces the rows.

        Args:
            value: a tensor or array of their shape, wherever it is.
        """
        with tf.device(self.shard.device):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=self.shard.handle, begin=[self.start], end=[self.start + self.count], strides=[1], value=value
            )


def blocks(spread: ShardedVariable) -> Iterator[Block]:
    """The rows of a spread variable, in order.

    Blocks end at multiples of the same number of rows, however many shards there are, and where shards end. So what
    was saved with some number of shards is read with another without reading much of it twice.
    """
    row_bytes = spread.dtype.size * int(np.prod(spread.shape[1:]))
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    offset = 0
    for shard in spread.variables:
        rows = int(shard.shape[0])
        first = offset
        while first < offset + rows:
            end = min(offset + rows, (first // step + 1) * step)
            yield Block(shard, first, end - first, first - offset)
            first = end
        offset += rows
