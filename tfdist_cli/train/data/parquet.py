"""Rows of Parquet files as examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist_cli.storage.parquet import Column, ParquetTable, Piece
from tfdist_cli.train.data import files
from tfdist_cli.train.data.files import Files, list_files
from tfdist_cli.train.data.shard import Shard
from tfdist_cli.train.data.streams import STREAMS, stream
from tfdist_cli.train.tf_compat.data import register_python

_KIND = "parquet"


def read_parquet(pattern: Files, columns: Sequence[str], shard: Shard | None = None) -> tf.data.Dataset:
    """Returns the rows of Parquet files as dictionaries of the columns. Only the row groups of the shard are read.

    Args:
        pattern: such as `data/*.parquet` or `s3://bucket/data/*.parquet`, or a list of files.
        columns: the names of the columns: numbers, booleans, or lists of them that all have the same length.
        shard: returns only one of `shard.count` equal parts of the rows, whatever the number of files; None for all.

    Raises:
        UsageError: a file cannot be read, or a column cannot be read as numbers.
    """
    register()
    table = ParquetTable.of(list_files(pattern), columns)
    pieces = table.part(shard.index, shard.count) if shard else table.part(0, 1)
    size = sum(column.bytes for column in table.columns)
    chunk = tf.TensorSpec([None, size], tf.uint8)

    def rows(piece: tf.Tensor) -> tf.data.Dataset:
        return stream(piece, _KIND, chunk).map(lambda matrix: _columns(matrix, table.columns)).unbatch()

    names = tf.constant([piece.as_text() for piece in pieces], tf.string)
    found = tf.data.Dataset.from_tensor_slices(names).flat_map(rows)
    return found.apply(tf.data.experimental.assert_cardinality(sum(piece.stop - piece.start for piece in pieces)))


def _columns(matrix: tf.Tensor, columns: Sequence[Column]) -> dict[str, tf.Tensor]:
    """Returns the columns in a matrix of bytes."""
    found, start = {}, 0
    for column in columns:
        found[column.name] = _numbers(matrix[:, start : start + column.bytes], column)
        start += column.bytes
    return found


def _numbers(matrix: tf.Tensor, column: Column) -> tf.Tensor:
    dtype = tf.as_dtype(column.dtype)
    shape = [] if column.width is None else [column.width]
    if dtype.size > 1:
        numbers = tf.bitcast(tf.reshape(matrix, [-1, *shape, dtype.size]), dtype)
    else:
        same = tf.reshape(matrix, [-1, *shape])
        numbers = tf.cast(same, dtype) if dtype == tf.bool else tf.bitcast(same, dtype)
    return tf.ensure_shape(numbers, [None, *shape])


# What each task runs, in Python.


def _open(piece: bytes) -> Any:
    found = Piece.of_text(piece)
    return STREAMS.add(found.rows(), np.zeros((0, found.row_bytes), np.uint8))


def register() -> None:
    """Makes this process able to read files for pipelines that another process may have made."""
    files.register()
    register_python(_KIND, _open, by_pipelines=True)
