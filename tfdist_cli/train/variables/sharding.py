"""Variables that are sharded by rows over several ps, and access to them in blocks of rows.

Data that passes through one process (a checkpoint, an export, initial values) is processed in blocks. So neither the
chief nor a ps needs much more memory than for the variables that it stores.
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
"""The gradient of a variable, for each of its shards: a tensor, a `tf.IndexedSlices` with distinct rows, or a
`SummedTerms` of one of these."""
BLOCK_BYTES = 8 * 2**20
"""The size of a block of a sharded variable; a block has at least one row. Larger blocks are not faster, and TensorFlow
keeps several in memory before it frees the first one."""


class RowShardedVariable(ShardedVariable):
    """A sharded variable whose shards are contiguous rows. The first shards may have one row more than the others."""

    def numpy(self) -> np.ndarray:
        """Returns the value of the whole variable, read block by block."""
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


def variable_bytes(variable: Any) -> int:
    """Returns the bytes of a variable's values."""
    return int(np.prod(variable.shape)) * int(tf.as_dtype(variable.dtype).size)


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


def shard_sizes(rows: int, count: int) -> list[int]:
    """Returns the number of rows of each of `count` shards: 10 rows in 4 shards are 3, 3, 2 and 2."""
    return [rows // count + (index < rows % count) for index in range(count)]


@dataclass(frozen=True)
class Block:
    """Some contiguous rows of a shard.

    Args:
        shard: the TensorFlow variable that stores them.
        first: the index of the first row in the whole variable.
        count: the number of rows.
        start: the index of the first row in the shard.
    """

    shard: Any
    first: int
    count: int
    start: int

    @property
    def bytes(self) -> int:
        """The size of the rows."""
        return self.count * _row_bytes(self.shard)

    @property
    def device(self) -> str:
        """The device of the shard."""
        return str(self.shard.device)

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.shard.dtype

    def read(self) -> tf.Tensor:
        """Reads the rows; no other rows are copied from the ps."""
        with tf.device(self.shard.device):
            return self.shard.sparse_read(tf.range(self.start, self.start + self.count))

    def write(self, value: Any) -> None:
        """Assigns the rows.

        Args:
            value: a tensor or array of their shape, on any device.
        """
        with tf.device(self.shard.device):
            tf.raw_ops.ResourceStridedSliceAssign(
                ref=self.shard.handle, begin=[self.start], end=[self.start + self.count], strides=[1], value=value
            )


@dataclass(frozen=True)
class Whole:
    """A variable that is not sharded; a mirrored variable is one of these.

    Args:
        stored: the TensorFlow variable.
    """

    stored: Any

    @property
    def bytes(self) -> int:
        """The size of the variable."""
        return variable_bytes(self.stored)

    @property
    def device(self) -> str:
        """The device of the variable."""
        return str(self.stored.device)

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.stored.dtype

    def read(self) -> tf.Tensor:
        """Reads the variable."""
        return tf.convert_to_tensor(self.stored)

    def write(self, value: Any) -> None:
        """Assigns the variable."""
        self.stored.assign(value)


def pieces(variable: keras.Variable) -> Iterator[Block | Whole]:
    """Yields the parts in which a variable is copied: the blocks of a sharded variable, or the whole variable."""
    whole = stored(variable)
    if isinstance(whole, ShardedVariable):
        yield from blocks(whole)
    else:
        yield Whole(whole)


def blocks(variable: ShardedVariable) -> Iterator[Block]:
    """Yields the rows of a sharded variable in blocks, in order.

    Blocks end at the ends of shards and at multiples of a number of rows that does not depend on the number of shards.
    So a checkpoint can be restored with another number of shards, and little of it is read twice.
    """
    step = max(1, BLOCK_BYTES // max(1, _row_bytes(variable)))
    offset = 0
    for shard in variable.variables:
        end = offset + int(shard.shape[0])
        bounds = [offset, *range((offset // step + 1) * step, end, step), end]
        for first, after in itertools.pairwise(bounds):
            yield Block(shard, first, after - first, first - offset)
        offset = end


def _row_bytes(variable: Any) -> int:
    return variable.dtype.size * int(np.prod(variable.shape[1:]))
