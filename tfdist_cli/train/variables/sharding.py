"""Variables that are spread over several ps, and reading and writing them a few rows at a time.

What has to pass through one process (a checkpoint, an export, initial values) does so in blocks: neither the chief nor
a ps then needs memory for much more than what it keeps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.tf_compat.variables import ShardedVariable, stored

Gradient = list[Any]
"""A variable's gradient, for each of its parts: a tensor, or `tf.IndexedSlices` that has each row once."""
BLOCK_BYTES = 8 * 2**20
"""Rows of a spread variable that are made, read or written at once: so many bytes of them, or one row. Larger blocks
are no quicker, and TensorFlow has several in memory before it frees the first."""


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


def parts(variable: Any) -> list[Any]:
    """Returns the TensorFlow variables that store a variable: its shards, or one variable if it is not sharded.

    Args:
        variable: an initialized Keras variable, or the TensorFlow variable below it.
    """
    whole = stored(variable)
    return list(whole.variables) if isinstance(whole, ShardedVariable) else [whole]


def split_rows(value: tf.Tensor, shards: Sequence[Any]) -> list[tf.Tensor]:
    """Splits a tensor of a variable's shape into the rows of each shard.

    Args:
        value: the tensor.
        shards: the variables that store the variable, see `parts`.
    """
    return tf.split(value, [int(shard.shape[0]) for shard in shards]) if len(shards) > 1 else [value]


def assign(variable: keras.Variable, value: Any) -> None:
    """Assigns a value to a variable, each shard on its own device.

    Args:
        variable: an initialized Keras variable.
        value: a tensor or an array with the same number of elements.
    """
    shards, whole = parts(variable), tf.cast(tf.reshape(value, variable.shape), variable.dtype)
    for shard, rows in zip(shards, split_rows(whole, shards), strict=True):
        with tf.device(shard.device):
            shard.assign(rows)


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

    @property
    def bytes(self) -> int:
        """What the rows take."""
        return self.count * _row_bytes(self.shard)

    @property
    def dtype(self) -> tf.DType:
        """The type of a value."""
        return self.shard.dtype

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


@dataclass(frozen=True)
class Whole:
    """A variable that is not spread; what a strategy has mirrored is one variable, too.

    Args:
        stored: TensorFlow's variable.
    """

    stored: Any

    @property
    def bytes(self) -> int:
        """What it takes."""
        return self.stored.dtype.size * int(np.prod(self.stored.shape))

    @property
    def dtype(self) -> tf.DType:
        """The type of a value."""
        return self.stored.dtype

    def read(self) -> tf.Tensor:
        """Its value."""
        return tf.convert_to_tensor(self.stored)

    def write(self, value: Any) -> None:
        """Replaces its value."""
        self.stored.assign(value)


def pieces(variable: keras.Variable) -> Iterator[Block | Whole]:
    """What passes through a process at once when a variable is copied: a block of its rows, or all of it."""
    held = stored(variable)
    if isinstance(held, ShardedVariable):
        yield from blocks(held)
    else:
        yield Whole(held)


def blocks(spread: ShardedVariable) -> Iterator[Block]:
    """The rows of a spread variable, in order.

    Blocks end at multiples of the same number of rows, however many shards there are, and where shards end. So what
    was saved with some number of shards is read with another without reading much of it twice.
    """
    step = max(1, BLOCK_BYTES // max(1, _row_bytes(spread)))
    offset = 0
    for shard in spread.variables:
        end = offset + int(shard.shape[0])
        bounds = [offset, *range((offset // step + 1) * step, end, step), end]
        for first, after in itertools.pairwise(bounds):
            yield Block(shard, first, after - first, first - offset)
        offset = end


def _row_bytes(variable: Any) -> int:
    return variable.dtype.size * int(np.prod(variable.shape[1:]))
