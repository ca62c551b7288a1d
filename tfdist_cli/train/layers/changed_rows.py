"""The rows of a dynamic table that have changed since the last checkpoint, with their slots and their index."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist_cli.train.layers.row_index import RowIndex
from tfdist_cli.train.layers.row_keys import read, written
from tfdist_cli.train.tf_compat.functions import function_kept_whole
from tfdist_cli.train.variables.rows import assign_rows, rows_of
from tfdist_cli.train.variables.sharding import BLOCK_BYTES, parts

# The ops that read and write rows need the memory of the variable, which is on its ps: as functions they run there.
_gather, _read = map(function_kept_whole, (rows_of, read))


@function_kept_whole
def _scatter(shard: Any, rows: tf.Tensor, values: tf.Tensor) -> None:
    assign_rows(shard, rows, values)


@function_kept_whole
def _write(shard: Any, rows: tf.Tensor, values: tf.Tensor) -> None:
    written(shard, rows, values)


@dataclass(frozen=True, eq=False)
class RowsPiece:
    """Some changed rows of a shard: a piece to write, as `Block` and `Whole` are.

    Args:
        shard: TensorFlow's variable, a shard of a table, of one of its slots, or of a variable of its index.
        row_shape: the shape of a row in it; () in an index.
        numbers: the rows within the shard, int32, shape (count,), on its device.
        first: the position of the first one among all changed rows of the table.
        count: how many there are.
    """

    shard: Any
    row_shape: tuple[int, ...]
    numbers: tf.Tensor
    first: int
    count: int

    @property
    def bytes(self) -> int:
        """The size of the rows."""
        return self.count * _row_bytes(self.shard, self.row_shape)

    @property
    def dtype(self) -> tf.DType:
        """The type of the values."""
        return self.shard.dtype

    def read(self) -> tf.Tensor:
        """Reads the rows, shape (count, *row_shape)."""
        with tf.device(self.shard.device):
            return (_gather if self.row_shape else _read)(self.shard, self.numbers)


class ChangedRows:
    """The rows of one table that have changed since they were last asked for.

    Args:
        index: the index of the table, which tracks changes.

    Attributes:
        count: how many rows have changed.
    """

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._numbers = index.take_changes()
        self._counts = [int(tf.size(own)) for own in self._numbers]
        self.count = sum(self._counts)
        self._pieces = {id(variable): list(self._cut(variable)) for variable in index.row_variables}

    def pieces(self, variable: keras.Variable) -> list[RowsPiece] | None:
        """Returns the changed rows of a variable in pieces; None if the variable is no part of the table."""
        return self._pieces.get(id(variable))

    def numbers(self) -> np.ndarray:
        """Returns the numbers of the rows in the table, ascending, int32, shape (count,)."""
        own = zip(self._numbers, self._index.first_rows, strict=True)
        return np.concatenate([numbers.numpy() + first for numbers, first in own])

    def _cut(self, variable: keras.Variable) -> Iterator[RowsPiece]:
        row_shape = self._index.row_shape(variable)
        first = 0
        for shard, numbers, count in zip(parts(variable), self._numbers, self._counts, strict=True):
            step = max(1, BLOCK_BYTES // _row_bytes(shard, row_shape))
            for start in range(0, count, step):
                size = min(step, count - start)
                with tf.device(shard.device):
                    yield RowsPiece(shard, row_shape, numbers[start : start + size], first + start, size)
            first += count


def write_rows(index: RowIndex, variable: keras.Variable, numbers: np.ndarray, values: tf.Tensor) -> None:
    """Writes rows of a variable that belongs to a table.

    Args:
        index: the index of the table.
        variable: the table, one of its slots, or a variable of its index.
        numbers: the rows in the table, ascending, shape (n,).
        values: shape (n, …).
    """
    starts = np.searchsorted(numbers, index.first_rows)
    ends = [*starts[1:], len(numbers)]
    write = _scatter if index.row_shape(variable) else _write
    for shard, first, start, end in zip(parts(variable), index.first_rows, starts, ends, strict=True):
        if start < end:
            with tf.device(shard.device):
                write(shard, tf.constant(numbers[start:end] - first, tf.int32), values[start:end])


def _row_bytes(shard: Any, row_shape: tuple[int, ...]) -> int:
    return shard.dtype.size * int(np.prod(row_shape, dtype=np.int64))
